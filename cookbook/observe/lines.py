"""The metrics of each step in TorchTitan's console logs, whole or only the newest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cookbook.observe.phases import Phase, last_phase
from cookbook.observe.text import (
    COLOURS,
    MAX_LINE_BYTES,
    RANK,
    blocks,
    blocks_backwards,
    last_line_end,
    lines_with,
)

# Numbers are [0-9], since `\d` is also every other script's digits, and have a bound, since int()
# refuses more than 4,300 of them.
# Validation prints `validate step:` with a loss and a tps of its own: not a training step.
_STEP = re.compile(r"(?<!validate )\bstep:\s*([0-9]{1,12})(?=\s)")
_KEY_VALUE = re.compile(r"(?<![\w/])([a-z_]+):\s*([^\s(]+)")
_MEMORY = re.compile(r"\bmemory:\s*([-0-9.,]+)GiB(?:\((-?[0-9.]+)%\))?")
_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|[-+]?(?:nan|inf)"
)
_MAX_NUMBER_CHARACTERS = 40
# The line as TorchTitan 0.2.2 and 0.3.0 print it, read four times faster than key by key. What
# does not match to the letter is read by `parse_line`, which says the same of what does.
_COLOUR = rb"(?:\x1b\[[0-9;]*m)?"
_DECIMAL = rb"([0-9]{1,12}(?:\.[0-9]{1,12})?)"
_THOUSANDS = rb"([0-9]{1,3}(?:,[0-9]{3}){0,4}(?:\.[0-9]{1,12})?)"
_PLAIN_LINE = re.compile(
    rb"(?:\[rank([0-9]{1,7})\]:)?\[titan\] [-0-9:, ]{23} - root - INFO - "
    rb"%(c)bstep: {1,2}([0-9]{1,12})  %(c)bloss: {1,8}%(n)b  %(c)bgrad_norm: {1,8}%(n)b  "
    rb"%(c)bmemory: {1,8}%(n)bGiB\(%(n)b%%\)  %(c)btps: %(t)b  %(c)btflops: %(t)b  "
    rb"%(c)bmfu: (?:%(n)b%%|N/A)%(c)b" % {b"c": _COLOUR, b"n": _DECIMAL, b"t": _THOUSANDS}
)
_ACTIVE = "cookbook active: "
# Some 60,000 lines: 250 steps with all 256 ranks on the console. It is read in about 0.05 s.
_LOOK_BACK_BYTES = 16 << 20
_RECENT_BYTES = 256 << 10
# What is compared to notice that a log was replaced by another one.
_MARK_BYTES = 64


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One metrics line; a value that the line does not hold, or holds as `N/A`, is None.

    A loss that is NaN or infinite is kept as such.
    """

    rank: int | None
    """Global rank of the `[rank0]:` prefix; None for a line without one."""
    step: int
    loss: float | None
    grad_norm: float | None = None
    memory_gib: float | None = None
    """Peak reserved memory since the metrics line before this one."""
    memory_percent: float | None = None
    tokens_per_second: float | None = None
    """TorchTitan's `tps`, per GPU."""
    tflops: float | None = None
    """Per GPU."""
    mfu: float | None = None
    """Percent of the GPU's BF16 peak."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest that a log says of a rank; None for what it does not say."""

    step: StepMetrics | None = None
    phase: Phase | None = None


