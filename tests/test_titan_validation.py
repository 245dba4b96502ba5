"""Validation reads the same batches each time and leaves no trace in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.titan_run import BF16, EP2, MXFP8, PP2, STANDARD, TP2, run, write_assets

pytestmark = pytest.mark.titan

VALIDATE = (
    "--validation.enable",
    "--validation.freq=2",
    "--validation.steps=2",
    "--validation.dataset=text",
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


def lines(attempt: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((*EP2, *STANDARD, *BF16), id="ep2"),
        pytest.param((*EP2, *STANDARD, *MXFP8), id="mxfp8", marks=pytest.mark.nightly),
        pytest.param((*BF16, "--loss.num_chunks=2"), id="chunked loss", marks=pytest.mark.nightly),
        pytest.param((*TP2, *BF16), id="tp2"),
        pytest.param((*PP2, *BF16, "--parallelism.pipeline_parallel_schedule=1F1B"), id="pp2"),
    ],
)
def test_training_is_the_same_with_and_without_validation(
    options: tuple[str, ...], assets: Path, tmp_path: Path
) -> None:
    files = f"--data.validation_files={assets}/varied/data.jsonl"
    attempts = [tmp_path / name / "attempt-1" for name in ("without", "with")]
    for attempt in attempts:
        attempt.mkdir(parents=True)
    # A learning rate of 0 from step 2 on: validations after it see the same weights.
    options = (*options, "--lr_scheduler.decay_ratio=0.0", "--debug.seed=1")
    without = run(assets, tmp_path / "a", 2, *options, attempt=attempts[0], steps=4)
    more = (*options, *VALIDATE, files)
    validated = run(assets, tmp_path / "b", 2, *more, attempt=attempts[1], steps=4)
    assert validated["losses"] == without["losses"]
    assert validated["grad_norms"] == without["grad_norms"]
    plain, both = lines(attempts[0]), lines(attempts[1])
    assert [line["step"] for line in both if "loss" in line] == [1, 2, 3, 4]
    losses = {line["step"]: line["validation_loss"] for line in both if "validation_loss" in line}
    assert list(losses) == [1, 2, 4] and all(0 < loss < 10 for loss in losses.values())
    seen = [[line["tokens_seen"] for line in each if "loss" in line] for each in (plain, both)]
    assert seen[0] == seen[1]
