"""When no step for so long is a hang: never too early, and not later than is promised."""

from __future__ import annotations

import pytest

from cookbook.base.yamlfile import Unchecked
from cookbook.observe.metrics import Newest, Phase, StepMetrics
from cookbook.run.record import CellRecord
from cookbook.supervise.attempt import StepClock, Timeouts


def at(step: int | None, phase: Phase = Phase.TRAINING) -> Newest:
    return Newest(StepMetrics(0, step, 7.0) if step else None, phase)


def trained(clock: StepClock, seconds: float, steps: int = 8, stride: int = 1) -> float:
    """Steps that take `seconds` each, looked at twice a second; the time after them."""
    now = 0.0
    while now < seconds * steps * stride:
        done = int(now / seconds) // stride * stride
        clock.look(at(done or None, Phase.TRAINING if done else Phase.FIRST_STEP), 1, now)
        now += 0.5
    return now


def seen_after(clock: StepClock, newest: Newest, start: float, size: int = 1) -> float:
    now = start
    while clock.hang is None:
        assert now < start + 10_000
        now += 0.5
        clock.look(newest, size, now)
    return now - start


@pytest.mark.parametrize("seconds", [1.0, 4.0, 60.0])
def test_a_hang_is_seen_within_five_steps_and_thirty_seconds(seconds: float) -> None:
    clock = StepClock(Timeouts())
    now = trained(clock, seconds)
    took = seen_after(clock, at(7), now)
    assert 4 * seconds <= took <= 5 * seconds + 30
    assert "no step for" in (clock.hang or "") and "after step 7" in (clock.hang or "")


def test_where_each_tenth_step_is_logged_nine_more_are_waited_for() -> None:
    clock = StepClock(Timeouts(), log_freq=10)
    now = trained(clock, 2.0, stride=10)
    assert 10 * 2 < seen_after(clock, at(70), now) <= 14 * 2 + 30


def test_until_a_step_has_a_usual_time_each_line_is_a_sign_of_life() -> None:
    clock = StepClock(Timeouts(), log_freq=100)
    for now in range(0, 20_000, 4):
        # Minutes after the first step, and long before the hundredth.
        clock.look(at(1), now // 1000, float(now))
        assert clock.hang is None
    assert 1700 < seen_after(clock, at(1), 20_000.0, size=20) < 1900


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


def test_before_the_first_step_each_line_is_a_sign_of_life() -> None:
    clock = StepClock(Timeouts(), usual=1.0)
    for now in range(0, 7200, 2):
        clock.look(at(None, Phase.COMPILING), now // 1000, float(now))
        assert clock.hang is None
    assert seen_after(clock, at(None, Phase.COMPILING), 7200.0, size=7) > 800
    assert "before the first step" in (clock.hang or "")


def test_a_job_that_was_suspended_does_not_hang() -> None:
    clock = StepClock(Timeouts())
    now = trained(clock, 1.0)
    clock.look(at(7), 1, now + 3600)
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
    timeouts = Timeouts().adjusted(CellRecord(options=Unchecked(options)))
    assert (timeouts.more_s, timeouts.least_save_s) == (more, least_save)
