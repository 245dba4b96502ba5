"""Every state that Slurm may tell of a job, and a job of which it tells nothing any more."""

from __future__ import annotations

import pytest

from cookbook.run.run import Run
from cookbook.run.status import QUEUED, RUNNING, Status, write_status
from tests.test_truth import Slurm, only, run, slurm

__all__ = ["run", "slurm"]


# Every state that squeue's manual (JOB STATE CODES) lists, but for those of the table in
# tests/test_truth.py, and one that Slurm 25.11 has added.
@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD EXPEDITING", "queued"),
        ("RESIZING SIGNALING STAGE_OUT SUSPENDED STOPPED", "running"),
        ("BOOT_FAIL DEADLINE OUT_OF_MEMORY PREEMPTED REVOKED", "failed"),
    ],
)
def test_each_other_state_of_slurm_is_one_of_ours(
    slurm: Slurm, run: Run, words: str, state: str
) -> None:
    for word in words.split():
        slurm.says(word)
        found = only(run)
        assert (found.state, found.has_ended) == (state, state == "failed"), word
        halted = f"suspended (Slurm: {word}): its processes stand still"
        reasons = {"SUSPENDED": halted, "STOPPED": halted}
        failed = f"Slurm: {word}" if state == "failed" else None
        assert found.reason == reasons.get(word, failed)


@pytest.mark.parametrize("state", [QUEUED, RUNNING])
def test_a_job_that_nobody_knows_any_more_has_ended(slurm: Slurm, run: Run, state: str) -> None:
    write_status(run.cells[0], Status(state))
    slurm.forgets()
    found = only(run)
    assert (found.state, found.has_ended) == ("failed", True)
    assert found.reason == "job 4711 is gone, and neither Slurm nor the job said how it ended"
