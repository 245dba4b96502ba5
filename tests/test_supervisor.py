"""What a supervisor does about attempts and cells; short scripts stand in for training."""

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.run import status
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.status import FINISHED, QUEUED, REFUSED, RUNNING, AttemptEnd, Cause, Status
from cookbook.supervise.attempt import Timeouts, end_orphan_processes
from cookbook.supervise.exits import Decision, decide
from cookbook.supervise.resume_point import prepare
from cookbook.supervise.supervisor import Supervisor
from tests.saved import save
from tests.started import lives, start_marked

# Every script begins with it: the number of its attempt, its log, and the steps that it prints.
HEAD = """
set +eu
A="${COOKBOOK_ATTEMPT_DIR}"; K="${A##*-}"; exec >>"${A}/train.log" 2>&1
step() {
  local now; now="$(date +%s.%N)"
  printf '{"step": %s, "loss": "%s", "time": %s}\\n' "$1" "$2" "${now}" >>"${A}/metrics.jsonl"
  echo "[rank0]:[titan] $(date '+%F %T,%3N') - root - INFO - step: $1  loss: $2  x: 1"
}
torchrun_says() { echo "E1120 18:40:01.1 api.py:1] failed (exitcode: $1) local_rank: 1 (pid: 9)"; }
raises() { echo "Traceback (most recent call last):"; echo "$1"; exit 1; }
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SUBMITIT_LOCAL_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Supervisor, "timeouts", Timeouts(steps=5, more_s=1, start_s=4, save_s=4))
    monkeypatch.setattr("cookbook.supervise.attempt._GRACE_S", 1.0)
    kept = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def make(
    folder: Path,
    name: str = "cell",
    body: str = "exit 0",
    most: int = 9,
    state: str = QUEUED,
) -> CellFolder:
    cell = CellFolder(folder / "run" / name)
    options = {"checkpoint.enable": True}
    command, profile = f"{HEAD}{body}\n", {"description": "x", "scheduler": "local"}
    record = CellRecord(max_restarts=most, options=options, command=command, profile=profile)
    record.write(cell.record)
    status.write_status(cell, Status(state))
    return cell


def run(*cells: CellFolder) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        Supervisor(cells)()
    return ended.value.code


@dataclass(frozen=True)
class Outcome:
    code: int | str | None
    status: Status
    ends: list[AttemptEnd]

    @property
    def causes(self) -> list[Cause]:
        return [end.cause for end in self.ends]

    @property
    def reason(self) -> str:
        return self.status.reason or ""


@pytest.fixture
def supervised(tmp_path: Path) -> Callable[..., Outcome]:
    def supervise(body: str, most: int = 9) -> Outcome:
        cell = make(tmp_path, body=body, most=most)
        (tmp_path / "link").symlink_to(tmp_path / "run")
        linked = CellFolder(tmp_path / "link" / "cell")
        return Outcome(run(linked), status.read_status(cell), status.read_history(cell.attempts()))

    return supervise


def test_a_dead_rank_is_followed_by_another_attempt(
    supervised: Callable[..., Outcome], tmp_path: Path
) -> None:
    # The rest of its step has nothing to wait for.
    rest = 'sleep 100; touch "${CELL_DIR}/waited"'
    done = supervised(f"step 1 7; ((K)) && exit 0\ntorchrun_says -9; {rest}")
    assert (done.code, done.causes) == (0, [Cause.DEAD_RANK, Cause.FINISHED])
    assert (tmp_path / "run/cell/latest").readlink() == Path("attempt-1")
    assert (done.status.state, done.status.attempt) == ("finished", 1)
    assert not (tmp_path / "run" / "cell" / "waited").exists()
    first = done.ends[0]
    assert "exitcode: -9" in (first.reason or "") and (first.first_step, first.last_step) == (1, 1)
    assert first.decision == "restarted (1 of 9)"
    # It was seen when the rank was gone, and the others had some seconds to end by themselves.
    assert first.started and first.seen and first.ended
    assert first.started < first.seen < first.ended


def test_a_run_is_rolled_back_once_and_parts_are_left_out_until_it_has_saved(
    tmp_path: Path,
) -> None:
    body = """
