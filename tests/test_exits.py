"""Why an attempt ended, and what follows; when no step for so long is a hang."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.observe.metrics import Phase, StepMetrics
from cookbook.run import status
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import CANCELLED, QUEUED, RUNNING, AttemptEnd, Cause, Status
from cookbook.supervise import exits
from cookbook.supervise.attempt import StepClock, Timeouts


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CellFolder:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("COOKBOOK_SCHEDULER", "slurm")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    cell = CellFolder(tmp_path / "run" / "cell")
    cell.attempt(0).path.mkdir(parents=True)
    status.write_status(cell, Status(RUNNING, 0, started=1.0))
    return cell


def ended(cell: CellFolder, code: int) -> AttemptEnd:
    return exits.classify_exit(cell, cell.attempt(0), 1.0, code)


def ends(*causes: Cause, step: int = 1) -> list[AttemptEnd]:
    """Attempts of which each came a step further than the one before."""
    return [AttemptEnd(n, cause, last_step=step + n) for n, cause in enumerate(causes)]


def test_a_final_cause_stops_at_once() -> None:
    assert set(exits.RULES) == set(Cause)
    final = {Cause.OUT_OF_MEMORY, Cause.MISSING_FILE, Cause.MISSING_MODULE, Cause.WRONG_OPTION}
    for cause in final | {Cause.BAD_NODES}:
        decision = exits.decide(ends(cause), most=9, lost_nodes=["worker-1"], is_time_over=True)
        assert decision.action is exits.Action.STOP
        assert "then: python submit.py run --resume RUN" in decision.words


@pytest.mark.parametrize(
    ("causes", "most", "is_over", "lost", "action", "words"),
    [
        # A checkpoint at Slurm's request is no failure, and never counted.
        ([Cause.SAVED] * 20, 0, False, [], exits.Action.REQUEUE, "requeued, to go on from there"),
        ([Cause.SAVED, Cause.DEAD_RANK], 1, False, [], exits.Action.RESTART, "restarted (1 of 1)"),
        ([Cause.TOO_LATE], 1, True, [], exits.Action.REQUEUE, "its time was almost over (1 of 1)"),
        ([Cause.HANG], 1, True, [], exits.Action.REQUEUE, "its time was almost over (1 of 1)"),
        ([Cause.HANG] * 2, 1, True, [], exits.Action.STOP, "restarted 1 times"),
        ([Cause.DEAD_RANK], 1, False, ["w-1"], exits.Action.REQUEUE, "without w-1, which Slurm"),
        ([Cause.LOST_NODE], 1, False, [], exits.Action.REQUEUE, "without a node, which Slurm"),
        ([Cause.DISK_FULL] * 2, 1, False, [], exits.Action.STOP, "free some space"),
    ],
)
def test_what_follows_from_a_cause(
    causes: list[Cause], most: int, is_over: bool, lost: list[str], action: exits.Action, words: str
) -> None:
    decision = exits.decide(ends(*causes), most, lost, is_over)
    assert decision.action is action and words in decision.words


@pytest.mark.parametrize(("cause", "most"), [(Cause.DEAD_RANK, 2), (Cause.ERROR, 1)])
def test_attempts_without_progress_are_bounded(cause: Cause, most: int) -> None:
    def after(*causes: Cause) -> exits.Action:
        history = [AttemptEnd(0, cause, last_step=5)]
        history += [AttemptEnd(n, one, last_step=5) for n, one in enumerate(causes, 1)]
        return exits.decide(history, most=9).action

    assert after(*[cause] * most) is exits.Action.RESTART
    assert after(Cause.SAVED, *[cause] * most) is exits.Action.RESTART
    assert after(*[cause] * (most + 1)) is exits.Action.STOP
    # The step of a checkpoint is no progress of the failure after it.
    furthest = [AttemptEnd(0, Cause.SAVED, last_step=9), AttemptEnd(1, cause, last_step=9)]
    assert exits.decide([*furthest, *furthest[1:] * most], most=9).action is exits.Action.STOP


@pytest.mark.parametrize(
    ("code", "cause", "reason"),
    [
        (2, Cause.WRONG_OPTION, "exit status 2"),
        (1, Cause.ERROR, "exit status 1"),
        (-9, Cause.DEAD_RANK, "ended by SIGKILL"),
        (0, Cause.FINISHED, None),
    ],
)
def test_exits_without_a_log(cell: CellFolder, code: int, cause: Cause, reason: str | None) -> None:
    end = ended(cell, code)
    assert (end.cause, end.reason, end.exit_code, end.job_id) == (cause, reason, code, "77")


def test_an_attempt_that_saved_as_asked(cell: CellFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    cell.attempt(0).stopped.write_text("77 12\n")
    for code in (0, 1):
        end = ended(cell, code)
        assert end.cause is Cause.SAVED
        assert end.reason == "asked to stop, it saved step 12 and ended"
    for state, cause in ((QUEUED, Cause.SAVED), (CANCELLED, Cause.STOPPED)):
        monkeypatch.setattr("cookbook.run.own_job.stop_reason", lambda *_, s=state: (s, "x"))
        stopped, found = exits.stopped_end(end, "SIGTERM")
        assert (stopped.cause, found) == (cause, state)


@pytest.mark.parametrize(
    ("free", "cause"), [((8 << 20) - 1, Cause.DISK_FULL), (9 << 20, Cause.DEAD_RANK)]
)
def test_a_disk_without_room_for_a_log_is_the_cause(
    cell: CellFolder, monkeypatch: pytest.MonkeyPatch, free: int, cause: Cause
) -> None:
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr("cookbook.supervise.exits.shutil.disk_usage", lambda path: usage)
    end = ended(cell, -9)
    assert end.cause is cause
    assert (end.reason or "").startswith("7 MiB are free at ") == (cause is Cause.DISK_FULL)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("preflight: 1 node(s) too few, and so on", Cause.BAD_NODES),
        ("model.hf_assets_path: a/tokenizer.json is not there", Cause.MISSING_FILE),
        ("checkpoint.load_step: step-5: is no number", Cause.WRONG_OPTION),
    ],
)
def test_a_refused_attempt_has_excluded_nodes(cell: CellFolder, reason: str, cause: Cause) -> None:
    found = {"nodes": [], "excluded": {"worker-4": "GPU 3: 2 uncorrectable ECC error(s)"}}
    cell.attempt(0).preflight.write_text(json.dumps(found))
    end = exits.refused_end(cell.attempt(0), reason)
    assert (end.cause, end.excluded) == (cause, ("worker-4",))
    cell.attempt(0).preflight.write_text("{")
    assert exits.refused_end(cell.attempt(0), reason).excluded == ()


def test_a_step_with_a_gradient_that_is_no_number_is_no_good_one(cell: CellFolder) -> None:
    norms = {3: 1.5, 4: "nan", 5: "inf"}
    lines = [{"step": step, "loss": 7.0, "grad_norm": norm} for step, norm in norms.items()]
    cell.attempt(0).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    end = ended(cell, 1)
    assert (end.first_step, end.last_step, end.last_good_step) == (3, 5, 3)


def test_only_an_attempt_without_a_word_of_its_end_was_cut_short(cell: CellFolder) -> None:
    def causes() -> list[Cause]:
        exits.note_killed_attempt(cell)
        return [end.cause for end in status.read_history(cell.attempts())]

    status.write_attempt_end(cell.attempt(0), AttemptEnd(0, Cause.HANG, "no step for 90 s"))
    assert causes() == [Cause.HANG]
    # The status is of an attempt before this one, so nobody knows when this one started.
    cell.attempt(1).path.mkdir()
    assert causes() == [Cause.HANG]
    status.write_status(cell, Status(RUNNING, 1, started=2.0))
    assert causes() == [Cause.HANG, Cause.CUT_SHORT]


def at(step: int | None, phase: Phase = Phase.TRAINING) -> Any:
    """Stand for the tail of a log."""
    newest = StepMetrics(step, 7.0) if step else None
    return SimpleNamespace(step=newest, phase=phase, recent=[])


def trained(clock: StepClock, seconds: float, steps: int = 8, stride: int = 1) -> float:
    """Steps that take `seconds` each, looked at twice a second; the time after them."""
    now = 0.0
    while now < seconds * steps * stride:
        done = int(now / seconds) // stride * stride
        tail = at(done or None, Phase.TRAINING if done else Phase.FIRST_STEP)
        made = range(stride, done + 1, stride)
        tail.recent = [StepMetrics(step, 7.0, time=step * seconds) for step in made]
        clock.look(tail, [], now)
        now += 0.5
    return now


def seen_after(clock: StepClock, newest: Any, start: float) -> float:
    now = start
    while clock.hang is None:
        assert now < start + 10_000
        now += 0.5
        clock.look(newest, [], now)
    return now - start


@pytest.mark.parametrize(
    ("seconds", "log_freq", "least"), [(1.0, 1, 4), (4.0, 1, 4), (60.0, 1, 4), (2.0, 10, 10)]
)
def test_a_hang_is_seen_in_time(seconds: float, log_freq: int, least: int) -> None:
    """Within five steps and thirty seconds, or nine more where each tenth step is logged."""
    clock = StepClock(Timeouts(), log_freq=log_freq)
    now = trained(clock, seconds, stride=log_freq)
    took = seen_after(clock, at(7 * log_freq), now)
    assert least * seconds <= took <= (4 + log_freq) * seconds + 30
    assert f"after step {7 * log_freq}" in (clock.hang or "")


# Before the first step; minutes after it, and long before the hundredth.
@pytest.mark.parametrize(("usual", "newest"), [(1.0, at(None, Phase.COMPILING)), (None, at(1))])
def test_until_a_step_has_a_usual_time_each_line_is_a_sign_of_life(
    usual: float | None, newest: Any
) -> None:
    clock = StepClock(Timeouts(), usual=usual, log_freq=100)
    for now in range(0, 7200, 2):
        clock.look(newest, [b"a line"] if now % 1000 == 0 else [], float(now))
        assert clock.hang is None
    assert 1500 < seen_after(clock, newest, 7200.0) < 1700
    assert ("before the first step" in (clock.hang or "")) == (newest.step is None)


@pytest.mark.parametrize(
    ("phase", "longest", "least_save", "least", "most"),
    [
        (Phase.SAVING_CHECKPOINT, None, 0.0, 900, 905),
        (Phase.SAVING_CHECKPOINT, 0.5, 0.0, 22, 35),
        (Phase.SAVING_CHECKPOINT, 300.0, 0.0, 1500, 1530),
        (Phase.FINISHING, 0.5, 0.0, 900, 905),
        # A save that only copied says nothing of the next one.
        (Phase.SAVING_CHECKPOINT, 0.5, 900.0, 900, 905),
        (Phase.SAVING_CHECKPOINT, 300.0, 900.0, 1500, 1530),
    ],
)
def test_a_save_may_take_as_long_as_saves_do(
    phase: Phase, longest: float | None, least_save: float, least: float, most: float
) -> None:
    clock = StepClock(Timeouts(least_save_s=least_save), longest_save=lambda: longest)
    now = trained(clock, 1.0)
    assert least < seen_after(clock, at(7, phase), now) < most


def test_fast_steps_have_no_usual_time_at_first_sight() -> None:
    """Six steps of 20 ms, before a later step compiles for half a minute."""
    clock = StepClock(Timeouts())
    trained(clock, 0.02, steps=6)
    tail = at(6)
    tail.recent = [StepMetrics(step, 7.0, time=step * 0.02) for step in range(1, 7)]
    assert seen_after(clock, tail, 0.0) > 1700


def test_a_job_that_was_suspended_does_not_hang() -> None:
    clock = StepClock(Timeouts())
    now = trained(clock, 1.0)
    clock.look(at(7), [], now + 3600)
    assert clock.hang is None


@pytest.mark.parametrize(
    ("options", "more", "least_save"),
    [
        ({}, 20.0, 0.0),
        # No line says that it validates, profiles, or writes its memory down.
        ({"validation.enable": True}, 900.0, 0.0),
        ({"profiling.enable_profiling": True}, 900.0, 0.0),
        ({"profiling.enable_memory_snapshot": True}, 900.0, 0.0),
        ({"checkpoint.async_mode": "async"}, 20.0, 900.0),
    ],
)
def test_pauses_without_a_line(options: dict[str, object], more: float, least_save: float) -> None:
    timeouts = Timeouts().adjusted(CellRecord(options=options))
    assert (timeouts.more_s, timeouts.least_save_s) == (more, least_save)
