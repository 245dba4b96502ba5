"""`run` and `sweep`: which cells are checked, submitted and waited for; the words for sbatch."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import submitit

from cookbook.base.errors import JobError
from cookbook.base.paths import ROOT
from cookbook.check import check
from cookbook.check.check import Built
from cookbook.cli import run
from cookbook.cli.main import main
from cookbook.config import validate
from cookbook.config.cell import Cell
from cookbook.launch import submit as executor
from cookbook.launch.script import option_word, sbatch_options
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.excluded import exclude_nodes
from cookbook.run.record import read_record
from cookbook.run.run import Run, is_submit_locked, read_run
from cookbook.run.status import read_job, read_status
from tests.cells import Point
from tests.programs import write_program

SWEEP = ["sweep", "smoke", "--nodes", "1", "--cluster"]
FAILURE = {"error": "no such thing", "rank": 0, "place": "torchtitan/a.py:1", "kind": "ValueError"}
NAMES = [f"debug-{p}-{e}" for p in ("bf16", "mxfp8") for e in ("standard", "deepep")]
# A cell passes where nothing could be tried.
PASSED = Built(unavailable="no torch here")


class Machine:
    """What would build cells, train them and wait; it only notes what it is asked."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.submitted: list[str] = []
        self.waited_for: list[Run] = []
        self.failing: set[str] = set()

    def build(self, cells: Sequence[Cell]) -> list[Built]:
        self.built += [cell.name for cell in cells]
        return [Built(failure=FAILURE) if one.name in self.failing else PASSED for one in cells]

    def submit(self, run: Run, cells: Sequence[Cell], one_allocation: bool) -> list[str]:
        self.submitted += [cell.name for cell in cells if not cell.refused]
        return [str(number) for number, _ in enumerate(self.submitted, 7)]

    def wait(self, run: Run) -> int:
        self.waited_for.append(run)
        return 1


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    monkeypatch.setattr(check, "build_cells", machine.build)
    monkeypatch.setattr(executor, "submit_run", machine.submit)
    monkeypatch.setattr(run, "wait_for", machine.wait)
    monkeypatch.setattr(validate, "missing_here", lambda *_: [])
    return machine


def test_what_builds_is_submitted(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.failing = {NAMES[1]}
    # The status is that of the wait.
    assert main([*SWEEP, "soperator-b200"]) == 1
    said = capsys.readouterr()
    assert machine.built == NAMES
    assert "checking 4 cell(s) before requesting 32 GPUs (--no-check skips this)" in said.err
    assert machine.submitted == [NAMES[0], *NAMES[2:]]
    (run,) = machine.waited_for
    assert [cell.name for cell in run.cells] == NAMES
    refused = {cell.name: read_record(cell.record).refused for cell in run.cells}
    assert "no such thing" in (refused.pop(NAMES[1]) or "")
    assert set(refused.values()) == {None}


def test_an_unchecked_cell_is_submitted_unless_the_rules_refuse_it(
    machine: Machine, tmp_path: Path
) -> None:
    machine.failing = set(NAMES)
    # Where all are refused, nothing is made.
    assert main([*SWEEP, "soperator-b200"]) == 1
    assert (machine.submitted, machine.waited_for, list(tmp_path.iterdir())) == ([], [], [])
    machine.built.clear()
    assert main([*SWEEP, "soperator-b200", "--no-check", "--detach"]) == 0
    assert (machine.built, machine.submitted) == ([], NAMES)
    machine.submitted.clear()
    assert main(["sweep", "smoke", "--cluster", "local", "--no-check", "--detach"]) == 0
    # DeepEP needs GPUs.
    assert machine.submitted == NAMES[::2]


def test_nothing_is_built_for_a_plan_or_for_this_machine(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SWEEP, "soperator-b200", "--dry-run"]) == 0
    capsys.readouterr()
    assert main(["sweep", "smoke", "--cluster", "local", "--detach"]) == 0
    said = capsys.readouterr()
    assert (machine.built, machine.submitted) == ([], NAMES[::2])
    assert "checking" not in said.err and "submitted as process 7, 8" in said.out
    # What is emulated is announced.
    (line,) = [one for one in said.out.splitlines() if NAMES[2] in one]
    assert line.endswith("mxfp8 emulated (numerics only)")


def test_after_stand_ins_stands_what_the_large_recipe_would_do(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "matrix", "--cluster", "local"]) == 1
    *_, title, _, first, deepep, _, _, _ = capsys.readouterr().out.splitlines()
    assert "on soperator-b200 (8 B200 a node), tokens/s/GPU" in title
    assert re.fullmatch(r" +671b-bf16-standard, 32 node\(s\) +651 +6[0-9]{2} +1[0-9]{2}", first)
    assert re.search(r"671b-bf16-deepep.* 859 +1,[0-9]{3} ", deepep)
    # A recipe that trains as it is has none; neither has a model whose time is not known.
    main(["run", "debug", "--cluster", "local"])
    assert "What was too large" not in capsys.readouterr().out
    main(["run", "proxy", "--cluster", "local"])
    assert "too large" not in capsys.readouterr().out