touch "${A}/metrics.jsonl"; ((K == 3)) && exit 0
((K != 1)) || cp -r "${CELL_DIR}/checkpoint/step-4" "${CELL_DIR}/checkpoint/step-6"
torchrun_says -9; exit 1
"""
    cell = make(tmp_path, body=body, most=2)
    record = read_record(cell.record)
    once = {"checkpoint.load_step": 4, "checkpoint.exclude_from_loading": ["dataloader"]}
    replace(record, options=record.options | once).write(cell.record)
    for step in (4, 8):
        save(cell.path / "checkpoint", step, readers=record.world)
    # A requeued job reads the record again.
    assert run(cell) == 1 and run(cell) == 0
    assert [one.step for one in status.read_resumptions(cell.attempts())] == [4, 4, 6, 6]
    assert (cell.path / "checkpoint-damaged/step-8").is_dir()
    # Each attempt's script names the step that was found whole, for all ranks.
    scripts = [one.script.read_text() for one in cell.attempts()]
    assert re.findall(r"--checkpoint.load_step=(\d+)", "".join(scripts)) == ["4", "4", "6", "6"]
    excluded = ["--checkpoint.exclude_from_loading=dataloader" in text for text in scripts]
    assert excluded == [True, True, False, False]
    # The end of an attempt records its checkpoints, the one that it loaded too, for later resumes.
    known = [one.texts.read_text() for one in cell.attempts()]
    assert ["step-6/.metadata" in text for text in known] == [False, True, True, True]


def test_a_hang_is_ended_with_all_that_it_started_and_followed(
    supervised: Callable[..., Outcome], tmp_path: Path
) -> None:
    # torchrun's ranks have sessions of their own. Another cell's are not to be ended.
    body = """
step 1 7; ((K)) && exit 0
setsid sleep 300 & echo $! >"${CELL_DIR}/rank"
CELL_DIR=/another/cell setsid sleep 300 & echo $! >"${CELL_DIR}/other"
for i in 2 3 4 5; do sleep 0.6; step "${i}" 7; done
sleep 300; exit 0
"""
    cell = tmp_path / "run" / "cell"
    done = supervised(body)
    assert done.causes == [Cause.HANG, Cause.FINISHED]
    reason = done.ends[0].reason or ""
    assert re.match(r"no step for \d+ s \(usual: 0.\d s\) after step 5", reason)
    rank, other = (int((cell / name).read_text()) for name in ("rank", "other"))
    assert not lives(rank) and lives(other)
    os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_nan_loss_is_ended_and_its_last_good_step_is_known(
    supervised: Callable[..., Outcome], loss: str
) -> None:
    bad = f"step 3 {loss}; step 4 {loss}"
    done = supervised(f"step 1 7; ((K)) && exit 0\nstep 2 6; {bad}; sleep 300\n")
    assert done.causes == [Cause.NAN_LOSS, Cause.FINISHED]
    assert done.ends[0].last_good_step == 2
    assert f"loss is {loss}" in (done.ends[0].reason or "")


@pytest.mark.parametrize(
    "does", ["saves", "fails", "takes long", "takes long, saved none", "takes long, saved late"]
)
def test_asked_to_stop_where_no_slurm_can_requeue_it_says_how_to_go_on(
    supervised: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    does: str,
) -> None:
    is_late = does.startswith("takes long")
    monkeypatch.setattr(Supervisor, "late_s", 1.0 if is_late else 60.0)
    name = "__0_0.distcp" if "saved" in does else ".metadata"
    body = f"""
