"""Cells that share one allocation of a real Slurm: one wait in the queue, the same nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.config.cell import Cell
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.run import Run, read_run
from cookbook.run.states import cancel_run, cell_states
from cookbook.run.status import Cause, read_history
from tests.cells import Point
from tests.slurm_cluster import SlurmCluster
from tests.waiting import until

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parent.parent
# Each says that it began, and goes on when it is told to.
WAITS = 'touch "$CELL_DIR/began"; while ! [ -e "$CELL_DIR/go" ]; do sleep 0.1; done\n'


@pytest.fixture
def cell(two_nodes: Path) -> Cell:
    return Point("debug", "bf16", "standard", str(two_nodes)).cell()


def started(cell: Cell, *bodies: str) -> Run:
    """A run of a cell for each body, which stands in for the cell's train.sh; submitted as one."""
    cells = [replace(cell, name=f"cell-{n}") for n in range(len(bodies))]
    run = create_run("together", cells)
    for one, body in zip(run.cells, bodies, strict=True):
        one.script.write_text(body)
    assert len(submit_run(run, cells, one_allocation=True)) == 1
    return run


def states(run: Run) -> list[str]:
    return [state.state for state in cell_states(run)]


def job_of(run: Run) -> str:
    (job,) = {state.job_id for state in cell_states(run)}
    assert job is not None
    return job


def go(run: Run, number: int) -> None:
    (run.cells[number].path / "go").touch()


def began(run: Run, number: int) -> Callable[[], bool]:
    return (run.cells[number].path / "began").exists


def test_each_cell_has_its_own_state_while_one_job_runs_all(
    slurm: SlurmCluster, cell: Cell
) -> None:
    run = started(cell, WAITS, WAITS + "exit 3\n", WAITS)
    until(began(run, 0))
    assert states(run) == ["running", "queued", "queued"]
    assert cell_states(run)[1].reason == "waits for its turn in the allocation"
    job = job_of(run)
    go(run, 0)
    until(began(run, 1))
    assert states(run) == ["finished", "running", "queued"]
    go(run, 1)
    until(began(run, 2))
    # A cell that fails ends no other, and its end is known before the job's.
    assert states(run) == ["finished", "failed", "running"]
    assert cell_states(run)[1].has_ended and not cell_states(run)[2].has_ended
    go(run, 2)
    assert slurm.wait(job) == "FAILED"
    until(lambda: states(run) == ["finished", "failed", "finished"])
    assert "exit status 3" in (cell_states(run)[1].reason or "")
    assert slurm.job_field(job, "JobName") == "together"


def test_cancel_stops_what_runs_and_what_waits(slurm: SlurmCluster, cell: Cell) -> None:
    run = started(cell, "exit 0\n", WAITS, WAITS)
    until(began(run, 1))
    assert cancel_run(run) == ["cell-1", "cell-2"]
    assert slurm.wait(job_of(run)) == "CANCELLED"
    until(lambda: states(run) == ["finished", "cancelled", "cancelled"])


def test_a_requeued_job_goes_on_with_the_cells_that_are_left(
    slurm: SlurmCluster, cell: Cell
) -> None:
    run = started(cell, 'touch "$CELL_DIR/began-$SLURM_RESTART_COUNT"\n', WAITS, WAITS)
    until(began(run, 1))
    (run.cells[1].path / "began").unlink()
    slurm.run("scontrol", "requeue", job_of(run))
    seen: set[str] = set()

    def goes_on() -> bool:
        seen.update(states(run)[1:])
        return began(run, 1)()

    until(goes_on, 90)
    # At no moment is one of them over: who watches would take leave.
    assert seen == {"running", "queued"}
    assert states(run) == ["finished", "running", "queued"]
    for number in (1, 2):
        go(run, number)
    assert slurm.wait(job_of(run)) == "COMPLETED"
    until(lambda: states(run) == ["finished"] * 3)
    assert [path.name for path in run.cells[0].path.glob("began-*")] in (["began-"], ["began-0"])


@pytest.mark.nightly
def test_a_sweep_trains_in_one_allocation_with_repeats(
    slurm: SlurmCluster, tmp_path: Path, two_nodes: Path
) -> None:
    def submit(*words: str) -> str:
        command = (sys.executable, str(ROOT / "submit.py"), *words)
        environment = {"COOKBOOK_RUNS": str(tmp_path / "runs"), "VENV": sys.prefix}
        return slurm.run(*command, env=environment, timeout=500).stdout

    words = ("sweep", "smoke", "--precision", "bf16", "--cluster", str(two_nodes), "--nodes", "2")
    small = ("--set", "training.steps=2", "--set", "training.seq_len=64")
    submit(*words, *small, "--one-allocation", "--repeat", "2")
    (folder,) = (tmp_path / "runs").glob("[!.]*/run.json")
    run = read_run(folder.parent)
    trained = [state for state in cell_states(run) if state.state == "finished"]
    order = ["debug-bf16-standard", "debug-bf16-standard-r2"]
    assert [state.cell for state in sorted(trained, key=lambda one: one.started or 0)] == order
    assert len({state.job_id for state in trained}) == 1
    # Never two at a time, and each on both nodes.
    ended = [state.ended or 0.0 for state in trained]
    begins = [state.started or 0.0 for state in trained]
    assert all(end <= start for end, start in zip(sorted(ended), sorted(begins)[1:], strict=False))
    for state in trained:
        (end,) = read_history(run.cell(state.cell).attempts())
        assert end.cause is Cause.FINISHED, end
        logs = (run.folder / state.cell).glob("attempt-0/ranks/*/*/0/stdout.log")
        assert len(list(logs)) == 2
    report = json.loads(submit("report", "--format", "json"))
    (bf16, deepep) = report["cells"]
    assert (bf16["name"], deepep["status"]) == ("debug-bf16-standard", "refused")
    assert [one["status"] for one in bf16["repeats"]] == ["finished", "finished"]
