"""What is said of a cell's attempts: steps, ends, what was lost, how much of the time was used."""

from __future__ import annotations

from pathlib import Path

import pytest

from cookbook.observe.history import collect_history, longest_save, usual_step_time
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import (
    AttemptEnd,
    Cause,
    Resumption,
    write_attempt_end,
    write_json,
)

_START = 1_700_000_000.0


def line(second: float, text: str, rank: int = 0) -> str:
    moment = f"18:{int(second) // 60:02}:{int(second) % 60:02},{int(second % 1 * 1000):03}"
    return f"[rank{rank}]:[titan] 2026-11-20 {moment} - root - INFO - {text}\n"


def attempt(
    cell: CellFolder,
    number: int,
    begin: float,
    steps: range,
    end: AttemptEnd | None = None,
    resumed: int | None = None,
) -> None:
    """An attempt that trains from `begin` on, two seconds a step, having started 10 s before."""
    one = Attempt(cell.path / f"attempt-{number}", number)
    one.path.mkdir(parents=True)
    text = line(begin, f"Training starts at step {steps.start}")
    for position, step in enumerate(steps, 1):
        text += line(begin + 2 * position, f"step: {step:2}  loss:  7.0000  grad_norm:  1.0")
        text += line(begin + 2 * position, f"step: {step:2}  loss: -1.0000  grad_norm:  1.0", 1)
    one.log.write_text(text)
    if end is not None:
        write_attempt_end(one, end)
    if resumed is not None:
        write_json(one.resumption, Resumption(number, resumed))


@pytest.fixture
def cell(tmp_path: Path) -> CellFolder:
    return CellFolder(tmp_path / "cell")


def ended(number: int, cause: Cause, start: float, end: float, **more: object) -> AttemptEnd:
    times = {"started": _START + start, "ended": _START + end}
    return AttemptEnd(number, cause, **times, **more)  # type: ignore[arg-type]


def test_repeated_steps_are_lost_and_not_effective(cell: CellFolder) -> None:
    died = ended(0, Cause.DEAD_RANK, 0, 26, reason="rank 1: killed", decision="restarted (1 of 3)")
    attempt(cell, 0, 10, range(1, 9), died)
    attempt(cell, 1, 40, range(7, 11), ended(1, Cause.FINISHED, 30, 48), resumed=6)
    found = collect_history(cell, CellRecord())
    first, second = found.attempts
    assert (first.first_step, first.last_step, first.steps_lost) == (1, 8, 2)
    assert (second.first_step, second.last_step, second.steps_lost) == (7, 10, 0)
    assert found.steps_lost == 2
    # 6 and 4 steps of two seconds, in 48 s.
    assert (first.effective_seconds, second.effective_seconds) == (12, 8)
    assert found.effective == pytest.approx(20 / 48)
    assert found.lines == [
        "attempt 0: steps 1 to 8 in 0:00:26; dead rank: rank 1: killed; 2 steps lost; "
        "restarted (1 of 3)",
        "attempt 1: steps 7 to 10 in 0:00:18; finished",
        "2 steps lost, effective training time 42%",
    ]


@pytest.mark.parametrize(
    ("saved", "lost"), [({}, 8), ({6: True}, 2), ({4: True, 6: False}, 4), ({8: True}, 0)]
)
def test_steps_after_the_checkpoint(cell: CellFolder, saved: dict[int, bool], lost: int) -> None:
    attempt(cell, 0, 10, range(1, 9), ended(0, Cause.STOPPED, 0, 26))
    for step, is_whole in saved.items():
        (cell.path / f"checkpoint/step-{step}").mkdir(parents=True)
        if is_whole:
            (cell.path / f"checkpoint/step-{step}/.metadata").touch()
    assert collect_history(cell, CellRecord()).steps_lost == lost
    # The next attempt begins at the checkpoint, and has made no step yet.
    attempt(cell, 1, 40, range(0), resumed=8 - lost)
    assert collect_history(cell, CellRecord()).steps_lost == lost


def test_what_the_newest_attempt_loses_is_not_known_before_its_end(cell: CellFolder) -> None:
    attempt(cell, 0, 10, range(1, 9), ended(0, Cause.LOST_NODE, 0, 26))
    attempt(cell, 1, 40, range(0))
    assert collect_history(cell, CellRecord()).lines[-1] == "8 steps lost"
    attempt(cell, 2, 70, range(1, 9))
    assert collect_history(cell, CellRecord()).lines[-1].startswith("8 steps lost before attempt 2")


def test_where_a_checkpoint_was_spoilt_two_attempts_lose_steps(cell: CellFolder) -> None:
    attempt(cell, 0, 10, range(1, 6), ended(0, Cause.DEAD_RANK, 0, 26))
    attempt(cell, 1, 40, range(5, 9), ended(1, Cause.DEAD_RANK, 30, 50), resumed=4)
    # Neither the checkpoint of step 4 nor a later one is whole.
    attempt(cell, 2, 70, range(3, 9), ended(2, Cause.FINISHED, 60, 90), resumed=2)
    assert [one.steps_lost for one in collect_history(cell, CellRecord()).attempts] == [3, 4, 0]


def test_the_usual_time_of_a_step_is_that_of_the_newest_attempt_with_some(cell: CellFolder) -> None:
    assert usual_step_time(cell.attempts()) is None
    attempt(cell, 0, 10, range(1, 9))
    attempt(cell, 1, 40, range(7, 9))
    assert usual_step_time(cell.attempts()) == pytest.approx(2.0)


def test_the_longest_save_of_any_attempt_is_known(cell: CellFolder) -> None:
    assert longest_save(cell.attempts()) is None
    for number, seconds in enumerate(("3.25", "12.50", "4.00")):
        attempt(cell, number, 10, range(1, 3))
        with cell.attempts()[number].log.open("a") as log:
            log.write(line(20, f"Finished saving the checkpoint (local)in {seconds} seconds."))
    assert longest_save(cell.attempts()) == 12.5
