"""The supervisor on a real Slurm: of one cell, and of several that share an allocation."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.cli.main import main
from cookbook.config.cell import Cell
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.run import Run
from cookbook.run.states import cancel_run, cell_states
from cookbook.run.status import AttemptEnd, Cause, read_history
from tests.cells import Point
from tests.check_cells import with_options
from tests.programs import set_command
from tests.saved import save
from tests.slurm_cluster import SlurmCluster
from tests.waiting import until

pytestmark = pytest.mark.slurm

# Makes steps; $FAULT is what happens after them in the first attempt.
SCRIPT = """
A="${COOKBOOK_ATTEMPT_DIR}"; K="${A##*-}"; exec >>"${A}/train.log" 2>&1
M="${A}/metrics.jsonl"
step() { printf '{"step": %s, "loss": 7, "time": %s}\\n' "$1" "$(date '+%s.%N')" >>"${M}"; }
for i in 1 2 3 4 5; do step "${i}"; sleep 0.5; done
((K)) && exit 0
srun --job-name="attempt-${K}" --kill-on-bad-exit=1 bash -c "$FAULT"
"""


@pytest.fixture
def cell(two_nodes: Path) -> Cell:
    return Point("debug", "bf16", "standard", str(two_nodes)).cell()


def start(cell: Cell, fault: str) -> tuple[Run, str]:
    run = started(replace(cell, nodes=2), SCRIPT.replace("$FAULT", fault))
    return run, job_of(run)


def ends(run: Run) -> list[AttemptEnd]:
    return read_history(run.cells[0].attempts())


def steps_of(slurm: SlurmCluster, job: str) -> list[str]:
    return slurm.run("squeue", "--steps", f"--jobs={job}", "-h", "-o", "%j").stdout.split()


def test_a_step_that_hangs_is_ended_and_a_users_own_step_goes_on(
    slurm: SlurmCluster, cell: Cell
) -> None:
    run, job = start(cell, "sleep 300")
    until(lambda: "attempt-0" in steps_of(slurm, job))
    words = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--job-name=mine"]
    mine = subprocess.Popen([*words, "sleep", "40"], stderr=subprocess.DEVNULL)
    try:
        until(lambda: "mine" in steps_of(slurm, job))
        until(lambda: ends(run))
        assert ends(run)[0].cause is Cause.HANG
        assert "attempt-0" not in steps_of(slurm, job)
        assert "mine" in steps_of(slurm, job) and mine.poll() is None
        slurm.wait(job, {"COMPLETED"})
        assert [end.cause for end in ends(run)] == [Cause.HANG, Cause.FINISHED]
        assert cell_states(run)[0].state == "finished"
    finally:
        mine.kill()
        mine.wait()


@pytest.mark.nightly
def test_a_node_that_slurm_takes_back_after_a_failure_is_left(
    slurm: SlurmCluster, cell: Cell
) -> None:
    run, job = start(cell, 'sleep 4; [[ "${SLURM_PROCID}" == 0 ]] || exit 9; sleep 300')
    until(lambda: "attempt-0" in steps_of(slurm, job))
    nodes = slurm.job_field(job, "NodeList") or ""
    (last,) = slurm.run("scontrol", "show", "hostnames", nodes).stdout.split()[-1:]
    # As a health check does it: the jobs on the node go on.
    slurm.run("scontrol", "update", f"NodeName={last}", "State=DRAIN", "Reason=ECC errors")
    try:
        until(lambda: ends(run))
        (end,) = ends(run)
        assert end.decision == f"requeued without {last}, which Slurm cannot use"
        assert cell_states(run)[0].state == "queued"
        slurm.wait(job, {"COMPLETED"})
        assert slurm.job_field(job, "Restarts") == "1"
        hosts = slurm.run("scontrol", "show", "hostnames", slurm.job_field(job, "NodeList") or "")
        assert last not in hosts.stdout.split()
    finally:
        slurm.run("scontrol", "update", f"NodeName={last}", "State=RESUME")


# Makes six steps at once, too few in the log for a usual time, and none in a later attempt.
STEPS = """
A="${COOKBOOK_ATTEMPT_DIR}"; exec >>"${A}/train.log" 2>&1
[[ "${A}" == *-0 ]] && for i in 1 4 6; do
  printf '{"step": %s, "loss": 7, "time": 1}\\n' "${i}" >>"${A}/metrics.jsonl"
done
echo waits; exec sleep 300
"""


def test_the_steps_after_the_checkpoint_are_lost_by_a_requeue_and_a_cancellation(
    slurm: SlurmCluster, cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"saved": 2, "unsaved": 6, "cancelled": 6}
    cell = with_options(cell, {"checkpoint.enable": True})
    cells = [replace(cell, name=name) for name in lost]
    run = create_run("lost", cells)
    for one in run.cells:
        set_command(one, STEPS)
    saved, unsaved, cancelled = submit_run(run, cells)

    def waits(number: int, *names: str) -> bool:
        logs = [run.cell(name).attempt(number).log for name in names]
        return all(log.exists() and "waits" in log.read_text() for log in logs)

    def said(verb: str) -> dict[str, int]:
        assert main([verb, run.name]) == 0
        found = re.findall(r"(?m)^(?:- )?(\w+): (\d+) steps? lost", capsys.readouterr().out)
        return {name: int(steps) for name, steps in found}

    until(lambda: waits(0, *lost), lambda: cell_states(run))
    save(run.cell("saved").path / "checkpoint", 4, readers=1)
    assert said("status") == said("report") == {}
    for job in (saved, unsaved):
        slurm.run("scontrol", "requeue", job)
    slurm.run("scancel", cancelled)
    ended = ["queued", "queued", "cancelled"]
    until(lambda: [one.state for one in cell_states(run)] == ended, lambda: cell_states(run))
    # Slurm has a job wait again before the job's last word.
    until(lambda: said("status") == lost, lambda: said("status"))
    assert said("report") == lost
    # Before its first step, the next attempt has lost nothing more.
    until(lambda: waits(1, "saved", "unsaved"), lambda: cell_states(run))
    assert said("status") == said("report") == lost


# Each says that it began, and goes on when it is told to.
WAITS = 'touch "$CELL_DIR/began"; while ! [ -e "$CELL_DIR/go" ]; do sleep 0.1; done\n'


def started(cell: Cell, *bodies: str) -> Run:
    """A run of a cell for each body, which stands in for the cell's command; submitted as one."""
    cells = [replace(cell, name=f"cell-{n}") for n in range(len(bodies))]
    run = create_run("together", cells)
    for one, body in zip(run.cells, bodies, strict=True):
        set_command(one, body)
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
    run = started(cell, 'touch "$CELL_DIR/began-${SLURM_RESTART_COUNT:-}"\n', WAITS, WAITS)
    until(began(run, 1))
    (run.cells[1].path / "began").unlink()
    slurm.run("scontrol", "requeue", job_of(run))
    seen: set[str] = set()

    def goes_on() -> bool:
        seen.update(states(run)[1:])
        return began(run, 1)()

    until(goes_on)
    # At no moment is one of them over: who watches would take leave.
    assert seen == {"running", "queued"}
    assert states(run) == ["finished", "running", "queued"]
    for number in (1, 2):
        go(run, number)
    assert slurm.wait(job_of(run)) == "COMPLETED"
    until(lambda: states(run) == ["finished"] * 3)
    assert [path.name for path in run.cells[0].path.glob("began-*")] in (["began-"], ["began-0"])
