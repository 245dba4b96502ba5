"""One pass over a log finds what a pass for each thing finds, in blocks of any size."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from cookbook.observe import memory, text
from cookbook.observe.curve import collect_steps
from cookbook.observe.lines import read_active, read_log
from cookbook.observe.memory import read_peak_memory
from cookbook.observe.scan import scan_log
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from tests.test_logs import LOGS
from tests.test_results import metrics_line

ACTIVE = '[rank1]:[titan] 2026-11-20 18:29:22,279 - root - INFO - cookbook active: {"gpu": "%s"}\n'


@pytest.mark.parametrize("log", sorted(LOGS.glob("*.log")), ids=lambda log: log.stem)
@pytest.mark.parametrize("size", [700, text._BLOCK_BYTES])
def test_a_scan_is_all_passes_in_one(log: Path, size: int) -> None:
    for rank in (0, 1, 128):
        with mock.patch.object(text, "_BLOCK_BYTES", size):
            found = scan_log(log, rank)
        assert found.steps == list(read_log(log, rank))
        assert found.active == read_active(log)
        assert (found.memory_gib or None) == read_peak_memory([log])
        made = [step for step, _ in found.times if step]
        assert made == [metrics.step for metrics in found.steps]


def test_of_several_words_on_what_is_active_the_last_counts(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(ACTIVE % "a" + ACTIVE % "b" + metrics_line(1) * 99)
    with mock.patch.object(text, "_BLOCK_BYTES", 300):
        assert scan_log(log, 0).active == {"gpu": "b"}
    assert scan_log(tmp_path / "none.log", 0).steps == []


def test_a_peak_outlives_the_many_that_follow(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    values = ["1,024.50", *(f"{number}.25" for number in range(200))]
    log.write_text("".join(metrics_line(1, memory=value) for value in values))
    with (
        mock.patch.object(text, "_BLOCK_BYTES", 1000),
        mock.patch.object(memory, "_MOST_KNOWN", 10),
    ):
        assert read_peak_memory([log]) == scan_log(log, 0).memory_gib == 1024.5


def test_a_colour_hides_no_peak(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    line = metrics_line(1, memory="71.5")
    for coloured in (
        line.replace("memory: ", "memory: \x1b[1m"),
        line.replace("mem", "\x1b[1mmem"),
    ):
        assert coloured != line
        log.write_text(coloured)
        assert read_peak_memory([log]) == scan_log(log, 0).memory_gib == 71.5


def test_where_the_loss_rank_is_not_shown_the_lowest_rank_that_is_counts(tmp_path: Path) -> None:
    log = tmp_path / "attempt-0" / "train.log"
    log.parent.mkdir()
    lines = ["[rank3]:no step of its own\n", metrics_line(1, 12, loss="7.0")]
    lines += [metrics_line(step, rank, loss=f"{rank}.5") for step in (1, 2) for rank in (12, 4)]
    log.write_text("".join(lines))
    steps = collect_steps(CellFolder(tmp_path), CellRecord())
    assert [(step.step, step.rank, step.loss) for step in steps] == [(1, 4, 4.5), (2, 4, 4.5)]
    log.write_text(metrics_line(3, None))
    (step,) = collect_steps(CellFolder(tmp_path), CellRecord())
    assert (step.step, step.rank) == (3, None)
