"""Command lines, right and wrong: what `submit.py` prints, and its exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cookbook.config.names import names_in
from tests.cells import STACK
from tests.submit import ROOT, environment, listing, submit

VERBS = ["list", "show", "render", "new", "run", "sweep", "status", "logs", "cancel", "report"]
VERBS += ["check", "check-line", "doctor", "profile"]
RECIPE = "name: mine\ndescription: mine\nnodes: 1\nmodel: {name: deepseek_v3, flavor: debugmodel}\n"
CLUSTER = "description: mine\nscheduler: slurm\nranks_per_node: 2\n"
SWEEP = "description: mine\nrecipes: [debug]\n"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "kept").touch()
    return folder


def test_list_names_everything(runs: Path) -> None:
    answer = submit("list", runs=runs)
    assert (answer.status, answer.stderr) == (0, "")
    for kind in ("", "precision", "ep_backend", "cluster", "sweep"):
        for name in names_in(kind):
            assert re.search(rf"(?m)^  {re.escape(name)}  +\S", answer.stdout)
    assert "(also: mxfp8_default)" in answer.stdout
    assert answer.stdout.count("(default here)") == 1


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_verb_has_help(runs: Path, verb: str) -> None:
    answer = submit(*([verb] if verb else []), "--help", runs=runs)
    assert (answer.status, answer.stderr) == (0, "")
    assert answer.stdout.startswith("usage: submit.py")
    # Of a verb its own; of the whole, all of them.
    named = [name for name in VERBS if name in answer.stdout]
    assert named == list(VERBS) if not verb else verb in named


def test_the_verbs_fit_a_terminal_of_80_columns(runs: Path) -> None:
    answer = submit("--help", runs=runs, variables={"COLUMNS": "80"})
    lines = answer.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    verbs = lines[lines.index("  VERB") + 1 : lines.index("options:") - 1]
    # Name and words stand on one line, and all words begin in one column.
    named = [re.fullmatch(r"( {4}([a-z-]+) +)\S.*", line) for line in verbs]
    assert {found[2] for found in named if found} >= set(VERBS)
    assert len({found and len(found[1]) for found in named}) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list"],
        ["show", "debug", "--cluster", "soperator-b200"],
        ["render", "debug", "--cluster", "soperator-b200"],
        ["sweep", "matrix", "--dry-run", "--cluster", "soperator-b200"],
        ["status"],
    ],
)
def test_the_login_node_never_waits_for_torch_or_submitit(runs: Path, words: list[str]) -> None:
    program = (
        "import sys\nfrom cookbook.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'torchtitan', 'submitit', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        env={**environment(runs), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_show_prints_the_cell_as_yaml_with_origins_on_request(runs: Path) -> None:
    words = ["show", "deepseek_v3_671b", "--precision", "mxfp8_default", "--ep-backend", "deepep"]
    words += ["--cluster", "soperator-b200", "--nodes", "16", "--set", "training.steps=7"]
    cell = yaml.safe_load(submit(*words, runs=runs).stdout)
    assert cell["name"] == "671b-mxfp8-deepep"
    assert (cell["nodes"], cell["ranks_per_node"]) == (16, 8)
    assert cell["options"]["training.steps"] == 7
    assert cell["environment"]["NVSHMEM_IB_ENABLE_IBGDA"] == "1"
    origins = yaml.safe_load(submit(*words, "--origins", runs=runs).stdout)["options"]
    assert origins["training.steps"] == {"value": 7, "from": "--set training.steps"}
    assert origins["model.converters"]["from"].startswith("recipes/precision/mxfp8.yaml:")


def test_render_prints_the_script_or_writes_it(runs: Path, tmp_path: Path) -> None:
    words = ["render", "debug", "--cluster", "soperator-b200"]
    printed = submit(*words, runs=runs).stdout
    assert printed.startswith("#!/bin/bash\n")
    assert printed.count("#SBATCH") >= 5
    target = tmp_path / "new folder" / "a.sh"
    answer = submit(*words, "-o", str(target), runs=runs)
    assert (answer.status, answer.stdout) == (0, "")
    # Its own name apart, in what it says.
    assert "sbatch train.sh" in printed
    assert target.read_text(encoding="utf-8") == printed.replace("train.sh", "a.sh")
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("name", "said"), [("train_my.sh", "train_my.sh"), ('"$(touch x)" `id`.sh', "train.sh")]
)
def test_a_written_script_calls_itself_by_its_name(
    runs: Path, tmp_path: Path, name: str, said: str
) -> None:
    folder = tmp_path / "scripts"
    words = ["render", "debug", "--cluster", "soperator-b200", "-o", str(folder / name)]
    assert submit(*words, runs=runs).status == 0
    answer = subprocess.run(
        ["env", "--unset=SLURM_JOB_ID", "bash", str(folder / name)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert answer.returncode == 2
    assert answer.stderr == f"{said}: runs inside a Slurm job; start it with: sbatch {said}\n"
    # What stands in a name is not run.
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_dry_run_submits_nothing_and_says_what_would_run(runs: Path) -> None:
    before = listing(runs)
    answer = submit("sweep", "matrix", "--dry-run", "--cluster", "local", runs=runs)
    # DeepEP's cells are refused.
    assert (answer.status, answer.stderr) == (1, "")
    assert "looked at: the rules, this environment; not: TorchTitan's build" in answer.stdout
    assert "deepseek_v3_671b is too large here" in answer.stdout
    assert "its stand-in debug runs instead" in answer.stdout
    for cell in ("bf16-standard", "bf16-deepep", "mxfp8-standard", "mxfp8-deepep"):
        assert f"debug-{cell}" in answer.stdout
    answer = submit("sweep", "convergence", "--dry-run", "--cluster", "local", runs=runs)
    assert "left out, being made for the large recipe: training.steps" in answer.stdout
    assert listing(runs) == before


def test_new_copies_a_recipe_with_its_comments(tmp_path: Path, runs: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("cookbook", "recipes", "templates"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("submit.py", "requirements.txt"):
        shutil.copy(ROOT / name, copy / name)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(copy / "submit.py"), *words],
            env=environment(runs),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    done = run("new", "mine", "--from", "deepseek_v3_671b")
    assert done.returncode == 0 and "submit.py run mine --dry-run" in done.stdout
    text = (copy / "recipes/mine.yaml").read_text(encoding="utf-8")
    assert text.count("#") > 10 and "published:" not in text
    shown = run("show", "mine", "--cluster", "soperator-b200")
    assert yaml.safe_load(shown.stdout)["name"] == "mine-bf16-standard"
    before = listing(copy / "recipes")
    for words, message in [
        (["mine", "--from", "debug"], "recipes/mine.yaml: exists already; choose another name"),
        (["a/b", "--from", "debug"], "NAME: found 'a/b', allowed: letters, digits"),
        (["other", "--from", "debgu"], "unknown recipe 'debgu'"),
    ]:
        done = run("new", *words)
        assert done.returncode == 2 and message in done.stderr
    assert listing(copy / "recipes") == before


def _files(folder: Path) -> dict[str, str]:
    """Files with one mistake each, by name, and a right one of each kind beside them."""
    texts = {
        "recipe": RECIPE,
        "misspelt_recipe": RECIPE.replace("nodes", "node"),
        "misspelt_option": RECIPE + "training: {step: 5}\n",
        "wrong_type": RECIPE + "training: {steps: five}\n",
        "syntax": RECIPE + "training: [\n",
        "twice": RECIPE + "name: again\n",
        "tabs": RECIPE + "training:\n\tsteps: 5\n",
        "no_stand_in": RECIPE + "stand_in: debgu\n",
        "published": RECIPE + "published: {source: a, tokens: {}}\n",
        "batch": RECIPE + "training: {global_batch_size: 7}\n",
        "heads": RECIPE + "parallelism: {tensor_parallel_degree: 2}\ntraining: {seq_len: 5}\n",
        "cluster": CLUSTER,
        "misspelt_cluster": CLUSTER + "partitoin: main\n",
        "misspelt_overlay": "description: mine\nneed: {}\n",
        "sweep": SWEEP,
        "misspelt_sweep": SWEEP + "precisions: [bf16]\n",
        "empty_sweep": SWEEP + "precision: []\n",
        "empty_axis": SWEEP + "vary: {training.steps: []}\n",
        "same_name": "description: mine\nrecipes: [recipe.yaml, twin.yaml]\n",
        "twin": RECIPE,
        "packages": "description: a\nneeds: {packages: ['torchao>=0.16']}\n",
        "dotted": "description: a\nneeds: {packages: [nope.sub]}\n",
        "uid": "description: a\nenvironment: {UID: 5}\n",
        "path": "description: a\nenvironment: {LD_LIBRARY_PATH: '/x:$LD_LIBRARY_PATH'}\n",
        "twin_synonym": "description: a\nsynonyms: [mxfp8_default]\n",
        "real_synonym": "description: a\nsynonyms: [bf16]\n",
        "dispatch": "description: a\nexpect: {dispatch: deepep}\n",
        "words": RECIPE + "parallelism.module_fqns_per_model_part: [['--training.steps=5']]\n",
        "long_name": RECIPE.replace("mine", "a" * 300, 1),
        "no_baseline": SWEEP + "baseline: {precision: mxfp8, ep_backend: standard}\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "latin.yaml").write_bytes(RECIPE.encode() + b"# \xe9\n")
    (folder / "folder.yaml").mkdir()
    return texts


CLUSTER_WORDS = ["--cluster", "soperator-b200"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "debgu"], "unknown recipe 'debgu'; allowed: debug, "),
        (["run", "debug", "--precision", "bf61"], "--precision: unknown precision 'bf61'; allowed"),
        (["run", "debug", "--ep-backend", "depep"], "--ep-backend: unknown EP backend 'depep'"),
        (["run", "debug", "--cluster", "locl"], "--cluster: unknown cluster 'locl'; allowed: h200"),
        (["sweep", "matrx"], "unknown sweep 'matrx'; allowed: convergence, "),
        (["sweep", "debug"], "write: python submit.py run debug"),
        (["run", "debug", "--set", "training.step=5"], "nearest: training.steps"),
        (["run", "debug", "--set", "training.steps"], "--set training.steps: has no value"),
        (["run", "debug", "--set", "training.steps=a"], "found the text 'a', allowed: a whole nu"),
        (["run", "debug", "--nodes", "33", *CLUSTER_WORDS], "--nodes: found 33, allowed: 1 to 32"),
        (["run", "debug", "--set", "training.steps=0"], "training.steps: found 0, allowed: 1 and"),
        (
            ["run", "debug", "--set", "training.steps=\u0665"],
            "found the text '\u0665', allowed: a wh",
        ),
        (
            ["run", "debug", "--set", "training.dataset=c5"],
            "found 'c5', allowed: c4, c4_test, c4_v",
        ),
        (["check", "debug", "--set", "model.name=llama3"], "found 'llama3', allowed: deepseek_v3"),
        (["run", "packages.yaml", "--precision", "packages.yaml"], "unknown key 'needs'"),
        (["run", "debug", "--precision", "packages.yaml"], "found 'torchao>=0.16', allowed: the n"),
        (
            ["run", "debug", "--precision", "dotted.yaml"],
            "found 'nope.sub', allowed: the name that",
        ),
        (
            ["run", "debug", "--precision", "uid.yaml"],
            "environment.UID: is a variable of bash or o",
        ),
        (
            ["run", "debug", "--precision", "path.yaml"],
            "environment.LD_LIBRARY_PATH: found '/x:$LD",
        ),
        (["run", "debug", "--precision", "twin_synonym.yaml"], "found 'mxfp8_default', which "),
        (["run", "debug", "--precision", "real_synonym.yaml"], "found 'bf16', which "),
        (
            ["run", "debug", "--precision", "dispatch.yaml"],
            "expect.dispatch: unknown key 'dispatch'",
        ),
        (["run", "words.yaml"], "a list may not be empty or begin with '-'"),
        (["run", f"{'a' * 300}.yaml"], "no such recipe file"),
        (["run", "long_name.yaml"], "letters, digits, '.', '-' and '_', at most 60"),
        (["check-line", "sbatch", "nothing.sh"], "check-line: names no script that is here; write"),
        (["run", "debug", "--nodes", "0"], "--nodes: found 0, allowed: 1 to "),
        (["run", "debug", "--nodes", "two"], "argument --nodes: invalid int value: 'two'"),
        (["run", "debug", "--node"], "expected one argument"),
        (["rnu", "debug"], "invalid choice: 'rnu'"),
        ([], "the following arguments are required: VERB; see: python submit.py --help"),
        (["run", "misspelt_recipe.yaml"], "misspelt_recipe.yaml:3: node: unknown key 'node'"),
        (["run", "misspelt_option.yaml"], "misspelt_option.yaml:5: training.step: TorchTitan"),
        (["run", "wrong_type.yaml"], "wrong_type.yaml:5: training.steps: found the text 'five'"),
        (["run", "syntax.yaml"], "syntax.yaml:6:1: YAML syntax: "),
        (["run", "twice.yaml"], "twice.yaml:5: name: stands twice, first in line 1"),
        (["run", "tabs.yaml"], "tabs.yaml:6:1: YAML syntax: "),
        (["run", "no_stand_in.yaml"], "no_stand_in.yaml:5: stand_in: unknown recipe 'debgu'"),
        (["run", "published.yaml"], "published.yaml:5: published.tokens: unknown key 'tokens'"),
        (["run", "batch.yaml", *CLUSTER_WORDS], "training.global_batch_size: 7 is not a multiple"),
        (["run", "heads.yaml", *CLUSTER_WORDS], "training.seq_len: 5 is not a multiple of TP x CP"),
        (["run", "latin.yaml"], "latin.yaml: is not UTF-8 text"),
        (["run", "folder.yaml"], "folder.yaml: is a folder, not a recipe file"),
        (["run", "missing.yaml"], "missing.yaml: no such recipe file"),
        (["run", "debug", "--cluster", "misspelt_cluster.yaml"], "did you mean 'partition'?"),
        (["run", "debug", "--precision", "misspelt_overlay.yaml"], "did you mean 'needs'?"),
        (["sweep", "misspelt_sweep.yaml"], "did you mean 'precision'?"),
        (["sweep", "empty_sweep.yaml"], "empty_sweep.yaml:3: precision: is empty: a sweep over"),
        (["sweep", "empty_axis.yaml"], "found an empty list, a sweep over nothing"),
        (["sweep", "same_name.yaml"], "two of its cells are called 'mine-bf16-standard'"),
        (["sweep", "no_baseline.yaml"], "no_baseline.yaml:3: baseline: unknown cell of the sweep"),
        (
            ["sweep", "matrix", *CLUSTER_WORDS, "--nodes", "7"],
            "32 does not divide 28 ranks of a stage; try 4: --set parallelism.expert_parallel_deg",
        ),
        (
            [
                "run",
                "deepseek_v3_16b",
                *CLUSTER_WORDS,
                "--set",
                "parallelism.expert_parallel_degree=48",
            ],
            "degree: 48 does not divide 256 ranks of a stage; try 32",
        ),
        (["show", "debgu"], "unknown recipe 'debgu'"),
        (
            ["render", "debug", "-o", "folder.yaml"],
            "folder.yaml: cannot be written: Is a directory",
        ),
        (["status", "nothing"], "unknown run 'nothing'"),
        (["logs", "nothing/cell"], "unknown run 'nothing'"),
        (["cancel", "nothing"], "unknown run 'nothing'"),
        (["report", "nothing"], "unknown run 'nothing'"),
        (["report"], "there is no run yet; start one"),
    ],
)
def test_wrong_input_is_status_2_and_one_line_and_leaves_nothing_behind(
    tmp_path: Path, runs: Path, words: list[str], message: str
) -> None:
    _files(tmp_path)
    before = listing(tmp_path)
    answer = submit(*words, runs=runs, cwd=tmp_path)
    assert message in answer.stderr
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr.startswith("submit.py")
    assert len(answer.stderr.splitlines()) == 1 and "Traceback" not in answer.stderr
    assert listing(tmp_path) == before


@pytest.mark.parametrize("word", [b"training.dataset=\xff", b"\xff=1"])
def test_bytes_that_are_no_text_are_refused(runs: Path, word: bytes) -> None:
    answer = submit("run", "debug", "--set", word, runs=runs)
    assert answer.status == 2
    assert len(answer.stderr.splitlines()) == 1
    assert listing(runs) == ["kept"]


def test_a_cluster_that_the_environment_names(runs: Path) -> None:
    answer = submit("run", "debug", runs=runs, variables={"COOKBOOK_CLUSTER": "locl"})
    assert answer.status == 2
    assert "COOKBOOK_CLUSTER: unknown cluster 'locl'" in answer.stderr
    # What the command line names counts.
    words = ["show", "debug", "--cluster", "h200-node"]
    answer = submit(*words, runs=runs, variables={"COOKBOOK_CLUSTER": "locl"})
    assert (answer.status, yaml.safe_load(answer.stdout)["cluster"]) == (0, "h200-node")


def test_where_no_cell_can_run_nothing_is_made(runs: Path) -> None:
    words = ["run", "deepseek_v3_671b", "--precision", "mxfp8_linear", *CLUSTER_WORDS]
    answer = submit(*words, runs=runs)
    assert answer.status == 1
    assert "no cell can run here; nothing was submitted" in answer.stderr
    assert "refused: MXFP8 linear layers with tensor parallelism" in answer.stdout
    assert listing(runs) == ["kept"]


def test_a_reader_that_has_seen_enough_is_no_error(runs: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -1', "bash", sys.executable, "submit.py", "list"],
        cwd=ROOT,
        env=environment(runs),
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("recipes:\n", "")


def test_options_of_cells_read_back_from_json(runs: Path) -> None:
    shown = submit("show", "deepseek_v3_16b", *CLUSTER_WORDS, runs=runs).stdout
    options = yaml.safe_load(shown)["options"]
    assert json.loads(json.dumps(options)) == options
    assert set(options) <= set(STACK.options)
