"""Which phase of training a log's lines name."""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from cookbook.observe import phases
from cookbook.observe.lines import LogTail
from cookbook.observe.phases import Phase, parse_phase
from tests.test_logs import LOGS

TITAN = ROOT / "cookbook" / "titan" / "tt_0_2_2"


def phases_of(log: Path, rank: int | None = None) -> list[Phase]:
    """The phases that LogTail names while the log grows line by line."""
    content = log.read_bytes().splitlines(keepends=True)
    grown = log.parent / "grown.log"
    tail = LogTail(grown, rank)
    found = []
    for line in [b"", *content]:
        with grown.open("ab") as file:
            file.write(line)
        phase = tail.read().phase
        assert phase is not None
        found.append(phase)
    return found[:1] + [after for before, after in pairwise(found) if before != after]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compiling", ["loading", "building", "compiling", "first step"]),
        (
            "resumed",
            [
                *("loading", "building", "loading checkpoint", "first step", "training"),
                *("saving checkpoint", "finishing"),
            ],
        ),
        ("refused", ["loading", "building", "first step"]),
    ],
)
def test_the_phases_of_real_logs(tmp_path: Path, name: str, expected: list[str]) -> None:
    log = tmp_path / "train.log"
    log.write_bytes((LOGS / f"{name}.log").read_bytes())
    assert phases_of(log, rank=0) == expected
    os.unlink(tmp_path / "grown.log")
    # Another rank says nothing, so it is still loading.
    assert phases_of(log, rank=8) == ["loading"]


def test_training_goes_on_after_a_checkpoint() -> None:
    titan = "[rank8]:[titan] 2026-11-20 18:29:22,279 - root - INFO - "
    saved = "Finished saving the checkpoint (or staging if async is enabled)in 20.33 seconds."
    assert parse_phase(titan + saved, 8) == Phase.TRAINING
    assert parse_phase(titan + saved, 0) is None
    # A progress bar that left no newline stands before it.
    begun = "[rank0]:Generating: 0 examples [00:00, ? examples/s]" + titan + "Starting job: x"
    assert parse_phase(begun, 8) == Phase.LOADING
    assert parse_phase("we log: INFO - Training starts at step 1") is None


def test_each_rank_has_a_phase_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    info = "[titan] 2026-11-20 18:29:22,279 - root - INFO - "
    said = ["[rank8]:{}Training starts at step 1", "[rank0]:{}Building deepseek_v3 16Bwith {{"]
    log.write_text("".join(line.format(info) + "\n" for line in said))
    assert LogTail(log, 8).read().phase == Phase.FIRST_STEP
    assert LogTail(log, 0).read().phase == LogTail(log).read().phase == Phase.BUILDING
    assert LogTail(log, 1).read().phase == Phase.LOADING


@pytest.mark.titan
def test_the_phases_are_told_by_messages_of_the_installed_torchtitan() -> None:
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None and spec.origin is not None
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(spec.origin).parent.rglob("*.py")
        if "experiments" not in path.parts
    )
    assert phases._PHASES
    for message in phases._PHASES:
        assert f'"{message}' in source, message


def test_the_cookbooks_own_messages_are_said_by_its_training_process() -> None:
    source = (TITAN / "saving.py").read_text(encoding="utf-8")
    assert phases._OWN_PHASES
    for message in phases._OWN_PHASES:
        assert f'"{message}' in source, message


def test_what_is_waited_for_without_a_word_of_torchtitan_is_a_save() -> None:
    titan = "[rank8]:[titan] 2026-11-20 18:29:22,279 - root - INFO - "
    for what in ("written", "copied"):
        line = f"{titan}cookbook: waiting until the checkpoint is {what}"
        assert parse_phase(line, 8) == Phase.SAVING_CHECKPOINT
    assert parse_phase(f"{titan}cookbook: the checkpoint is copied", 8) == Phase.TRAINING
