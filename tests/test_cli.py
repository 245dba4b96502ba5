"""Command lines, right and wrong: what `submit.py` prints and writes, and its exit status."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.cli.inspect import write_output
from cookbook.config.recipe import names_in
from cookbook.run.run import new_record
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


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_a_file_of_ones_own_is_a_recipe(runs: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    text = (ROOT / "recipes/debug.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("name: debug", "name: mine"), encoding="utf-8")
    shown = submit("show", str(path), "--cluster", "local", runs=runs)
    assert yaml.safe_load(shown.stdout)["name"] == "mine-bf16-standard"


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


@pytest.mark.parametrize("minor", [3, 7])
def test_a_device_stays_a_device(tmp_path: Path, minor: int) -> None:
    # Copies of /dev/null and /dev/full: root may replace the real ones.
    device = tmp_path / "device"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    try:
        write_output("--figure", str(device), "text")
    except InputError as error:
        assert minor == 7 and "cannot be written: No space left on device" in str(error)
    assert stat.S_ISCHR(device.stat().st_mode)


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


def test_a_user_without_a_passwd_entry_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    record = new_record("a", cluster="local", scheduler="local", stack="2026.02", cells=[])
    assert record.user == "987654"


def test_a_venv_in_a_private_home_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/python").symlink_to(sys.executable)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(tmp_path / "home/python")
    (tmp_path / "home").chmod(0o700)
    for folder in (*tmp_path.parents, tmp_path):
        if str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    shutil.copy(ROOT / "submit.py", tmp_path)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", tmp_path / "submit.py"],
        env={"PATH": "/usr/bin:/bin", "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "its bin/python does not start: Permission denied" in done.stderr
