"""The steps of an attempt, its router's load and the history of a cell's attempts."""

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cookbook.observe.history import collect_history, usual_step_time
from cookbook.observe.metrics import (
    LoadStep,
    Phase,
    Tail,
    collect_router_load,
    collect_steps,
    logged_seconds,
    longest_save,
    read_peak_memory,
    read_steps,
    seconds_to_first_step,
)
from cookbook.results.result import summarize_load
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import AttemptEnd, Cause, Resumption, write_attempt_end, write_json

TITAN = "[titan] 2026-11-20 18:29:22,279 - root - INFO - "
LINE = (
    f"[rank0]:{TITAN}step: 15  loss:  3.91683  grad_norm:  3.8138  memory: 76.13GiB(54.46%)  "
    "tps: 13,388  tflops: 287.90  mfu: 29.11%"
)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    path = tmp_path / "cell" / "attempt-0"
    path.mkdir(parents=True)
    return Attempt(path, 0)


def write(attempt: Attempt, *lines: dict[str, Any]) -> None:
    with attempt.metrics.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_lines_of_the_hooks_count_and_not_the_console(attempt: Attempt) -> None:
    attempt.log.write_text(LINE + "\n")
    line = {"step": 7, "time": 1e9, "rank": 2, "loss": 2.5, "tflops": 9.5, "lr": 1e-4}
    write(attempt, line, {"step": 7, "time": 2e9, "validation_loss": 2.75})
    write(attempt, {"step": 8, "time": 3e9, "rank": 2, "loss": "nan"})
    with attempt.metrics.open("a") as file:
        file.write('{"step": 9, "lo')
    seven, eight = read_steps(attempt)
    assert (seven.step, seven.loss, seven.tflops) == (7, 2.5, 9.5)
    assert (seven.time, seven.validation_loss, seven.rank) == (1e9, 2.75, 2)
    assert eight.loss is not None and math.isnan(eight.loss) and eight.mfu is None


def test_a_resumed_attempt_replaces_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    cell = CellFolder(tmp_path)
    # The last one resumes from step 5, and logs every fourth step only.
    for number, steps in enumerate([range(1, 6), range(4, 8), [8]]):
        cell.attempt(number).path.mkdir()
        write(cell.attempt(number), *({"step": s, "loss": 10.0 * number + s} for s in steps))
    write_json(cell.attempt(2).resumption, Resumption(2, 5))
    curve = collect_steps(cell)
    assert [(one.step, one.loss, one.attempt) for one in curve] == [
        *((1, 1.0, 0), (2, 2.0, 0), (3, 3.0, 0), (4, 14.0, 1), (5, 15.0, 1), (8, 28.0, 2))
    ]


def test_memory_is_the_most_of_any_rank(attempt: Attempt) -> None:
    attempt.log.write_text(LINE + "\n")
    own = attempt.path / "ranks/0/attempt_0/0/stdout.log"
    own.parent.mkdir(parents=True)
    own.write_text(LINE.replace("76.13", "80.00") + "\n")
    assert read_peak_memory(attempt.logs()) == 80


