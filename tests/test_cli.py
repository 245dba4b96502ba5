"""Command lines, right and wrong: what `submit.py` prints and writes, and its exit status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cookbook.config.recipe import names_in
from tests.submit import ROOT, environment, listing, submit

VERBS = ["list", "show", "render", "new", "run", "sweep", "status", "logs", "cancel", "report"]
VERBS += ["check", "check-line", "doctor", "profile", "plan", "compare"]
RENDER = ("render", "debug", "--cluster", "soperator-b200")


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


def test_every_verb_has_help_and_a_near_miss_is_named(runs: Path) -> None:
    whole = submit(runs=runs)
    assert whole == submit("--help", runs=runs) and (whole.status, whole.stderr) == (0, "")
    for verb in VERBS:
        answer = submit(verb, "--help", runs=runs)
        assert (answer.status, answer.stderr) == (0, "")
        assert answer.stdout.startswith(f"usage: submit.py {verb}") and verb in whole.stdout
        wrong = submit(f"{verb}x", runs=runs)
        assert (wrong.status, wrong.stdout) == (2, "") and f"did you mean '{verb}'?" in wrong.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list"],
        ["show", "debug", "--cluster", "soperator-b200"],
        RENDER,
        ["sweep", "matrix", "--dry-run", "--cluster", "soperator-b200"],
        ["status"],
    ],
)
def test_the_login_node_never_waits_for_heavy_imports(runs: Path, words: list[str]) -> None:
    light = words[0] in ("--help", "list")
    program = (
        "import sys\nfrom cookbook.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'torchtitan', 'submitit', 'numpy', 'matplotlib'}\n"
        f"heavy |= {{'rich.console', 'jinja2'}} if {light} else set()\n"
        "sys.exit(f'imported: {heavy}' if heavy & set(sys.modules) else 0)\n"
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
    printed = submit(*RENDER, runs=runs).stdout
    assert printed.startswith("#!/bin/bash\n") and printed.count("#SBATCH") >= 5
    assert submit(*RENDER, "-o", "-", runs=runs).stdout == printed
    target = tmp_path / "new folder" / "a.sh"
    answer = submit(*RENDER, "-o", str(target), runs=runs)
    assert (answer.status, answer.stdout) == (0, "")
    assert answer.stderr == f"wrote {target}: debug-bf16-standard for soperator-b200\n"
    # It names itself.
    assert target.read_text(encoding="utf-8") == printed.replace("train.sh", "a.sh")
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_stand_in_is_not_written_in_place_of_a_recipe(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.sh"
    words = ["render", "deepseek_v3_671b", "--cluster", "local", "-o", str(target)]
    answer = submit(*words, runs=runs)
    assert (answer.status, answer.stdout) == (2, "") and not target.exists()
    assert "would train debug in place of deepseek_v3_671b" in answer.stderr


def test_a_dry_run_submits_nothing_and_shows_the_plan(runs: Path) -> None:
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


def test_a_cluster_that_the_environment_names(runs: Path) -> None:
    wrong = {"COOKBOOK_CLUSTER": "locl"}
    answer = submit("run", "debug", "--dry-run", runs=runs, variables=wrong)
    assert answer.status == 2 and "COOKBOOK_CLUSTER: unknown cluster 'locl'" in answer.stderr
    # The command line wins.
    answer = submit("show", "debug", "--cluster", "h200-node", runs=runs, variables=wrong)
    assert (answer.status, yaml.safe_load(answer.stdout)["cluster"]) == (0, "h200-node")
