"""The supervisor on a real Slurm: it ends its own step alone, and outlives its own death."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cookbook.cli.main import main
from cookbook.config.cell import Cell
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.run import Run
from cookbook.run.states import cell_states
from cookbook.run.status import AttemptEnd, Cause, read_history
from tests.cells import Point
from tests.check_cells import with_options
from tests.saved import save
from tests.slurm_cluster import SlurmCluster
from tests.waiting import until

pytestmark = pytest.mark.slurm

# Makes steps; $FAULT is what happens after them in the first attempt.
SCRIPT = """
A="${COOKBOOK_ATTEMPT_DIR}"; K="${A##*-}"; exec >>"${A}/train.log" 2>&1
step() { echo "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - step: $1  loss: 7  x: 1"; }
for i in 1 2 3 4 5; do step "${i}"; sleep 0.5; done
((K)) && exit 0
srun --job-name="attempt-${K}" --kill-on-bad-exit=1 bash -c "$FAULT"
"""


@pytest.fixture
def cell(two_nodes: Path) -> Cell:
    return replace(Point("debug", "bf16", "standard", str(two_nodes)).cell(), nodes=2)


def start(cell: Cell, fault: str) -> tuple[Run, str]:
    run = create_run("supervised", [cell])
    run.cells[0].script.write_text(SCRIPT.replace("$FAULT", fault))
    (job,) = submit_run(run, [cell])
    return run, job


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
        until(lambda: ends(run), 90)
        assert ends(run)[0].cause is Cause.HANG
        assert "attempt-0" not in steps_of(slurm, job)
        assert "mine" in steps_of(slurm, job) and mine.poll() is None
        slurm.wait(job, {"COMPLETED"}, timeout=90)
        assert [end.cause for end in ends(run)] == [Cause.HANG, Cause.FINISHED]
        assert cell_states(run)[0].state == "finished"
    finally:
        mine.kill()
        mine.wait()


def processes_with(has: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """The processes of this machine that `has`; one may end while it is looked at."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if has(process):
                found.append(process)
    return found


def test_a_killed_supervisor_is_started_again_and_ends_what_it_left(
    slurm: SlurmCluster, cell: Cell
) -> None:
    run, job = start(cell, "sleep 300")
    until(lambda: "attempt-0" in steps_of(slurm, job))
    folder = str(run.cells[0].job_files)

    def tasks() -> list[psutil.Process]:
        words = ["sleep", "300"]
        return processes_with(
            lambda one: one.cmdline() == words and one.environ().get("SLURM_JOB_ID") == job
        )

    # Slurm names a step before its tasks run.
    until(lambda: len(tasks()) == 2)
    found = processes_with(lambda one: folder in one.cmdline())
    (child,) = [one for one in found if one.ppid() in {other.pid for other in found}]
    child.send_signal(signal.SIGKILL)
    slurm.wait(job, {"COMPLETED"}, timeout=60)
    assert [end.cause for end in ends(run)] == [Cause.CUT_SHORT, Cause.FINISHED]
    assert not tasks()


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
        until(lambda: ends(run), 60)
        (end,) = ends(run)
        assert end.decision == f"requeued without {last}, which Slurm cannot use"
        assert cell_states(run)[0].state == "queued"
        slurm.wait(job, {"COMPLETED"}, timeout=90)
        assert slurm.job_field(job, "Restarts") == "1"
        hosts = slurm.run("scontrol", "show", "hostnames", slurm.job_field(job, "NodeList") or "")
        assert last not in hosts.stdout.split()
    finally:
        slurm.run("scontrol", "update", f"NodeName={last}", "State=RESUME")


# Makes six steps at once, and none in a later attempt.
STEPS = """
A="${COOKBOOK_ATTEMPT_DIR}"; exec >>"${A}/train.log" 2>&1
[[ "${A}" == *-0 ]] && for i in 1 2 3 4 5 6; do
  echo "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - step: ${i}  loss: 7  x: 1"
done
echo waits; exec sleep 300
"""


def test_the_steps_after_the_checkpoint_are_lost_by_a_requeue_and_a_cancellation(
    slurm: SlurmCluster, cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"saved": 2, "unsaved": 6, "cancelled": 6}
    cell = replace(with_options(cell, {"checkpoint.enable": True}), nodes=1)
    cells = [replace(cell, name=name) for name in lost]
    run = create_run("lost", cells)
    for one in run.cells:
        one.script.write_text(STEPS)
    saved, unsaved, cancelled = submit_run(run, cells)

    def waits(number: int, *names: str) -> bool:
        logs = [run.cell(name).attempt(number).log for name in names]
        return all(log.exists() and "waits" in log.read_text() for log in logs)

    def said(verb: str) -> dict[str, int]:
        assert main([verb, run.name]) == 0
        found = re.findall(r"(?m)^(?:- )?(\w+): (\d+) steps? lost", capsys.readouterr().out)
        return {name: int(steps) for name, steps in found}

    until(lambda: waits(0, *lost), 60, lambda: cell_states(run))
    save(run.cell("saved").path / "checkpoint", 4, readers=1)
    assert said("status") == said("report") == {}
    for job in (saved, unsaved):
        slurm.run("scontrol", "requeue", job)
    slurm.run("scancel", cancelled)
    ended = ["queued", "queued", "cancelled"]
    until(lambda: [one.state for one in cell_states(run)] == ended, 60, lambda: cell_states(run))
    assert said("status") == said("report") == lost
    # Before its first step, the next attempt has lost nothing more.
    until(lambda: waits(1, "saved", "unsaved"), 90, lambda: cell_states(run))
    assert said("status") == said("report") == lost