def test_times_of_a_console(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    assert logged_seconds(log) is None
    log.write_text(
        "torchrun\n"
        f"[rank0]:{TITAN}Training starts at step 1\n"
        f"{LINE.replace('22,279', '32,279')}\n"
        "[rank0]:[titan] 2026-11-20 18:31:22,279 - root - INFO - Training completed\n"
    )
    assert seconds_to_first_step(log) == 10.0
    assert logged_seconds(log) == 120.0


def test_a_tail_follows_an_attempt_that_grows(attempt: Attempt) -> None:
    tail = Tail(attempt, 0)
    tail.read()
    assert tail.phase is None

    def look(text: str) -> tuple[Phase | None, int | None]:
        with attempt.log.open("a") as file:
            file.write(text)
        tail.read()
        return tail.phase, tail.step.step if tail.step else None

    assert look("torchrun\n") == (Phase.LOADING, None)
    assert look(f"[rank1]:{TITAN}Training completed\n") == (Phase.LOADING, None)
    assert look(f"[rank0]:{TITAN}Training starts at step 15\n") == (Phase.FIRST_STEP, None)
    write(attempt, {"step": 15, "loss": 3.0})
    assert look(LINE + "\n") == (Phase.TRAINING, 15)
    assert look(f"[rank0]:{TITAN}Saving the checkpoint (or\n") == (Phase.SAVING_CHECKPOINT, 15)
    write(attempt, {"step": 16, "loss": 2.0}, {"step": 17, "loss": "inf"})
    assert look(f"[rank0]:{TITAN}Finished saving the checkpoint (or\n") == (Phase.TRAINING, 17)
    attempt.log.write_text(f"[rank0]:{TITAN}Training completed\n")
    assert look("") == (Phase.FINISHING, 17)
    assert [step.step for step in tail.recent] == [15, 16, 17]


def line(first: int, step: int, *busiest: float) -> str:
    content = {"first_step": first, "step": step, "forced": False, "busiest_over_mean": busiest}
    layers = {"layers": list(range(1, len(busiest) + 1)), "starved_experts": [0] * len(busiest)}
    return json.dumps(content | layers) + "\n"


def write_load(cell: Path, attempt: int, text: str) -> None:
    path = CellFolder(cell).attempt(attempt).router_load
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_steps_that_are_made_again_count_once(tmp_path: Path) -> None:
    write_load(tmp_path, 0, line(1, 1, 2, 3) + line(2, 10, 2, 3) + line(11, 20, 9, 9))
    write_load(tmp_path, 1, "")
    # Resumed at the checkpoint of step 15: the first one's line of 11 to 20 is of no account.
    write_load(tmp_path, 10, line(16, 20, 5, 4))
    write_load(tmp_path, 9, line(16, 20, 8, 8))
    steps = collect_router_load(CellFolder(tmp_path))
    assert [(step.first_step, step.step) for step in steps] == [(1, 1), (2, 10), (16, 20)]
    assert steps[2] == LoadStep(16, 20, False, (1, 2), (5, 4), (0, 0))


def steps_of(*busiest: tuple[float, ...], forced: bool = False) -> list[LoadStep]:
    return [
        LoadStep(number, number, forced, (3, 4, 5)[: len(row)], row, (1,) * len(row))
        for number, row in enumerate(busiest, 1)
    ]


def test_the_summary_is_of_the_end_and_names_the_layer() -> None:
    early = [(9.0, 9.0, 9.0)] * 27
    found = summarize_load(steps_of(*early, (1.5, 2.0, 1.0), (1.5, 2.5, 1.0), (7.0, 2.1, 1.0)))
    assert found is not None
    assert (found.busiest_over_mean, found.layer, found.median_over_layers) == (2.1, 4, 1.5)
    assert (found.steps, found.starved_experts, found.layers) == ((28, 30), 3, 3)
    assert not found.is_forced
    forced = summarize_load(steps_of((1.0,), forced=True))
    assert forced is not None and forced.is_forced
    assert summarize_load([]) is None
    # Of fewer than ten steps the last one counts.
    few = summarize_load(steps_of((9.0,), (9.0,), (1.5,)))
    assert few is not None and (few.busiest_over_mean, few.steps) == (1.5, (3, 3))


_START = 1_700_000_000.0


def said(second: float, text: str, rank: int = 0) -> str:
    moment = f"18:{int(second) // 60:02}:{int(second) % 60:02},{int(second % 1 * 1000):03}"
    return f"[rank{rank}]:[titan] 2026-11-20 {moment} - root - INFO - {text}\n"


def trained(
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
    lines, text = list[dict[str, Any]](), said(begin, f"Training starts at step {steps.start}")
    for position, step in enumerate(steps, 1):
        text += said(begin + 2 * position, f"step: {step:2}  loss:  7.0000  grad_norm:  1.0")
        time = datetime(2026, 11, 20, 18).timestamp() + begin + 2 * position
        lines.append({"step": step, "loss": 7.0, "time": time})
    one.log.write_text(text)
    write(one, *lines)
    if end is not None:
        write_attempt_end(one, end)
    if resumed is not None:
        write_json(one.resumption, Resumption(number, resumed))


@pytest.fixture
def cell(tmp_path: Path) -> CellFolder:
    return CellFolder(tmp_path / "cell")


def over(number: int, cause: Cause, start: float, end: float, **more: object) -> AttemptEnd:
    times = {"started": _START + start, "ended": _START + end}
    return AttemptEnd(number, cause, **times, **more)  # type: ignore[arg-type]


def test_repeated_steps_are_lost_and_not_effective(cell: CellFolder) -> None:
    died = over(0, Cause.DEAD_RANK, 0, 26, reason="rank 1: killed", decision="restarted (1 of 3)")
    trained(cell, 0, 10, range(1, 9), died)
    trained(cell, 1, 40, range(7, 11), over(1, Cause.FINISHED, 30, 48), resumed=6)
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
    trained(cell, 0, 10, range(1, 9), over(0, Cause.STOPPED, 0, 26))
    for step, is_whole in saved.items():
        (cell.path / f"checkpoint/step-{step}").mkdir(parents=True)
        if is_whole:
            (cell.path / f"checkpoint/step-{step}/.metadata").touch()
    assert collect_history(cell, CellRecord()).steps_lost == lost
    # The next attempt begins at the checkpoint, and has made no step yet.
    trained(cell, 1, 40, range(0), resumed=8 - lost)
    assert collect_history(cell, CellRecord()).steps_lost == lost
    # One that logs every tenth step alone loses those before it, too.
    trained(cell, 2, 70, range(10, 11), over(2, Cause.DEAD_RANK, 70, 90), resumed=8 - lost)
    assert collect_history(cell, CellRecord()).steps_lost == lost + 2 + lost


def test_what_the_newest_attempt_loses_is_not_known_before_its_end(cell: CellFolder) -> None:
    trained(cell, 0, 10, range(1, 9), over(0, Cause.LOST_NODE, 0, 26))
    trained(cell, 1, 40, range(0))
    assert collect_history(cell, CellRecord()).lines[-1] == "8 steps lost"
    trained(cell, 2, 70, range(1, 9))
    assert collect_history(cell, CellRecord()).lines[-1].startswith("8 steps lost before attempt 2")


def test_the_usual_time_of_a_step_is_the_newest_attempts(cell: CellFolder) -> None:
    assert usual_step_time(cell.attempts()) is None
    trained(cell, 0, 10, range(1, 9))
    trained(cell, 1, 40, range(7, 9))
    assert usual_step_time(cell.attempts()) == pytest.approx(2.0)


def test_the_longest_save_of_any_attempt_is_known(cell: CellFolder) -> None:
    assert longest_save(cell.attempts()) is None
    for number, seconds in enumerate(("3.25", "12.50", "4.00")):
        trained(cell, number, 10, range(1, 3))
        with cell.attempts()[number].log.open("a") as log:
            log.write(said(20, f"Finished saving the checkpoint (local)in {seconds} seconds."))
    assert longest_save(cell.attempts()) == 12.5
