"""`checkpoint.keep_latest_k` holds for the last save too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.titan_run import BF16, run, write_assets

pytestmark = pytest.mark.titan


def test_the_last_save_counts(tmp_path: Path) -> None:
    write_assets(tmp_path)
    keep = ("--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")
    run(tmp_path, tmp_path / "out", 1, *BF16, *keep, steps=4)
    assert {path.name for path in (tmp_path / "out/checkpoint").iterdir()} == {"step-3", "step-4"}
