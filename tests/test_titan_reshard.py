"""Checkpoints that go on over other ranks: what TorchTitan's Trainer on CPU ranks can load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cookbook.run.checkpoints import STATES, read_checkpoint
from tests.titan_ranks import run_ranks
from tests.titan_run import (
    BF16,
    EP2,
    EP4,
    PP2,
    STANDARD,
    TP2,
    job,
    run,
    train,
    write_assets,
)

pytestmark = pytest.mark.titan

OPTIONS = (
    *(*STANDARD, *BF16, "--lr_scheduler.decay_ratio=0.0", "--checkpoint.enable"),
    *("--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"),
    # BF16 rounds at other places where the ranks divide the work otherwise.
    "--training.mixed_precision_param=float32",
)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Any]]:
    """Assets, the folder of a run of 2 ranks after 2 steps, and what 4 steps of it come to."""
    folder = tmp_path_factory.mktemp("trained")
    write_assets(folder / "assets")
    whole = run(folder / "assets", folder / "whole", 2, *EP2, *OPTIONS, steps=4)
    shutil.rmtree(folder / "whole" / "checkpoint" / "step-4")
    yield folder / "assets", folder / "whole", whole


@pytest.mark.parametrize("layout", [(*EP4, *TP2), (*EP2, *PP2)], ids=["to TP 2, EP 4", "to PP 2"])
def test_twice_the_ranks_go_on_with_the_same_losses(
    trained: tuple[Path, Path, Any], tmp_path: Path, layout: tuple[str, ...]
) -> None:
    assets, folder, whole = trained
    shutil.copytree(folder, tmp_path / "more")
    # The last rank is of the last stage, which knows the loss.
    options = job(assets, tmp_path / "more", *layout, *OPTIONS, steps=4)
    more = run_ranks(train, 4, options, seconds=200)[-1]
    assert any("Loading the checkpoint from" in text for text in more["said"])
    assert more["losses"] == pytest.approx(whole["losses"][2:], rel=ROUNDING)


def test_more_data_parallel_ranks_go_on_where_the_texts_start_anew(
    trained: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    """Every sequence is the same, so that 2 x 2 and 4 x 1 sequences are the same batch."""
    assets, _, _ = trained
    whole = run(assets, tmp_path / "a", 2, *EP2, *OPTIONS, data="same", batch=2, steps=4)
    shutil.rmtree(tmp_path / "a" / "checkpoint" / "step-4")
    anew = "--checkpoint.exclude_from_loading=dataloader"
    more = run(assets, tmp_path / "a", 4, *EP4, *OPTIONS, anew, data="same", batch=1, steps=4)
    assert more["losses"] == pytest.approx(whole["losses"][2:], rel=ROUNDING)


def test_what_torchtitan_saved_is_read_without_torch(
    trained: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    assets, folder, _ = trained
    full = read_checkpoint(2, folder / "checkpoint" / "step-2")
    assert (full.damage, full.states, full.text_readers) == (None, frozenset(STATES), 2)
    # TorchTitan's default at the last step.
    model_only = "--checkpoint.last-save-model-only"
    run(assets, tmp_path / "a", 2, *EP2, *OPTIONS, model_only, steps=1)
    last = read_checkpoint(1, tmp_path / "a" / "checkpoint" / "step-1")
    assert (last.damage, last.states, last.text_readers) == (None, frozenset(), 0)
