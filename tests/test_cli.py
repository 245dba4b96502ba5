"""Command lines, right and wrong: what `submit.py` prints, and its exit status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cookbook.config.names import names_in
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


CLUSTER_WORDS = ["--cluster", "soperator-b200"]


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


def test_a_reader_that_has_seen_enough_is_no_error(runs: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -1', "bash", sys.executable, "submit.py", "list"],
        cwd=ROOT,
        env=environment(runs),
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("recipes:\n", "")
