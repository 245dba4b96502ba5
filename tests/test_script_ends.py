"""What a rendered script does in a job when training fails, or when it is told to stop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.script_job import NOTES_WORDS, Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(("steps", "attempts"), [(True, 4), (False, 2)])
def test_what_fails_starts_again_as_often_as_the_profile_allows(
    job: Job, steps: bool, attempts: int
) -> None:
    # The first step of an attempt leaves a file; without any, two attempts are enough.
    made = 'touch "${COOKBOOK_ATTEMPT_DIR}/environment.json"\n' if steps else ""
    job.runner.replace("torchrun", NOTES_WORDS + made + "exit 9\n")
    start = job.run()
    assert start.status == 9
    restarts = [
        ["--exit-status=9", f"--decision=restarted ({count} of 3)"] for count in range(1, attempts)
    ]
    assert job.ends(start) == [*restarts, ["--exit-status=9", "--signal="]]
    looked_at = [words[4] for words in start.asked if words[2] == "preflight"]
    assert looked_at == [f"--attempt={number}" for number in range(attempts)]
    assert len(list(job.cell_dir.glob("attempt-*/argv"))) == attempts


@pytest.mark.parametrize(("restarts", "attempts"), [("2", 2), ("3", 1), ("4", 0)])
def test_slurms_own_restarts_count_against_the_limit(
    job: Job, restarts: str, attempts: int
) -> None:
    job.runner.replace("torchrun", NOTES_WORDS + "exit 9\n")
    start = job.run(SLURM_RESTART_COUNT=restarts)
    assert len(list(job.cell_dir.glob("attempt-*/argv"))) == attempts
    assert start.status == (9 if attempts else 2)
    assert ("restarted 4 times, allowed: 3" in start.output) == (not attempts)


def test_requeues_after_a_checkpoint_do_not_count(job: Job) -> None:
    for attempt, number in enumerate((4711, 4711, 47110)):
        (job.cell_dir / f"attempt-{attempt}").mkdir(parents=True)
        (job.cell_dir / f"attempt-{attempt}" / "stopped").write_text(f"{number} 12\n")
    assert job.run(SLURM_RESTART_COUNT="5").status == 0
    assert "restarted 4 times" in job.run(SLURM_RESTART_COUNT="6").output


TRAINS = 'touch "${COOKBOOK_ATTEMPT_DIR}/begun"\nfor i in {1..300}; do /bin/sleep 0.1; done\n'


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=str
)
def test_told_to_stop_it_says_with_which_signal(
    job: Job, number: signal.Signals, status: int
) -> None:
    job.runner.replace("torchrun", TRAINS)
    process = job.start()
    try:
        job.torchrun_is_there(process)
        # Slurm tells the batch step alone.
        os.kill(process.pid, number)
        assert process.wait(20) == status
    finally:
        job.end_all()
    start = job.runner.end(process)
    assert job.ends(start) == [[f"--exit-status={status}", f"--signal={number.name}"]]


@pytest.mark.parametrize("saved", [True, False])
def test_asked_to_save_it_tells_the_ranks_and_goes_back_to_the_queue(job: Job, saved: bool) -> None:
    says = 'until [[ -e "${COOKBOOK_ATTEMPT_DIR}/stop" ]]; do /bin/sleep 0.05; done\n'
    if saved:
        says += 'echo "${SLURM_JOB_ID} 7" >"${COOKBOOK_ATTEMPT_DIR}/stopped"\n'
    job.runner.replace("torchrun", f'touch "${{COOKBOOK_ATTEMPT_DIR}}/begun"\n{says}')
    asks = 'case "$1" in node) ;; requeue) echo "$*" >>"${RECORDS}/requeued" ;; esac\n'
    job.runner.replace("scontrol", f'[[ "$1" == show ]] && echo "N=1 NodeAddr=10.0.0.7 "\n{asks}')
    job.runner.replace("sleep", "exit 0\n")
    process = job.start()
    job.torchrun_is_there(process)
    os.kill(process.pid, signal.SIGUSR1)
    start = job.runner.end(process)
    requeued = job.runner.folder / "records" / "requeued"
    if saved:
        assert requeued.read_text() == "requeue 4711\n"
        # Slurm would have ended it by now.
        assert start.status == 2 and "is not requeued; to go on: sbatch train.sh" in start.output
    else:
        assert start.status == 0 and not requeued.exists()


@pytest.mark.parametrize(
    ("checkpoint", "restarts", "expected"),
    [
        ("step-7/.metadata", "0", True),
        ("step-7/.metadata", "3", False),
        # It is being written in the background, or was never written to its end.
        ("step-7/__0_0.distcp", "0", False),
        (None, "0", False),
    ],
)
def test_what_is_late_is_requeued_where_it_would_come_further(
    job: Job, checkpoint: str | None, restarts: str, expected: bool
) -> None:
    if checkpoint:
        file = job.cell_dir / "checkpoint" / checkpoint
        file.parent.mkdir(parents=True)
        file.touch()
    job.runner.replace("torchrun", TRAINS)
    asks = '[[ "$1" != requeue ]] || echo "$*" >>"${RECORDS}/requeued"\n'
    job.runner.replace("scontrol", f'[[ "$1" == show ]] && echo "N=1 NodeAddr=10.0.0.7 "\n{asks}')
    # What it may take, as the profile has it.
    late = job.render(seconds_to_stop=200).cluster.late_seconds
    job.runner.replace("sleep", f'echo "$1" >>"${{RECORDS}}/slept"; [[ "$1" == {late} ]]\n')
    process = job.start(SLURM_RESTART_COUNT=restarts)
    records = job.runner.folder / "records"
    try:
        job.torchrun_is_there(process)
        os.kill(process.pid, signal.SIGUSR1)
        stop, deadline = job.cell_dir / "attempt-0" / "stop", time.monotonic() + 20
        while not (stop.exists() and (records / "requeued").exists() >= expected):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # A requeue that must not be would come at once.
        time.sleep(0.3)
        assert (records / "requeued").exists() == expected
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
    finally:
        job.end_all()
    job.runner.end(process)


def test_a_script_whose_words_are_refused_starts_nothing_and_notes_no_end(job: Job) -> None:
    start = job.run("--training.stepz=5", REFUSES="begin")
    assert (start.status, start.srun, start.torchrun) == (2, [], [])
    assert [words[2] for words in start.asked] == ["begin"]


def test_nodes_that_are_not_well_start_nothing(job: Job) -> None:
    start = job.run(REFUSES="preflight")
    assert (start.status, start.srun, start.torchrun) == (2, [], [])
    assert job.ends(start) == [["--exit-status=2", "--signal="]]


def test_a_supervised_script_notes_nothing_and_starts_once(job: Job) -> None:
    job.runner.replace("torchrun", NOTES_WORDS + "exit 9\n")
    # Neither is there a bound, nor is it used up.
    for number, restarts in enumerate(("9", "0"), 1):
        start = job.run(COOKBOOK_SUPERVISED="1", SLURM_RESTART_COUNT=restarts)
        assert start.status == 9
        assert [words[2] for words in start.asked] == ["begin", "preflight"]
        assert len(list(job.cell_dir.glob("attempt-*/argv"))) == number


def test_a_log_that_cannot_be_written_fails_no_training(job: Job) -> None:
    job.runner.replace("tee", "exit 1\n")
    job.runner.replace("torchrun", "for i in {1..20000}; do echo a line; done\n")
    assert job.run().status == 0
