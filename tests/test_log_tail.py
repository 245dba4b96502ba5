"""What is read of a log that grows, is cut, is replaced, or is no text at all."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook.observe import lines, phases, text
from cookbook.observe.lines import (
    LogTail,
    Newest,
    parse_line,
    read_active,
    read_log,
)
from cookbook.observe.memory import read_peak_memory
from cookbook.observe.phases import Phase, parse_phase
from cookbook.observe.text import plain_text
from tests.test_logs import LOGS, PARSED, PLAIN


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_a_log_cut_at_any_byte_gives_its_whole_lines(tmp_path: Path, newline: bytes) -> None:
    log = tmp_path / "train.log"
    whole = (LOGS / "truncated.log").read_bytes().replace(b"\n", newline)
    steps = list(read_log(LOGS / "truncated.log"))
    for size in range(0, len(whole), 3):
        log.write_bytes(whole[:size])
        # `\r` ends a line already, whether `\n` follows or not.
        expected = steps[: whole[:size].count(newline[:1])]
        assert list(read_log(log)) == expected
        assert LogTail(log).read().step == (expected[-1] if expected else None)


READERS: list[Callable[[Path], object]] = [
    lambda log: list(read_log(log)),
    read_active,
    lambda log: read_peak_memory([log]),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", [b"\0", b"step: 1 loss: 2 ", b"\n", b"cookbook active: "])
def test_a_log_of_one_line_or_of_none_takes_no_memory(
    tmp_path: Path, reader: Callable[[Path], object], content: bytes
) -> None:
    log = tmp_path / "train.log"
    for end in (b"", b"\n"):
        log.write_bytes(content * ((24 << 20) // len(content)) + end)
        tracemalloc.start()
        reader(log)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20


@pytest.mark.parametrize("length", [65 << 10, 300 << 10, 5 << 20])
def test_a_line_that_is_too_long_is_passed_over_whole(tmp_path: Path, length: int) -> None:
    log = tmp_path / "train.log"
    odd = PLAIN.replace("step: 15", "step: 99").encode()
    for long in (odd + b"x" * length, b"x" * length + odd, odd * (length // len(odd) + 1)):
        for before in (0, 1, 1000):
            lines = [PLAIN.encode()] * before + [long, PLAIN.encode()]
            log.write_bytes(b"\n".join(lines) + b"\n")
            assert [metrics.step for metrics in read_log(log)] == [15] * (before + 1)
            assert LogTail(log).read().step == PARSED
            log.write_bytes(b"\n".join(lines[:-1]) + b"\n")
            assert LogTail(log).read().step == (PARSED if before else None)


MAX_LINE = 90


@contextlib.contextmanager
def small_blocks(size: int) -> Iterator[None]:
    """Blocks and lines so small that every boundary is met."""
    with (
        mock.patch.object(text, "_BLOCK_BYTES", size),
        mock.patch.object(text, "MAX_LINE_BYTES", MAX_LINE),
        mock.patch.object(lines, "MAX_LINE_BYTES", MAX_LINE),
        mock.patch.object(phases, "MAX_LINE_BYTES", MAX_LINE),
    ):
        yield


def forward(content: bytes, rank: int | None) -> Newest:
    """What LogTail says, read in the simplest way."""
    newest = Newest(None, Phase.LOADING)
    for line in content.replace(b"\r", b"\n").split(b"\n")[:-1]:
        if len(line) > MAX_LINE:
            continue
        shown = line.decode("utf-8", "replace")
        step, phase = parse_line(shown), parse_phase(shown, rank)
        if step is not None and rank in (None, step.rank):
            newest = Newest(step, Phase.TRAINING)
        elif phase is not None:
            newest = Newest(newest.step, phase)
    return newest


PIECES = st.sampled_from(
    [
        *(b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"step:", b"[rank8]:", b"x" * 50, b"\0" * 200),
        *(
            b"[rank%d]:step: %d loss: 1 x\n" % (rank, step)
            for rank in (0, 8)
            for step in (1, 2, 30)
        ),
        *(b"[rank8]:validate step: 3 loss: 2\n", b"step: 4 loss: 5\n", b"step: 6 loss: 7"),
        b"[rank8]:[titan] 2026 - root - INFO - Training starts at step 1\n",
        b"[rank8]:[titan] 2026 - root - INFO - Starting job: x\n",
        b"[rank0]:[titan] 2026 - root - INFO - Building deepseek_v3 16Bwith {\n",
        b"[titan] 2026 - root - INFO - Saving the checkpoint (or\n",
    ]
)


@settings(deadline=None)
@given(
    st.lists(st.lists(PIECES, max_size=8).map(b"".join), max_size=6),
    st.sampled_from([None, 0, 8]),
    st.integers(1, 400),
)
def test_a_growing_log_is_read_backwards_as_it_is_forwards(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], rank: int | None, block: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "train.log"
    content = b""
    tail = LogTail(log, rank)
    with small_blocks(block):
        for part in parts:
            content += part
            log.write_bytes(content)
            assert tail.read() == LogTail(log, rank).read() == forward(content, rank)
            assert LogTail(log, rank).read().step == forward(content, rank).step
            steps = list(read_log(log, rank))
            assert (steps[-1] if steps else None) == forward(content, rank).step


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The sizes of all that is read of logs."""
    sizes: list[int] = []
    read = text._read

    def counting(file: BinaryIO, size: int) -> bytes:
        block = read(file, size)
        sizes.append(len(block))
        return block

    with mock.patch.object(text, "_read", counting):
        yield sizes