class LogTail:
    """The newest step and phase of a log that is asked again and again while it grows.

    Each time only what was written since is read, and of that the last 16 MiB. A log that was
    truncated or replaced is read anew.

    Args:
        path: the log; it need not be there yet.
        rank: the global rank whose lines count; None for every line.
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0
        self._mark = b""
        self._newest = Newest()

    def read(self) -> Newest:
        """What the log says now; nothing where it cannot be read."""
        try:
            with self._path.open("rb") as file:
                self._read(file)
        except OSError:
            self._offset, self._mark, self._newest = 0, b"", Newest()
        return self._newest

    def _read(self, file: BinaryIO) -> None:
        end = file.seek(0, 2)
        if self._mark_in(file) != self._mark:
            self._offset, self._mark, self._newest = 0, b"", Newest()
        start = max(self._offset, end - _LOOK_BACK_BYTES)
        known = self._newest
        if start == 0:
            # The imports come before the first message.
            known = Newest(phase=Phase.LOADING)
        found = _read_newest(file, start, end, self._rank)
        self._newest = Newest(found.step or known.step, found.phase or known.phase)
        self._offset = last_line_end(file, start, end)
        self._mark = self._mark_in(file)

    def _mark_in(self, file: BinaryIO) -> bytes:
        start = max(0, self._offset - _MARK_BYTES)
        file.seek(start)
        return file.read(self._offset - start)


def parse_line(line: str) -> StepMetrics | None:
    """The metrics of one whole line, or None where it is not a metrics line.

    Keys are looked up by name, since widths, decimals and columns differ among versions.
    """
    if "step:" not in line or "loss:" not in line:
        return None
    # No other escape sequences: a lone escape character would take a digit with it.
    text = COLOURS.sub("", line).rstrip()
    found = _STEP.search(text)
    if found is None:
        return None
    ranks = RANK.findall(text, 0, found.start())
    metrics, was_cut = _metrics_text(text[found.end() :], ranks[-1] if ranks else None)
    values: dict[str, float | None] = {}
    for key, value in _KEY_VALUE.findall(metrics):
        values.setdefault(key, read_number(value.removesuffix("%")))
    loss = values.get("loss")
    if loss is None:
        return None
    # Another line cut this one off: its last value may be a part, unless that is `mfu`'s percent.
    if was_cut and not re.search(r"mfu:\s*(?:[0-9.,]+%|N/A)$", metrics):
        return None
    memory = _MEMORY.search(metrics)
    return StepMetrics(
        rank=int(ranks[-1]) if ranks else None,
        step=int(found.group(1)),
        loss=loss,
        grad_norm=values.get("grad_norm"),
        memory_gib=read_number(memory.group(1)) if memory else None,
        memory_percent=read_number(memory.group(2)) if memory and memory.group(2) else None,
        tokens_per_second=values.get("tps"),
        tflops=values.get("tflops"),
        mfu=values.get("mfu"),
    )


def read_log(path: Path, rank: int | None = None) -> Iterator[StepMetrics]:
    """The metrics lines of a log in order, of all ranks, or only of those prefixed `[rank<rank>]:`.

    The last line is left out while its newline is missing: the job may still be writing it.
    """
    # The rank first: most lines of a big log belong to other ranks.
    wanted = b"step:" if rank is None else b"[rank%d]:" % rank
    for block in blocks(path):
        for line in lines_with(block, wanted):
            metrics = parse_bytes(line, rank)
            if metrics is not None:
                yield metrics


def recent_steps(path: Path, rank: int | None, num: int) -> list[StepMetrics]:
    """The last `num` metrics lines of a rank in the last 256 KiB of a log, or fewer."""
    found: list[StepMetrics] = []
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            for block in blocks_backwards(file, max(0, end - _RECENT_BYTES), end):
                lines = lines_with(block, b"step:")
                found[:0] = filter(None, (parse_bytes(line, rank) for line in lines))
    except OSError:
        return []
    return found[-num:]


def read_active(path: Path) -> dict[str, Any] | None:
    """What the training process said was active (`cookbook active: {...}`), newest line."""
    found = [active for block in blocks(path) if (active := active_in(block))]
    return found[-1] if found else None


def active_in(block: bytes) -> dict[str, Any] | None:
    """The same of a block."""
    lines = lines_with(block, _ACTIVE.encode())
    found = [active for line in lines if (active := parse_active(line.decode("utf-8", "replace")))]
    return found[-1] if found else None


def parse_active(line: str) -> dict[str, Any] | None:
    """The JSON object of a `cookbook active:` line, or None where there is none to read."""
    _, marker, rest = COLOURS.sub("", line).partition(_ACTIVE)
    if not marker:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _read_newest(file: BinaryIO, start: int, end: int, rank: int | None) -> Newest:
    """The newest step and phase of the whole lines between two offsets, in one pass backwards."""
    phase = None
    for block in blocks_backwards(file, start, end):
        step, behind = _last_step(block, rank)
        phase = phase or last_phase(block, behind, rank)
        if step is not None:
            return Newest(step, phase or Phase.TRAINING)
    return Newest(None, phase)


def _last_step(block: bytes, rank: int | None) -> tuple[StepMetrics | None, int]:
    """The last metrics line of a block, and where it ends; 0 where there is none."""
    end = len(block)
    while (found := block.rfind(b"step:", 0, end)) >= 0:
        start = block.rfind(b"\n", 0, found) + 1
        line_end = block.find(b"\n", found)
        if line_end - start <= MAX_LINE_BYTES:
            metrics = parse_bytes(block[start:line_end], rank)
            if metrics is not None:
                return metrics, line_end
        end = start
    return None, 0


def parse_bytes(line: bytes, rank: int | None) -> StepMetrics | None:
    """The metrics of a line, if it is one of `rank`; substring tests first, since few lines are."""
    if b"step:" not in line or b"loss:" not in line:
        return None
    if rank is not None and b"[rank%d]:" % rank not in line:
        return None
    plain = _PLAIN_LINE.fullmatch(line)
    metrics = _plain_metrics(plain) if plain else parse_line(line.decode("utf-8", "replace"))
    return metrics if metrics is not None and (rank is None or metrics.rank == rank) else None


def _plain_metrics(found: re.Match[bytes]) -> StepMetrics:
    prefix, step, loss, norm, memory, percent, speed, tflops, mfu = found.groups()
    return StepMetrics(
        None if prefix is None else int(prefix),
        int(step),
        float(loss),
        float(norm),
        float(memory),
        float(percent),
        float(speed.replace(b",", b"")),
        float(tflops.replace(b",", b"")),
        None if mfu is None else float(mfu),
    )


def _metrics_text(text: str, rank: str | None) -> tuple[str, bool]:
    """The text up to where another line was written into this one, and whether that happened."""
    if rank is not None:
        # torchrun repeats the prefix inside a line that it read in two pieces.
        text = re.sub(rf"\[rank{rank}\]:(?!\[titan\])", "", text)
    other = re.search(r"\[rank[0-9]+\]:|\[titan\]", text)
    return (text[: other.start()], True) if other else (text, False)


def read_number(text: str) -> float | None:
    """A value as a metrics line prints it; None for what is none."""
    if len(text) > _MAX_NUMBER_CHARACTERS or not _NUMBER.fullmatch(text):
        return None
    return float(text.replace(",", ""))
