"""The reason of a failure, found in logs of any size and content."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook.observe import text
from cookbook.observe.failure import find_reason
from tests.test_logs import LOGS


@pytest.mark.parametrize("size", [1000, 300_000, 3_000_000])
def test_a_reason_behind_much_else(tmp_path: Path, size: int) -> None:
    noise = "[rank0]:NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P\n" * (size // 50)
    error = "[rank8]:Traceback (most recent call last):\n"
    for between in ("", noise):
        log = noise + error + between + "[rank8]:ValueError: raised:\n" + between
        log += "[rank8]:no text\n" + noise
        (tmp_path / "train.log").write_text(log)
        assert find_reason(tmp_path) == "rank 8: ValueError: raised: no text"


@pytest.mark.parametrize("name", ["out_of_memory", "nccl_timeout", "refused", "resumed"])
def test_a_log_in_small_blocks_gives_the_same_reason(tmp_path: Path, name: str) -> None:
    log = tmp_path / "train.log"
    log.write_bytes((LOGS / f"{name}.log").read_bytes())
    # Its summary is the only thing that tells, and stands in several blocks.
    summary = (LOGS / "refused.log").read_text().partition("Root Cause")
    for content in (log.read_text(), "[rank0]:starts\n" * 99 + "".join(summary[1:])):
        log.write_text(content)
        reason = find_reason(log)
        for size in (30, 100, 1000):
            with mock.patch.object(text, "_BLOCK_BYTES", size):
                assert find_reason(log) == reason
    assert reason == "rank 1: exitcode: 1"


def test_many_lines_that_may_be_the_reason_neither_hide_a_better_one_nor_fill_memory(
    tmp_path: Path,
) -> None:
    weak = "srun: error: Node failure on worker-3\n" * 20_000
    log = tmp_path / "train.log"
    log.write_text(f"{weak}Traceback (most recent call last):\nOSError: disk full\n{weak}")
    tracemalloc.start()
    assert find_reason(log) == "OSError: disk full"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_reason_that_cuts_a_metrics_line_off_is_found(tmp_path: Path) -> None:
    whole = "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - step:  1  loss:  2.0\n"
    cut = whole.partition("loss")[0] + "slurmstepd: error: Detected 1 oom_kill event\n"
    (tmp_path / "train.log").write_text(whole * 9 + cut + whole * 9)
    with mock.patch.object(text, "_BLOCK_BYTES", 300):
        assert "oom_kill" in (find_reason(tmp_path) or "")


LONG = "srun: error: " + "x" * 60_000 + "\n"


@pytest.mark.parametrize(
    ("content", "times", "expected"),
    [
        ("x", 24 << 20, None),
        ("\0", 24 << 20, None),
        ("\n", 4 << 20, None),
        ("KeyError: a:\n", 100_000, "KeyError: a: KeyError: a: "),
        (LONG, 300, "srun: error: xxx"),
    ],
)
def test_a_log_of_anything_takes_no_memory(
    tmp_path: Path, content: str, times: int, expected: str | None
) -> None:
    log = tmp_path / "train.log"
    log.write_text("Traceback (most recent call last):\n" + content * times)
    tracemalloc.start()
    reason = find_reason(log)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert (reason is None) == (expected is None)
    assert (reason or "").startswith(expected or "")


METRICS = "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - step:  1  loss:  2.00000\n"
FRAGMENTS = [
    *("Traceback (most recent call last):\n", "  File x\n", "ValueError: a\n", "KeyError: b:\n"),
    *("During handling of the above exception, another\n", "OutOfMemoryError: c\n", "\r", "\0"),
    *("Root Cause (first observed failure):\n", "  rank      : 8 (local_rank: 0)\n", "====\n"),
    *("  exitcode  : -9 (pid: 5)\n", "  time      : 2026\n", "srun: error: x\n", "[rank8]:", "\n"),
    *(
        "[rank0]:",
        "[rank٣]:",
        "[rank" + "9" * 5000 + "]:",
        "cookbook refuses: d\n",
        "train.sh: e\n",
    ),
    *(METRICS, METRICS.rstrip(), "x" * 40 + "\n", "step: 1 loss: 2\n", "\x1b[31m", "ü\n"),
    *("  exitcode  : " + "9" * 5000 + "\n", "Connection closed\n", "oom_kill\n", "\udcff"),
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join), st.integers(5, 200))
def test_the_reason_does_not_depend_on_the_blocks_that_are_read(
    tmp_path_factory: pytest.TempPathFactory, content: str, block: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "train.log"
    # The checks of the script are looked for in the first block alone.
    log.write_bytes(b"[rank0]:starts\n" + content.encode("utf-8", "surrogateescape"))
    reason = find_reason(log)
    with mock.patch.object(text, "_BLOCK_BYTES", block):
        assert find_reason(log) == reason
    assert reason is None or (reason.isprintable() and 0 < len(reason) <= 240)


@settings(deadline=None)
@given(st.text())
def test_a_reason_is_one_printable_line(
    tmp_path_factory: pytest.TempPathFactory, content: str
) -> None:
    folder = tmp_path_factory.mktemp("log")
    said = f"ValueError: {content}".encode("utf-8", "replace")
    (folder / "train.log").write_bytes(b"Traceback (most recent call last):\n" + said)
    reason = find_reason(folder)
    # Only a metrics line is never the reason.
    assert reason is not None or ("step:" in content and "loss:" in content)
    assert (reason or "ValueError:").startswith("ValueError:")
    assert (reason or "").isprintable() and len(reason or "") <= 240
