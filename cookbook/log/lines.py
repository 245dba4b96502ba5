"""In: TorchTitan's console logs, even while they are written. Out: the figures of each step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
RANK = re.compile(r"\[rank(\d+)\]:")
# Validation prints `validate step:` with a loss and a tps of its own: not a training step.
_STEP = re.compile(r"(?<!validate )\bstep:\s*(\d+)(?=\s)")
_KEY_VALUE = re.compile(r"(?<![\w/])([a-z_]+):\s*([^\s(]+)")
_MEMORY = re.compile(r"\bmemory:\s*([-\d.,]+)GiB(?:\((-?[\d.]+)%\))?")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?|[-+]?(?:nan|inf)")
# Starts with literal text, which makes the search five times faster than a word boundary would;
# besides, a colour's `m` stands right before the key.
_PEAK_MEMORY = re.compile(rb"memory:\s*(?:\x1b\[[0-9;]*m)?(\d[\d.,]*)GiB")
_ACTIVE = "cookbook active: "
_BLOCK_BYTES = 4 << 20
_TAIL_BYTES = 256 << 10


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


def parse_line(line: str) -> StepMetrics | None:
    """The metrics of one whole line, or None where it is not a metrics line.

    Keys are looked up by name, since widths, decimals and columns differ among versions.
    """
    if "step:" not in line or "loss:" not in line:
        return None
    text = ANSI.sub("", line).rstrip()
    found = _STEP.search(text)
    if found is None:
        return None
    ranks = RANK.findall(text, 0, found.start())
    metrics, was_cut = _metrics_text(text[found.end() :], ranks[-1] if ranks else None)
    values: dict[str, float | None] = {}
    for key, value in _KEY_VALUE.findall(metrics):
        values.setdefault(key, _number(value.removesuffix("%")))
    loss = values.get("loss")
    if loss is None:
        return None
    # Another line cut this one off: its last value may be a part, unless that is `mfu`'s percent.
    if was_cut and not re.search(r"mfu:\s*(?:[\d.,]+%|N/A)$", metrics):
        return None
    memory = _MEMORY.search(metrics)
    return StepMetrics(
        rank=int(ranks[-1]) if ranks else None,
        step=int(found.group(1)),
        loss=loss,
        grad_norm=values.get("grad_norm"),
        memory_gib=_number(memory.group(1)) if memory else None,
        memory_percent=_number(memory.group(2)) if memory and memory.group(2) else None,
        tokens_per_second=values.get("tps"),
        tflops=values.get("tflops"),
        mfu=values.get("mfu"),
    )


def read_log(path: Path, rank: int | None = None) -> Iterator[StepMetrics]:
    """The metrics lines of a log in order, of all ranks, or only of those prefixed `[rank<rank>]:`.

    The last line is left out while its newline is missing: the job may still be writing it.
    """
    wanted = b"loss:" if rank is None else b"[rank%d]:" % rank
    for block in _blocks(path):
        for line in block.split(b"\n"):
            # Substring tests first: most lines of a big log belong to other ranks.
            if b"step:" in line and wanted in line:
                metrics = parse_line(line.decode("utf-8", "replace"))
                if metrics is not None and (rank is None or metrics.rank == rank):
                    yield metrics


def read_last_step(path: Path, rank: int | None = None) -> StepMetrics | None:
    """The newest metrics line near the end of a log, at a cost that does not grow with the log."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - _TAIL_BYTES)
            file.seek(start)
            tail = file.read(_TAIL_BYTES)
    except OSError:
        return None
    lines = tail.split(b"\n")[1 if start else 0 : -1]
    for line in reversed(lines):
        metrics = parse_line(line.decode("utf-8", "replace")) if b"step:" in line else None
        if metrics is not None and (rank is None or metrics.rank == rank):
            return metrics
    return None


def read_peak_memory(paths: Iterable[Path]) -> float | None:
    """The most GiB that any metrics line of these logs shows, over all ranks and steps."""
    peak = 0.0
    for path in paths:
        for block in _blocks(path):
            # A set first: peaks repeat from step to step, so few of them are left to convert.
            values = (_number(value.decode()) for value in set(_PEAK_MEMORY.findall(block)))
            peak = max(peak, max((value or 0.0 for value in values), default=0.0))
    # TorchTitan prints -0.00GiB where the device has no memory statistics.
    return peak or None


def read_active(path: Path) -> dict[str, Any] | None:
    """What the training process said was active (`cookbook active: {...}`), newest line."""
    active = None
    for block in _blocks(path):
        start = block.rfind(_ACTIVE.encode())
        if start >= 0:
            line = block[start : block.index(b"\n", start)]
            active = parse_active(line.decode("utf-8", "replace")) or active
    return active


def parse_active(line: str) -> dict[str, Any] | None:
    """The JSON object of a `cookbook active:` line, or None where there is none to read."""
    _, marker, rest = ANSI.sub("", line).partition(_ACTIVE)
    if not marker:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _metrics_text(text: str, rank: str | None) -> tuple[str, bool]:
    """The text up to where another line was written into this one, and whether that happened."""
    if rank is not None:
        # torchrun repeats the prefix inside a line that it read in two pieces.
        text = re.sub(rf"\[rank{rank}\]:(?!\[titan\])", "", text)
    other = re.search(r"\[rank\d+\]:|\[titan\]", text)
    return (text[: other.start()], True) if other else (text, False)


def _number(text: str) -> float | None:
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in blocks of whole lines, each ending with a newline."""
    with path.open("rb") as file:
        carry = b""
        while block := file.read(_BLOCK_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                yield carry + block[:end]
                carry = block[end:]
            else:
                carry += block