def test_one_wrong_cell_fails_a_check(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "smoke", "--nodes", "1", "--cluster", "soperator-b200", "--json"]
    assert main(words) == 0
    assert machine.built == NAMES
    machine.failing = {NAMES[3]}
    assert main(words) == 1
    machine.built.clear()
    assert main([*words, "--rules-only"]) == 0
    assert machine.built == []


# It takes what it is given, but for the job of a number that is to be refused.
_SBATCH = """\
#!/bin/bash
cd "{folder}/taken"
count="$(find . -type f | wc -l)"
cp "${{@: -1}}" "${{count}}"
if [[ -e "../refuse-${{count}}" ]]; then
  echo "sbatch: error: Batch job submission failed: Invalid account" >&2
  exit 1
fi
echo "Submitted batch job $((4711 + count))"
"""
_SINFO = "#!/bin/sh\nfor n in 0 1 2 3; do echo \"worker-$n main*\"; done\necho 'worker-9 hidden'\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stand-ins for sbatch and sinfo; `taken` in it holds the batch files in turn."""
    folder = tmp_path / "slurm"
    (folder / "taken").mkdir(parents=True)
    write_program(folder / "bin/sbatch", _SBATCH.format(folder=folder))
    write_program(folder / "bin/sinfo", _SINFO)
    write_program(folder / "bin/srun", "")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    return folder


@pytest.fixture
def cells() -> list[Cell]:
    """Three that run, and between them one that is refused."""
    cell = Point("debug", "bf16", "standard", "soperator-b200").cell()
    a, no, b, c = (replace(cell, name=name) for name in ("a", "no", "b", "c"))
    return [a, replace(no, refused="does not fit"), b, c]


def test_each_cell_that_can_run_is_a_job_of_its_own(
    slurm: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run("smoke", cells)

    submit_one = executor._submit_to_slurm

    def submit(run: Run, cells: Sequence[Cell]) -> str:
        # Until all is submitted, a cell without a job is waited for.
        assert is_submit_locked(run.folder)
        return submit_one(run, cells)

    monkeypatch.setattr(executor, "_submit_to_slurm", submit)
    assert submit_run(run, cells) == ["4711", "4712", "4713"]
    assert not is_submit_locked(run.folder)
    jobs = [job and job.job_id for job in map(read_job, run.cells)]
    assert jobs == ["4711", None, "4712", "4713"]
    states = [read_status(cell).state for cell in run.cells]
    assert states == ["queued", "refused", "queued", "queued"]


def test_the_batch_file(slurm: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somebody/elses")
    monkeypatch.setenv("SLURM_NTASKS", "7")  # of a job that this is called in
    exclude_nodes({"worker-1": "GPU 3 is missing", "worker-2": "moved"}, hours=1)
    run = create_run("smoke", cells[:1])
    # `run --resume NAME`, called beside the run: the checkout, where sbatch runs, has no such path.
    monkeypatch.chdir(run.folder.parent)
    submit_run(read_run(Path(run.name)), cells[:1])
    lines = (slurm / "taken/0").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    options = sbatch_options(cells[0], exclude=["worker-1", "worker-2"])
    options |= {"output": f"{run.cell('a').job_files}/%j.log", "chdir": str(ROOT)}
    header = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert sorted(header) == sorted(option_word(name, value) for name, value in options.items())
    code = run.folder / "code" / (read_record(run.cell("a").record).code or "")
    started = {
        "PYTHONPATH": f"{code}:/somebody/elses",
        "PYTHONSAFEPATH": "1",
        "VENV": sys.prefix,
        # A requeue leaves them out for as long as they are on the list.
        "COOKBOOK_EXCLUDED": "worker-1,worker-2",
    }
    *before, command = [line for line in lines if line]
    script = "\n".join([*before, f"exec printenv {' '.join(started)}"])
    printed = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True)
    assert printed.stdout.split("\n")[:-1] == [*started.values()]
    # Slurm's signals go to the batch shell: it must be the supervisor by then.
    assert command.startswith(f"exec {sys.executable} ")
    (pickled,) = (run.folder / "job").glob("4711_submitted.pkl")
    # submitit's process becomes the supervisor, and its pickle holds nothing of the cookbook.
    job = submitit.helpers.DelayedSubmission.load(pickled)
    words = [sys.executable, "-m", "cookbook.supervise", str(run.cell("a").path)]
    assert (job.function, job.args) == (os.execv, (sys.executable, words))


@pytest.mark.parametrize("why", ["sbatch refused it: Batch job submission failed", "interrupted"])
def test_what_is_not_queued_has_failed_and_what_was_is_named(
    slurm: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (slurm / "refuse-1").touch()
    if why == "interrupted":  # by Ctrl-C
        told = Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr("cookbook.run.slurm.submission_error", told)
    run = create_run("smoke", cells)
    said = rf"b: {why}.*; queued before: job 4711; to queue the rest: .* --resume {run.name}"
    with pytest.raises(JobError, match=said):
        submit_run(run, cells)
    assert not is_submit_locked(run.folder)
    states = [(read_status(cell).state, read_job(cell) is not None) for cell in run.cells]
    assert states == [("queued", True), ("refused", False), ("failed", False), ("failed", False)]
    for name in ("b", "c"):
        assert (read_status(run.cell(name)).reason or "").startswith(f"not queued: {why}")
