"""What the metrics lines of a log are read as."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cookbook.observe.lines import (
    LogTail,
    StepMetrics,
    parse_active,
    parse_line,
    read_active,
    read_log,
)
from cookbook.observe.memory import read_peak_memory

LOGS = Path(__file__).parent / "logs"
PLAIN = (
    "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - step: 15  loss:  3.91683  "
    "grad_norm:  3.8138  memory: 76.13GiB(54.46%)  tps: 13,388  tflops: 287.90  mfu: 29.11%"
)
PARSED = StepMetrics(
    rank=0,
    step=15,
    loss=3.91683,
    grad_norm=3.8138,
    memory_gib=76.13,
    memory_percent=54.46,
    tokens_per_second=13388,
    tflops=287.90,
    mfu=29.11,
)


def parsed(line: str) -> StepMetrics:
    metrics = parse_line(line)
    assert metrics is not None
    return metrics


def test_a_line_gives_all_its_figures() -> None:
    assert parse_line(PLAIN) == PARSED


def test_the_rank_prefix_is_optional() -> None:
    assert parsed(PLAIN.removeprefix("[rank0]:")).rank is None
    assert parsed(PLAIN.replace("[rank0]", "[default0]")).rank is None
    assert parsed("12: " + PLAIN.replace("[rank0]", "[rank128]")).rank == 128


def test_keys_count_and_not_columns() -> None:
    other = parsed("mfu: 5.00%  step: 3 tps: 1,234,567.5 lr: 1e-4   loss:2.5 tflops: 1,287.9")
    assert (other.step, other.loss, other.tokens_per_second) == (3, 2.5, 1234567.5)
    assert (other.tflops, other.grad_norm, other.memory_gib) == (1287.9, None, None)


def test_not_available_is_unknown() -> None:
    assert parsed(PLAIN.replace("29.11%", "N/A")).mfu is None


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_number_is_kept(text: str) -> None:
    loss = parsed(PLAIN.replace(" 3.91683", f"     {text}")).loss
    assert loss is not None
    assert str(loss) == text


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[titan] 2026-11-20 18:29:22,279 - root - INFO - Training starts at step 1",
        "[titan] Saving checkpoint at step: 10",
        "step: 10  loss: spikes again",
        "[titan] - root - INFO - validate step: 10  loss:  3.5  memory: 1.00GiB(1.00%)  tps: 5",
        "global_step: 10  loss: 3.5 tps: 7",
    ],
)
def test_other_lines_are_not_metrics(line: str) -> None:
    assert parse_line(line) is None


def test_a_line_in_two_pieces_is_joined() -> None:
    """torchrun prefixes each piece that it read of a line."""
    assert parse_line(PLAIN.replace("3.91683", "3.9[rank0]:1683")) == PARSED


def test_a_line_cut_by_another_is_no_measurement() -> None:
    other = "[rank8]:[titan] 2026-11-20 18:29:22,280 - root - INFO - Training completed"
    assert parse_line(PLAIN[: PLAIN.index("388")] + other) is None
    assert parse_line(PLAIN + other) == PARSED


@settings(deadline=None)
@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    parse_line(text)
    parse_line(f"step: 1 loss: {text}")
    parse_active(f"cookbook active: {text}")


COLOURED = (
    "[titan] 2026-11-20 18:29:22,279 - root - INFO - \x1b[31mstep:  7  \x1b[32mloss:  9.00000  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.0000  \x1b[38;2;54;234;195mmemory: 76.13GiB(54.46%)  "
    "\x1b[34mtps: 1,213,388  \x1b[36mtflops: 1,287.90  \x1b[35mmfu: N/A\x1b[39m"
)


@settings(deadline=None)
@given(st.data())
def test_a_whole_log_is_read_as_its_lines_are(data: st.DataObject) -> None:
    """Lines in TorchTitan's own form take a shorter way, which must say the same."""
    lines = []
    for _ in range(data.draw(st.integers(1, 3))):
        line = data.draw(st.sampled_from([PLAIN, COLOURED]))
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(line)))
            end = place + data.draw(st.integers(0, 2))
            line = line[:place] + data.draw(st.sampled_from([*"0123456789.,-% ", ""])) + line[end:]
        lines.append(line)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "train.log"
        log.write_text("".join(f"{line}\n" for line in lines))
        found = [parse_line(line) for line in lines]
        assert list(read_log(log)) == [metrics for metrics in found if metrics is not None]
        of_rank_0 = [metrics for metrics in found if metrics is not None and metrics.rank == 0]
        assert list(read_log(log, 0)) == of_rank_0


