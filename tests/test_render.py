"""Rendered scripts: bash, shellcheck and TorchTitan read them as meant."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook.base.paths import ROOT
from cookbook.base.yamlfile import parse_yaml
from cookbook.config.cluster import load_cluster
from cookbook.config.dialect.classes import REFUSED, class_of
from cookbook.config.dialect.names import FACTS
from cookbook.config.options import Setting
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe
from cookbook.config.request import HANDED_OVER, cell_of_script, read_script
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.config.validate import validation_errors
from cookbook.launch.script import render_script, sbatch_lines
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from cookbook.run.run import read_run
from cookbook.run.states import cell_states
from cookbook.supervise.script import cell_environment, write_script
from tests.cells import EP_BACKENDS, POINTS, PRECISIONS, Point, walked
from tests.check_cells import with_options
from tests.golden import GOLDEN, LAUNCHERS, golden_scripts, launchers
from tests.programs import write_program
from tests.script_run import ScriptRunner, Start, carried
from tests.test_stack import ANY_TEXT, NOT_HERE, TEXTS
from tests.waiting import HANG_S

CHECKED_IN = {name: (ROOT / name).read_text(encoding="utf-8") for name in LAUNCHERS}
CELLS = {str(point): point.cell() for point in POINTS}
SCRIPTS = {name: render_script(cell) for name, cell in CELLS.items()} | CHECKED_IN
# Options whose values the rules look at, and those that the scripts set.
JUDGED = {"model.name", "model.flavor", "training.dataset", "checkpoint.initial_load_path"}
JUDGED |= {"activation_checkpoint.selective_ac_option", "checkpoint.folder", "data.text_key"}
OWN = ("job.dump_folder", "job.description", "experimental.custom_import", "cookbook.")
FREE = {name for name in TEXTS if not name.startswith(OWN) and "save_" not in name}
FREE -= NOT_HERE | JUDGED | {name for name in FREE if class_of(name) == REFUSED}
FREE -= {fact.option for fact in FACTS if fact.allowed}


@pytest.fixture
def runner(tmp_path: Path) -> ScriptRunner:
    return ScriptRunner(tmp_path)


def test_the_recorded_scripts_are_rendered_exactly_so() -> None:
    recorded = {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.iterdir()}
    assert golden_scripts() == recorded, "renew them: make golden"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_scripts_at_the_top_are_rendered_exactly_so(name: str) -> None:
    assert launchers()[name] == CHECKED_IN[name], "renew it: make golden"
    assert os.access(ROOT / name, os.X_OK)
    # They are checked in, so they name no folder of this machine.
    assert str(ROOT) not in CHECKED_IN[name]


def test_bash_and_shellcheck_find_nothing_in_any_script(tmp_path: Path) -> None:
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        assert os.environ.get("CI") != "true", "apt-get install shellcheck, or setup.sh --dev"
        pytest.skip("shellcheck is missing; run: apt-get install shellcheck, or setup.sh --dev")
    for name, text in SCRIPTS.items():
        (tmp_path / name.replace("/", "_")).write_text(text, encoding="utf-8")
    # What attempts run.
    for text in {read_script(carried(text)).command for text in SCRIPTS.values()}:
        own = f"#!/bin/bash\n# shellcheck disable=SC2154\nTRAIN_ARGS=()\n{text}"
        (tmp_path / f"command-{len(list(tmp_path.iterdir()))}").write_text(own, encoding="utf-8")
    files = walked([str(path) for path in sorted(tmp_path.iterdir())])
    loop = 'for file; do bash -n "${file}" || echo "${file}"; done'
    done = subprocess.run(["bash", "-c", loop, "bash", *files], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""
    # Scripts that are the same but for names and values need no second look.
    seen: dict[str, str] = {}
    for file in files:
        text = Path(file).read_text(encoding="utf-8")
        shape = re.sub(r"(?m)^ *(#.*|[A-Z_]+=.*)$", "", text.partition(HANDED_OVER)[0])
        seen.setdefault(shape, file)
    chosen = [*seen.values(), *(file for file in files if Path(file).name in LAUNCHERS)]
    done = subprocess.run([shellcheck, *chosen], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_sbatch_makes_of_a_script(name: str) -> None:
    # It stops reading at the first command.
    header, _, rest = SCRIPTS[name].partition("\nset -euo pipefail\n")
    assert all(line.startswith("#") for line in header.split("\n") if line)
    on_slurm = name in LAUNCHERS or CELLS[name].cluster.scheduler == "slurm"
    assert ("\n#SBATCH" in header, "\n#SBATCH" in rest) == (on_slurm, False)
    assert ("\n  srun --n" in rest, "\n  torchrun --n" in rest) == (on_slurm, not on_slurm)
    # It runs a copy elsewhere: no path comes from the script's own.
    assert "BASH_SOURCE" not in rest
    (last,) = re.findall(r".*[$]0.*", rest)
    assert last.endswith('--script="$(realpath "$0")" -- "$@" <<\'CELL\'')


def _start(
    runner: ScriptRunner, root: Path, script: Path | str, *words: str, **environment: str
) -> Start:
    shutil.rmtree(runner.folder / "runs", ignore_errors=True)
    cell = {"CELL_DIR": str(runner.folder / "runs/mine/cell"), **environment}
    return runner.run(root / script, *words, root=root, environment=cell)


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ep_backend", EP_BACKENDS)
def test_a_launcher_and_the_cells_own_script_train_the_same(
    name: str, precision: str, ep_backend: str
) -> None:
    cell = Point(LAUNCHERS[name], precision, ep_backend, "soperator-b200").cell()
    chosen = {"PRECISION": precision, "EP_BACKEND": ep_backend}
    by_launcher = cell_of_script(carried(CHECKED_IN[name]), (), chosen, cell.nodes)
    by_cell = cell_of_script(carried(render_script(cell)), (), {}, cell.nodes)
    asked = replace(cell, refused=None).job_record()
    assert by_launcher.job_record() == by_cell.job_record() == asked
    for found in (by_launcher, by_cell):
        assert [str(one) for one in validation_errors(found)][:1] == [cell.refused][
            : bool(cell.refused)
        ]
    # They run the same bash.
    (one, other) = (read_script(carried(text)) for text in (CHECKED_IN[name], render_script(cell)))
    assert (one.command, one.run) == (other.command, other.run)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RECIPE": "$(touch executed)"}, "RECIPE: unknown value '$(touch executed)'"),
        ({"VENV": "/nowhere"}, "VENV: no Python at /nowhere; run: bash "),
        ({"COOKBOOK_ROOT": "/usr"}, "COOKBOOK_ROOT: found '/usr', which is not the cookbook's"),
    ],
)
def test_a_script_says_what_is_wrong_and_starts_nothing(
    runner: ScriptRunner, checkout: Path, environment: dict[str, str], message: str
) -> None:
    start = _start(runner, checkout, "train_671b.sh", **environment)
    assert (start.status, start.torchrun, start.srun) == (2, [], [])
    assert message in start.output
    assert len(start.output.splitlines()) == 1
    assert not (runner.folder / "runs").exists()
    assert not list(runner.folder.rglob("executed"))


# Two nodes of the 32: EP 8 divides their ranks.
_TWO_NODES = "--parallelism.expert_parallel_degree=8"


def test_a_resumed_cell_is_a_new_attempt(runner: ScriptRunner, checkout: Path) -> None:
    cell, here = checkout / "runs/mine/try1", {"CELL_DIR": "runs/mine/try1"}
    for attempt in range(2):
        launcher = checkout / "train_671b.sh"
        start = runner.run(launcher, _TWO_NODES, root=checkout, environment=here)
        assert start.status == 0, start.output
        assert start.environment["COOKBOOK_ATTEMPT_DIR"] == str(cell / f"attempt-{attempt}")
        assert f"--job.dump_folder={cell}" in start.train_args
        assert f"--metrics.save_tb_folder=attempt-{attempt}/tb" in start.train_args
        assert start.folder == str(checkout)
    run = read_run(cell.parent)
    assert (run.scheduler, [one.name for one in run.cells]) == ("slurm", ["try1"])
    assert read_record(run.cell("try1").record).name == "671b-bf16-standard"
    (state,) = cell_states(run)
    assert (state.cell, state.state) == ("try1", "finished"), state


def test_a_folder_of_something_else_is_refused(runner: ScriptRunner, checkout: Path) -> None:
    runs = runner.folder / "runs"

    def refused(folder: object, script: str = "train_671b.sh", **environment: str) -> str:
        here = {"CELL_DIR": str(folder), **environment}
        start = runner.run(checkout / script, _TWO_NODES, root=checkout, environment=here)
        assert (start.status, start.torchrun) == (2, [])
        return start.output

    assert f"try CELL_DIR={runs}/try1/671b-bf16-standard" in refused(runs / "try1")
    assert not runs.exists()
    file = runner.folder / "file"
    file.touch()
    for folder in (file, file.parent, "/"):
        assert "is no folder of a cell; name one below runs/" in refused(folder)
    # Another precision, and another recipe, left in the environment or named by mistake.
    cell = runs / "mine/cell"
    assert _start(runner, checkout, "train_671b.sh", _TWO_NODES).status == 0
    before = (cell / "cell.yaml").read_bytes(), (cell / "train.sh").read_bytes()
    said = refused(cell, PRECISION="mxfp8")
    assert "holds a cell of deepseek_v3_671b bf16 standard, and this job trains" in said
    assert "deepseek_v3_671b mxfp8 standard; unset CELL_DIR, or set PRECISION" in said
    assert "this job trains deepseek_v3_16b bf16 standard" in refused(cell, "train_16b.sh")
    assert ((cell / "cell.yaml").read_bytes(), (cell / "train.sh").read_bytes()) == before


@pytest.mark.parametrize(
    ("nodes", "words", "log_rank", "shown"),
    [
        ("32", [], "0,128", "0"),
        ("1", ["--parallelism.expert_parallel_degree=4"], "0,4", "0,4"),
        ("32", ["--parallelism.pipeline_parallel_degree=1"], "0", "0"),
    ],
)
def test_the_log_shows_the_rank_with_the_loss(
    runner: ScriptRunner, checkout: Path, nodes: str, words: list[str], log_rank: str, shown: str
) -> None:
    start = _start(runner, checkout, "train_671b.sh", *words, SLURM_JOB_NUM_NODES=nodes)
    assert start.status == 0, start.output
    assert start.environment["LOG_RANK"] == log_rank
    assert f"--local-ranks-filter={shown}" in start.torchrun
    assert f"--nnodes={nodes}" in start.torchrun


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--job.dump_folder=/x"], {}, "job.dump_folder is set by the scripts; set CELL_DIR"),
        (["--model.hf_assets_path=/no"], {}, "/no/tokenizer.json is not there; run: bash setup.sh"),
        ([], {"PRECISION": "mxfp8_linear"}, "set parallelism.tensor_parallel_degree 1, or compile"),
        ([], {"EP_BACKEND": "deepep"}, "not installed: deep_ep; run: bash setup.sh"),
    ],
)
def test_the_final_words_are_judged(
    runner: ScriptRunner,
    checkout: Path,
    words: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    nodes = {"SLURM_JOB_NUM_NODES": "32"}
    start = _start(runner, checkout, "train_671b.sh", *words, **nodes, **environment)
    assert (start.status, start.torchrun, start.srun) == (2, [], []), start.output
    assert message in start.output
    assert len(start.output.splitlines()) == 1
    assert not (runner.folder / "runs").exists()


@pytest.mark.parametrize("machine", ["api.wandb.ai", "api.example.org"])
def test_wandb_key(runner: ScriptRunner, checkout: Path, tmp_path: Path, machine: str) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {machine} login user password secret\n")
    options = {"SLURM_JOB_NUM_NODES": "32", "NETRC": str(netrc)}
    start = _start(runner, checkout, "train_16b.sh", **options)
    assert ("--metrics.enable_wandb" in start.train_args) == (machine == "api.wandb.ai")
    assert "--metrics.enable_tensorboard" in start.train_args
    cell = Point("deepseek_v3_16b", "bf16", "standard", "soperator-b200").cell()
    asked = cell.options.override({"metrics.enable_wandb": Setting(False, "")})
    script = tmp_path / "train.sh"
    script.write_text(render_script(replace(cell, options=asked), checkout))
    start = _start(runner, checkout, script, **options)
    given = [word for word in start.train_args if "enable_wandb" in word]
    assert given[-1] == "--metrics.no_enable_wandb"


# A variable of the environment cannot hold every option's text: torchrun's argv and this are apart.
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    texts=st.lists(ANY_TEXT, min_size=len(FREE), max_size=len(FREE)),
    # A profile may not export what a user expects to be expanded.
    variables=st.lists(ANY_TEXT.filter(lambda text: not re.search(r"\$\{?[A-Za-z_]", text))),
    description=ANY_TEXT.filter(bool),
    words=st.lists(ANY_TEXT, max_size=5),
    quote=st.sampled_from("'\""),
)
def test_texts_reach_torchrun_unchanged_and_none_is_executed(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    variables: list[str],
    description: str,
    words: list[str],
    quote: str,
) -> None:
    folder = tmp_path_factory.mktemp("yaml")
    # Scripts take it for the cookbook's; its name asks for quotes.
    root = folder / "a 'cookbook' $(touch executed)"
    root.mkdir()
    (root / "submit.py").touch()
    options = dict(zip(sorted(FREE), texts, strict=True))
    asked_environment = {f"TEXT_{number}": text for number, text in enumerate(variables) if text}
    recipe_file, cluster_file = folder / "recipe.yaml", folder / "cluster.yaml"
    recipe = {"name": "any", "description": description, **options}
    cluster = {"description": description, "scheduler": "slurm", "environment": asked_environment}
    for path, mapping, rest in (
        (recipe_file, recipe, "nodes: 2\nmodel: {name: deepseek_v3, flavor: debugmodel}\n"),
        (cluster_file, cluster, "nodes: 2\nranks_per_node: 2\n"),
    ):
        # Quoted: PyYAML's dumper takes `1e-8` for a text, as YAML 1.1 does.
        text = yaml.safe_dump(mapping, allow_unicode=True, default_style=quote)
        path.write_text(text + rest, encoding="utf-8")
    overlays = load_precision("bf16"), load_ep_backend("standard")
    parts = load_recipe(str(recipe_file)), *overlays, load_cluster(str(cluster_file))
    cell = resolve_cell(merge_config(*parts))
    assert {name: cell.options[name] for name in options} == options
    script = folder / "train.sh"
    script.write_text(render_script(cell, root), encoding="utf-8", newline="")
    runner = ScriptRunner(folder / "runner")
    asks = 'printf \'%s\\0\' "$@" >"${RECORDS}/python"\ncat >"${RECORDS}/carried"\n'
    write_program(runner.venv / "bin/python", f"#!/bin/bash\n{asks}")
    start = runner.run(script, *words, root=root, environment={"COOKBOOK_ROOT": ""})
    assert start.status == 0, start.output
    records = runner.folder / "records"
    asked = (records / "python").read_bytes().decode().split("\0")[:-1]
    assert asked[asked.index("--") + 1 :] == words
    # What the supervisor makes of it is the same cell.
    file = parse_yaml((records / "carried").read_text(encoding="utf-8"), script)
    found = replace(cell_of_script(file, (), {}, cell.nodes), refused=None)
    record = replace(found.job_record(), command=read_script(file).command)
    assert record == replace(replace(cell, refused=None).job_record(), command=record.command)
    folder_of = CellFolder(folder / "cell $(touch executed)")
    job = {"PATH": f"{runner.programs}:{os.environ['PATH']}", "RECORDS": str(records)}
    job |= {"SLURM_CPUS_ON_NODE": "8", "VENV": str(runner.venv)}
    with patch.dict(os.environ, cell_environment(record, job), clear=True):
        attempt = folder_of.attempt(0)
        environment = write_script(
            folder_of, attempt, record, job, {}, ["w-0", "w-1"], "10.0.0.7", {}
        )
    write_program(runner.venv / "bin/python", '#!/bin/bash\nshift 2; exec "$@"\n')
    done = subprocess.run(["bash", attempt.script], env=environment, capture_output=True)
    assert done.returncode == 0, done
    given = (records / "torchrun").read_bytes().decode().split("\0")[:-1]
    assert {f"--{name}={text}" for name, text in options.items()} <= set(given)
    assert f"--job.description={cell.description}" in given
    assert f"--job.dump_folder={folder_of.path}" in given
    seen = (records / "environment").read_bytes().decode().split("\0")
    assert {f"{name}={text}" for name, text in environment.items()} - set(seen) == set()
    assert {f"{name}={text}" for name, text in asked_environment.items()} <= set(seen)
    assert not list(folder.rglob("executed")) and not Path("executed").exists()
    lines = script.read_text(encoding="utf-8").split("\n")
    expected = [f"#SBATCH {line}" for line in sbatch_lines(cell)]
    assert [line for line in lines if line[:7] == "#SBATCH"] == expected


def test_what_a_recipe_says_of_wandb_counts_after_the_environments_variables() -> None:
    named = {"wandb.project": "ours", "wandb.group": "first", "wandb.tags": ["a", "b"]}
    record = with_options(Point("debug", "bf16", "standard", "local").cell(), named).job_record()
    found = cell_environment(record, {"WANDB_API_KEY": "key", "WANDB_RUN_GROUP": "second"})
    names = ("PROJECT", "RUN_NAME", "RUN_GROUP", "TAGS")
    values = ["ours", "debug-bf16-standard", "second", "a,b"]
    assert [found[f"WANDB_{name}"] for name in names] == values
    assert "WANDB_TAGS" not in cell_environment(record, {"HOME": "/nowhere"})