def test_a_big_log_costs_16_mib_at_first_and_then_what_is_new(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    line = PLAIN.encode() + b"\n"
    log.write_bytes(line)
    os.truncate(log, 1 << 30)
    tail = LogTail(log, 0)
    with counted_bytes() as sizes:
        assert tail.read() == Newest(None, None)
    assert sum(sizes) < 17 << 20
    with log.open("ab") as file:
        file.write(b"\n" + line)
    with counted_bytes() as sizes:
        assert tail.read() == Newest(PARSED, Phase.TRAINING)
        assert tail.read() == Newest(PARSED, Phase.TRAINING)
    assert sum(sizes) < 4 * text.MAX_LINE_BYTES
    with counted_bytes() as sizes:
        assert LogTail(log, 0).read().step == PARSED
    assert sum(sizes) < 1 << 20


def test_the_newest_step_is_found_15_mib_before_the_end(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    other = PLAIN.replace("[rank0]", "[rank8]") + "\n"
    log.write_text(other * 2000 + PLAIN + "\n" + other * ((15 << 20) // len(other)))
    assert LogTail(log, 0).read().step == PARSED
    assert LogTail(log, 0).read().phase == Phase.TRAINING
    log.write_text(PLAIN + "\n" + other * ((17 << 20) // len(other)))
    assert LogTail(log, 0).read().step is None


def test_what_is_known_outlives_the_look_back(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(PLAIN + "\n")
    tail = LogTail(log)
    assert tail.read().step == PARSED
    with log.open("ab") as file:
        file.write(b"noise\n" * 4_000_000)
    assert tail.read() == Newest(PARSED, Phase.TRAINING)


def test_a_log_that_comes_goes_and_is_another(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    tail = LogTail(log)
    assert tail.read() == Newest()
    log.touch()
    assert tail.read() == Newest(None, Phase.LOADING)
    log.write_text(PLAIN + "\n")
    assert tail.read().step == PARSED
    # Truncated; replaced by a longer one; gone; a folder.
    log.write_text("x\n")
    assert tail.read() == Newest(None, Phase.LOADING)
    log.write_text(PLAIN + "\n")
    assert tail.read().step == PARSED
    log.write_text("other lines\n" * 99)
    assert tail.read() == Newest(None, Phase.LOADING)
    log.unlink()
    assert tail.read() == Newest()
    log.mkdir()
    assert tail.read() == Newest()
    assert LogTail(log).read().step is None


def test_a_log_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    content = (PLAIN.encode() + b"\n") * 3 + b"7 noise 7\n" * 30
    read = text._read

    def cutting(length: int, file: BinaryIO, size: int) -> bytes:
        block = read(file, size)
        os.truncate(log, min(length, log.stat().st_size))
        return block

    with mock.patch.object(text, "_BLOCK_BYTES", 300):
        for length in range(3 * len(PLAIN)):
            log.write_bytes(content)
            with mock.patch.object(text, "_read", partial(cutting, length)):
                assert LogTail(log).read().step in (None, PARSED)


def test_a_line_at_the_edge_of_the_look_back_is_read_whole_or_not(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"{PLAIN}\n" * 2)
    for size in range(1, 2 * len(PLAIN) + 2):
        with mock.patch.object(lines, "_LOOK_BACK_BYTES", size):
            assert LogTail(log).read().step == (PARSED if size > len(PLAIN) else None)


def test_a_line_that_grows_too_long_is_not_read_from_its_middle(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"\0" * 70_000)
    tail = LogTail(log)
    assert tail.read().step is None
    for more, expected in ((PLAIN, None), ("\n", None), (PLAIN, None), ("\n", PARSED)):
        with log.open("a") as file:
            file.write(more)
        assert tail.read().step == expected == LogTail(log).read().step


@settings(deadline=None)
@given(st.text(), st.integers(10, 300))
def test_text_to_show_is_one_printable_line(content: str, limit: int) -> None:
    shown = plain_text(content, limit)
    assert shown.isprintable()
    assert len(shown) <= limit
    assert plain_text(shown, limit) == shown


def test_text_to_show_keeps_what_is_meant() -> None:
    said = "\x1b[31mbad\x1b[0m\tvalue\x07 \x1b]0;title\x07ü\x1b]8;;x\x1b\\"
    said += "\u202e \x9b2J漢\r\n\x1bc.\0\b"
    assert plain_text(said, 99) == "bad value ü 漢 ."
    assert plain_text("x" * 99, 10) == "xxxxxxx..."
