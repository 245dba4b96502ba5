"""The short steps of a preflight, and a Slurm that answers late."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cookbook.base.errors import JobError
from cookbook.run import slurm
from cookbook.run.slurm import NoAnswerError, StepEnd, run_step
from tests.programs import write_program


def run(on_line: Callable[[str], None], limit_s: float = 20.0, *, nodes: int = 1) -> StepEnd:
    names = [f"worker-{number}" for number in range(nodes)]
    return run_step(names, "a.module", "a  question", limit_s, on_line)


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Has this stand for srun; where it writes its words."""

    def put(body: str) -> Path:
        program, words = tmp_path / "bin" / "srun", tmp_path / "words"
        write_program(program, f'#!/bin/bash\nprintf "%s\\n" "$@" >"{words}"\n{body}\n')
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", "96")
        return words

    return put


def test_a_step_has_a_task_on_each_node(srun: Callable[[str], Path]) -> None:
    bad = "srun: error: Task launch for StepId=7.1 failed on node worker-1: Connection refused"
    words = srun(f"echo one; echo two; echo '{bad}' >&2; exit 1")
    lines: list[str] = []
    end = run(lambda line: lines.append(line), nodes=2)
    assert lines == ["one\n", "two\n"]
    assert (end.is_late, end.not_launched) == (False, {"worker-1": "Connection refused"})
    said = words.read_text().splitlines()
    expected = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=worker-0,worker-1"]
    # One bad node must neither end the others nor keep them from the next step.
    expected += ["--cpus-per-task=96", "--overlap", "--kill-on-bad-exit=0", "--wait=0"]
    # Also under `sbatch --export=NONE`.
    expected.append("--export=ALL")
    assert set(expected) <= set(said) and said[-3:] == ["-m", "a.module", "a  question"]


DOWN = "Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    "error",
    [
        f"Unable to confirm allocation for job 7: {DOWN}",
        "Unable to create step for job 7: Socket timed out on send/recv operation",
        # In its first minutes back the controller takes the memory of ended steps for used.
        "Unable to create step for job 7: Memory required by task is not available",
        'Munge encode failed: Failed to access "/run/munge/munge.socket.2"',
    ],
)
def test_a_controller_that_is_busy_is_asked_again(
    srun: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: str,
) -> None:
    monkeypatch.setattr(slurm, "_PAUSE_S", 0.01)
    asked = tmp_path / "asked"
    line = shlex.quote(f"srun: error: {error}")
    fails = f"echo {line} >&2; echo 'srun: Check SLURM_JOB_ID.' >&2; exit 1"
    srun(f"echo x >>{asked}; (($(wc -l <{asked}) > 3)) || {{ {fails}; }}; echo one")
    lines: list[str] = []
    run(lambda line: lines.append(line))
    assert lines == ["one\n"]
    said = "cookbook: preflight: waits for Slurm: Slurm starts no step on the job's nodes: "
    assert capsys.readouterr().err == f"{said}srun: error: {error}\n"
    # Not for ever.
    monkeypatch.setattr(slurm, "_BUSY_S", 1.5)
    srun(fails)
    with pytest.raises(NoAnswerError, match="Slurm starts no step"):
        run(lambda line: None)


def test_a_step_that_slurm_refuses_is_asked_for_once(
    srun: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_PAUSE_S", 0.01)
    monkeypatch.setattr(slurm, "_BUSY_S", 0.5)
    asked = tmp_path / "asked"
    refuses = (
        "srun: error: Unable to create step for job 7: More processors requested than permitted"
    )
    srun(f"echo x >>{asked}; echo '{refuses}' >&2; exit 1")
    with pytest.raises(JobError, match="than permitted"):
        run(lambda line: None)
    assert asked.read_text() == "x\n"


def test_the_limit_of_a_step(srun: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # Slurm takes a second to start it, and more than that is the nodes' time.
    srun("sleep 1; echo one; sleep 0.2")
    end = run(lambda line: None, 0.7)
    assert not end.is_late and end.seconds < 0.7
    monkeypatch.setattr(slurm, "_BUSY_S", 0.3)
    srun("echo 'srun: Job 7 step creation retrying (Requested nodes are busy)' >&2; exec sleep 30")
    with pytest.raises(JobError, match=r"none in 0 s \(srun: Job 7 .* are busy\)"):
        run(lambda line: None)


@pytest.mark.parametrize("is_away", [True, False])
def test_silence_of_slurm_is_no_answer(monkeypatch: pytest.MonkeyPatch, is_away: bool) -> None:
    said = f"slurm_load_node error: {DOWN}" if is_away else "Node worker-0 not found"
    answer = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(slurm, "_run", lambda command: answer)
    if is_away:
        with pytest.raises(NoAnswerError, match="contact slurm controller"):
            slurm.drained(["worker-0"])
    else:
        assert slurm.drained(["worker-0"]) == {}


def test_a_step_that_takes_too_long_is_ended(srun: Callable[[str], Path]) -> None:
    srun("echo one; exec sleep 30")
    end = run(lambda line: None, 0.3)
    assert end.is_late and end.not_launched == {}
    seen: list[str] = []
    end = run_step(["worker-0"], "a", "b", 25.0, lambda line: seen.append(line), lambda: bool(seen))
    assert not end.is_late and seen == ["one\n"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_command_that_cannot_be_executed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    if is_there:
        # Not executable; a folder in PATH that may not be read gives the same error.
        (tmp_path / "squeue").touch(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="squeue is not on PATH"):
        slurm.own_jobs()