@settings(deadline=None)
@given(st.data())
def test_lines_of_8_ranks_in_pieces_are_never_read_as_another_step(data: st.DataObject) -> None:
    """torchrun writes what it has read of each rank, whole lines or not, as it comes."""
    body = PLAIN.removeprefix("[rank0]:")
    written: dict[int, dict[int, StepMetrics]] = {}
    pieces: list[list[str]] = []
    whole: set[tuple[int, int]] = set()
    for rank in range(8):
        pieces.append([])
        written[rank] = {}
        for step in range(1, data.draw(st.integers(1, 3)) + 1):
            line = body.replace("step: 15", f"step: {step:2}").replace(
                "3.91", f"{rank + 1}.{step}1"
            )
            written[rank][step] = parsed(f"[rank{rank}]:{line}")
            cut = data.draw(st.none() | st.integers(1, len(line) - 1))
            if cut is None:
                whole.add((rank, step))
                pieces[rank].append(f"[rank{rank}]:{line}\n")
            else:
                pieces[rank] += [f"[rank{rank}]:{line[:cut]}", f"[rank{rank}]:{line[cut:]}\n"]
    text = ""
    begun: int | None = None  # the rank whose line has no end yet
    while any(pieces):
        rank = data.draw(st.sampled_from([rank for rank in range(8) if pieces[rank]]))
        piece = pieces[rank].pop(0)
        if begun is not None and begun != rank:
            # What stands behind another's beginning need not be read.
            whole = {one for one in whole if one != (rank, _step_of(piece))}
        text += piece
        begun = None if piece.endswith("\n") else rank
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "train.log"
        log.write_text(text)
        for rank in range(8):
            found = list(read_log(log, rank))
            assert all(metrics == written[rank][metrics.step] for metrics in found)
            assert {step for of, step in whole if of == rank} <= {one.step for one in found}


def _step_of(piece: str) -> int:
    found = re.search(r"step: +([0-9]+) ", piece)
    return int(found[1]) if found else 0


def test_thousands_separators_and_no_mfu() -> None:
    found = parsed(COLOURED)
    assert (found.tokens_per_second, found.tflops, found.mfu) == (1213388, 1287.9, None)


ODD = [
    "٣",
    "²",
    "৪2",
    "9" * 5000,
    "\0",
    "\r",
    "\n",
    "\x1b",
    "[rank",
    "step: ",
    "loss: ",
    ",",
    "-",
    "%",
]


@settings(deadline=None)
@given(st.data())
def test_a_mangled_line_is_read_as_what_it_still_says(data: st.DataObject) -> None:
    line = PLAIN
    for _ in range(data.draw(st.integers(1, 4))):
        start, other = sorted(data.draw(st.tuples(*[st.integers(0, len(line))] * 2)))
        end = data.draw(st.sampled_from([start, other]))
        line = line[:start] + data.draw(st.sampled_from(ODD) | st.text(max_size=3)) + line[end:]
    metrics = parse_line(line)
    if metrics is None:
        return
    # torchrun's prefix may stand inside a number.
    text = line.replace("[rank0]:", "")
    number = r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)"
    said = {str(float(found.replace(",", ""))) for found in re.findall(number, text)}
    figures = [metrics.step, metrics.loss, metrics.grad_norm, metrics.memory_gib]
    figures += [metrics.memory_percent, metrics.tokens_per_second, metrics.tflops, metrics.mfu]
    assert {str(float(figure)) for figure in figures if figure is not None} <= said
    assert re.search(rf"step:\s*0*{metrics.step}\s", text)


@settings(deadline=None)
@given(
    st.integers(0, len(PLAIN)),
    st.sampled_from(["[31m", "[38;2;1;2;3m", "[K", "[?25l"]),
)
def test_a_colour_changes_no_figure(position: int, colour: str) -> None:
    line = PLAIN[:position] + "\x1b" + colour + PLAIN[position:]
    assume("step:" in line and "loss:" in line)
    assert parse_line(line) == PARSED


@pytest.mark.parametrize("digits", ["٣", "²", "३.५", "1٣", "٣1"])
def test_digits_of_other_scripts_are_no_numbers(digits: str, tmp_path: Path) -> None:
    assert parse_line(PLAIN.replace("step: 15", f"step: {digits}")) is None
    assert parse_line(PLAIN.replace("3.91683", digits)) is None
    assert parsed(PLAIN.replace("[rank0]", f"[rank{digits}]")).rank is None
    assert parsed(PLAIN.replace("13,388", digits)).tokens_per_second is None
    assert parsed(PLAIN.replace("76.13GiB", f"{digits}GiB")).memory_gib is None
    assert parsed(PLAIN.replace("54.46%", f"{digits}%")).memory_percent is None
    log = tmp_path / "train.log"
    log.write_text(PLAIN.replace("76.13GiB", f"{digits}GiB") + "\n")
    assert read_peak_memory([log]) is None