step 1 7; mkdir -p "${{CELL_DIR}}/checkpoint/step-1"; touch "${{CELL_DIR}}/checkpoint/step-1/{name}"
kill -USR1 "${{PPID}}"
until [[ -e "${{A}}/stop" ]]; do sleep 0.1; done
[[ '{does}' == fails ]] && {{ torchrun_says -9; exit 1; }}
# The first save ends after the supervisor has looked for it once.
[[ '{does}' != *late ]] || {{ sleep 1.7; touch "${{CELL_DIR}}/checkpoint/step-1/.metadata"; }}
[[ '{does}' == saves ]] || sleep 1.7
echo "local 1" >"${{A}}/stopped"
"""
    done = supervised(body)
    (end,) = done.ends
    # Without a whole checkpoint a requeued job would come no further.
    assert capfd.readouterr().err.count("too late: ") == (is_late and not does.endswith("none"))
    assert end.cause is (Cause.DEAD_RANK if does == "fails" else Cause.SAVED)
    assert done.status.state == "failed"
    assert "; stopped; to go on: python submit.py run --resume RUN" in done.reason


def test_an_attempt_whose_supervisor_was_killed_is_noted_and_ended(tmp_path: Path) -> None:
    cell = make(tmp_path)
    metrics = cell.attempt(0).metrics
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 4, "loss": 7}\n')
    status.write_status(cell, Status(RUNNING, 0, started=time.time() - 60))
    left = start_marked(300, {**os.environ, **marks(cell)})
    assert run(cell) == 0
    assert not lives(left.pid)
    first, second = status.read_history(cell.attempts())
    assert (first.cause, first.last_step, second.cause) == (Cause.CUT_SHORT, 4, Cause.FINISHED)


def marks(cell: CellFolder) -> dict[str, str]:
    return {"CELL_DIR": str(cell.path), "COOKBOOK_ATTEMPT_DIR": str(cell.attempt(0).path)}


def test_only_processes_of_this_very_job_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make(tmp_path)
    environment = {**os.environ, **marks(cell), "SLURM_JOB_ID": "77"}
    without = {name: v for name, v in environment.items() if name != "COOKBOOK_ATTEMPT_DIR"}
    others = [
        start_marked(60, environment | {"SLURM_JOB_ID": "78"}),
        start_marked(60, environment | {"CELL_DIR": "/another/cell"}),
        start_marked(60, without),
    ]
    own = start_marked(60, environment)
    try:
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        monkeypatch.setenv("COOKBOOK_SCHEDULER", "slurm")
        end_orphan_processes(cell)
        assert not lives(own.pid)
        assert [other.poll() for other in others] == [None] * 3
    finally:
        for process in (own, *others):
            process.kill()
            process.wait()


def states(*cells: CellFolder) -> list[str]:
    return [status.read_status(cell).state for cell in cells]


def test_cells_are_trained_in_turn_but_for_those_that_have_finished_or_cannot_run(
    tmp_path: Path,
) -> None:
    done, refused = make(tmp_path, "a", state=FINISHED), make(tmp_path, "b", state=REFUSED)
    bad, good = make(tmp_path, "bad", "exit 2"), make(tmp_path, "good")
    assert run(done, refused, bad, good) == 2
    assert [len(cell.attempts()) for cell in (done, refused, bad, good)] == [0, 0, 1, 1]
    assert states(done, refused, bad, good) == [FINISHED, REFUSED, "failed", FINISHED]


def test_told_to_stop_it_starts_no_further_cell(tmp_path: Path) -> None:
    first = make(tmp_path, "first", 'kill -TERM "${PPID}"; sleep 20')
    second = make(tmp_path, "second")
    assert run(first, second) == 128 + signal.SIGTERM
    assert states(first, second) == ["cancelled", "cancelled"]
    assert status.read_status(second).reason == "cancelled before it started"
    assert second.attempts() == []


def test_told_to_stop_between_two_attempts_it_is_cancelled(
    supervised: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide_late(*arguments: Any) -> Decision:
        os.kill(os.getpid(), signal.SIGTERM)
        return decide(*arguments)

    monkeypatch.setattr("cookbook.supervise.exits.decide", decide_late)
    done = supervised("exit 1")
    assert (done.code, done.status.state) == (128 + signal.SIGTERM, "cancelled")


def test_a_disk_that_is_full_for_seconds_is_no_end(
    supervised: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = time.monotonic() + 1.5

    def prepare_on_disk(*arguments: Any) -> dict[str, Any]:
        if time.monotonic() < freed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return prepare(*arguments)

    monkeypatch.setattr("cookbook.supervise.supervisor._FULL_DISK_S", 1.0)
    monkeypatch.setattr("cookbook.supervise.supervisor.prepare", prepare_on_disk)
    assert supervised("step 1 7").causes == [Cause.FINISHED]


@pytest.mark.parametrize("rest", ["exit 0", "exit 1", 'mkdir -p "${A}"'])
def test_a_folder_that_was_deleted_is_not_created_anew(tmp_path: Path, rest: str) -> None:
    gone = make(tmp_path, "gone", f'rm -r "${{CELL_DIR}}"; {rest}')
    other = make(tmp_path, "other", "step 1 7")
    assert run(gone, other) == 1
    assert not list(gone.path.glob("*.*")) and status.read_status(other).state == FINISHED


def test_failures_of_earlier_jobs_are_none_of_this_one(tmp_path: Path) -> None:
    cell = make(tmp_path, body="((K == 3)) && exit 0; torchrun_says -9; exit 1", most=1)
    for number, job_id in enumerate(("4711", None)):
        cell.attempt(number).path.mkdir(parents=True)
        end = AttemptEnd(number, Cause.DEAD_RANK, "rank 1: killed", job_id=job_id)
        status.write_attempt_end(cell.attempt(number), end)
    assert run(cell) == 0
    ends = status.read_history(cell.attempts())
    assert [end.cause for end in ends[2:]] == [Cause.DEAD_RANK, Cause.FINISHED]
    assert ends[2].decision == "restarted (1 of 1)"


def test_a_job_reads_its_record_alone(tmp_path: Path) -> None:
    """A recipe, an overlay or a cluster may be renamed, or half saved, while the job waits."""
    cell = make(tmp_path)
    gone = replace(read_record(cell.record), recipe="gone", precision="gone", cluster="gone")
    gone.write(cell.record)
    assert run(cell) == 0
    # A record that cannot be read is the end.
    broken = make(tmp_path, "broken")
    broken.record.write_text("{")
    assert run(broken) == 2
    assert (status.read_status(broken).state, broken.attempts()) == ("failed", [])


def test_all_attempts_are_one_run_of_weights_and_biases_up_to_a_roll_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    note = 'echo "${WANDB_RUN_ID} ${WANDB_RESUME}" >>"${CELL_DIR}/ids"; ((K == 2)) && exit 0'
    cell = make(tmp_path, body=f"{note}; step 1 7; ((K)) || exit 1; step 2 nan; sleep 300")
    cell.wandb_id.write_text("of an earlier job")
    options = {"checkpoint.load_step": 4, "checkpoint.enable": True}
    replace(read_record(cell.record), options=options).write(cell.record)
    save(cell.path / "checkpoint", 4, readers=1)
    assert run(cell) == 0
    ids = (tmp_path / "run/cell/ids").read_text()
    assert re.fullmatch(r"([0-9a-f]{12} allow\n)\1(?!\1)[0-9a-f]{12} allow\n", ids), ids


def test_a_run_that_may_skip_steps_is_not_ended_for_a_loss_that_is_nan(tmp_path: Path) -> None:
    cell = make(tmp_path, body="step 1 7; step 2 nan; sleep 4; step 3 6; exit 0")
    options = {"training.max_skipped_steps": 1}
    replace(read_record(cell.record), options=options).write(cell.record)
    assert run(cell) in (0, None)
    assert status.read_status(cell).state == FINISHED