def test_numbers_of_thousands_of_digits_are_unknown() -> None:
    # int() raises on more than 4,300 digits.
    many = "9" * 5000
    assert parse_line(PLAIN.replace("15", many)) is None
    assert parse_line(PLAIN.replace("3.91683", many)) is None
    assert parsed(PLAIN.replace("[rank0]", f"[rank{many}]")).rank is None
    assert parsed(PLAIN.replace("76.13", many)).memory_gib is None
    assert parse_active('cookbook active: {"gpus": ' + many + "}") is None


def test_nested_brackets_are_not_what_was_active() -> None:
    assert parse_active("cookbook active: " + '{"a":' * 100_000) is None


def test_colours_are_no_obstacle() -> None:
    steps = list(read_log(LOGS / "tp1_16b_colour.log"))
    assert [metrics.step for metrics in steps] == list(range(1, 21))
    assert steps[-1] == StepMetrics(0, 20, 3.8573, 3.5459, 76.13, 54.46, 13332, 286.69, 28.99)


def test_one_rank_of_many() -> None:
    log = LOGS / "pp2_ranks_0_128.log"
    assert len(list(read_log(log))) == 32
    steps = list(read_log(log, rank=128))
    assert [metrics.step for metrics in steps] == list(range(1, 9))
    assert {metrics.rank for metrics in steps} == {128}
    assert all(metrics.loss is not None and metrics.loss > 0 for metrics in steps)


def test_a_rank_that_another_interrupts_is_not_taken_for_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"[rank8]:NCCL INFO {PLAIN}\n")
    assert list(read_log(log, rank=0)) == [PARSED]
    assert list(read_log(log, rank=8)) == []
    assert LogTail(log, rank=8).read().step is None


def test_a_line_that_is_still_written_is_left_out(tmp_path: Path) -> None:
    log = LOGS / "truncated.log"
    assert [metrics.step for metrics in read_log(log)] == [1, 2, 3, 4]
    assert LogTail(log).read().step == list(read_log(log))[-1]
    for size in range(0, len(PLAIN.encode()) + 1, 7):
        (tmp_path / "log").write_bytes(PLAIN.encode()[:size])
        assert list(read_log(tmp_path / "log")) == []


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"\0" * 5000 + PLAIN.encode() + b"\n\xff\xfe step: loss:\n" + b"\0" * 99)
    assert list(read_log(log)) == [PARSED]
    assert LogTail(log).read().step == PARSED
    assert read_peak_memory([log]) == 76.13
    assert read_active(log) is None


def test_a_log_bigger_than_a_block(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with log.open("w") as file:
        for step in range(1, 40_001):
            file.write(PLAIN.replace("step: 15", f"step: {step}") + "\n")
    assert [metrics.step for metrics in read_log(log)] == list(range(1, 40_001))
    last = LogTail(log, rank=0).read().step
    assert last is not None
    assert last.step == 40_000
    assert LogTail(log, rank=7).read().step is None


def test_a_log_that_is_not_there_has_no_last_step(tmp_path: Path) -> None:
    assert LogTail(tmp_path / "train.log").read().step is None


def test_peak_memory_is_over_all_ranks() -> None:
    assert read_peak_memory([LOGS / "pp2_ranks_0_128.log"]) == 153.77
    logs = [LOGS / "tp1_16b_colour.log", LOGS / "truncated.log"]
    assert read_peak_memory(logs) == 76.13


def test_no_memory_statistics_is_unknown(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(PLAIN.replace("76.13GiB(54.46%)", "-0.00GiB(-0.00%)") + "\n")
    assert read_peak_memory([log]) is None
    log.write_text(PLAIN.replace("76.13GiB(54.46%)", " 0.00GiB(0.00%)") + "\n")
    assert read_peak_memory([log]) is None


def test_what_was_active() -> None:
    active = read_active(LOGS / "tp1_16b_colour.log")
    assert active is not None
    assert active["ep_backend"] == "standard"
    assert active["versions"]["torchtitan"] == "0.2.2"
    assert read_active(LOGS / "truncated.log") is None
    assert parse_active('\x1b[31mcookbook active: {"emulated": true}\x1b[39m') == {"emulated": True}
    assert parse_active('cookbook active: {"emulated": tr') is None
    assert parse_active("cookbook active: [1]") is None


@pytest.mark.parametrize("text", ["1.5", "1,234.5", "12,345", "7", "1e-05"])
def test_numbers(text: str) -> None:
    assert parsed(f"step: 1 loss: {text} x").loss == float(text.replace(",", ""))


@pytest.mark.parametrize("text", ["1.", "12,34", "--1", "0x1", "1_0"])
def test_parts_of_numbers_are_unknown(text: str) -> None:
    assert parse_line(f"step: 1 loss: {text} x") is None
    assert parsed(f"step: 1 loss: 1 tps: {text}").tokens_per_second is None


def test_losses_of_a_curve_are_numbers() -> None:
    losses = [metrics.loss for metrics in read_log(LOGS / "tp1_16b_colour.log")]
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
