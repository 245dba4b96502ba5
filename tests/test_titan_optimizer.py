"""A step whose gradients are not finite on one rank is skipped on all, counted and limited."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.titan_ranks import run_ranks
from tests.titan_run import BF16, EP2, STANDARD, job, train, write_assets

pytestmark = pytest.mark.titan


def poisoned(arguments: list[str], attempt: Path, steps: tuple[int, ...]) -> dict[str, Any]:
    """Train with a gradient of rank 1 that is not finite in `steps`."""
    import torch
    from torchtitan.train import Trainer

    compute = Trainer.forward_backward_step

    def compute_and_poison(self: Any, **batch: Any) -> Any:
        loss = compute(self, **batch)
        if self.step in steps and torch.distributed.get_rank() == 1:
            norm = self.model_parts[0].layers["1"].attention_norm.weight
            norm.grad.to_local()[0] = math.nan
        return loss

    Trainer.forward_backward_step = compute_and_poison
    try:
        return train(arguments, attempt)
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        Trainer.forward_backward_step = compute


def test_bad_steps_are_skipped_counted_and_limited(tmp_path: Path) -> None:
    write_assets(tmp_path)
    options = (*EP2, *STANDARD, *BF16, "--lr_scheduler.warmup_steps=0")
    found: dict[str, Any] = {}
    for name, limit, steps in (
        ("unwatched", 0, (2,)),
        ("skipped", 1, (2,)),
        ("limit", 1, (2, 3)),
    ):
        attempt = tmp_path / name / "attempt-1"
        attempt.mkdir(parents=True)
        skip = f"--training.max_skipped_steps={limit}"
        argv = job(tmp_path, tmp_path / name, *options, skip, steps=4)
        found[name] = run_ranks(poisoned, 2, argv, attempt, steps, seconds=200)
    assert math.isnan(found["unwatched"][0]["losses"][2])
    losses = found["skipped"][0]["losses"]
    assert all(map(math.isfinite, losses)) and losses[3] < losses[0]
    lines = (tmp_path / "skipped/attempt-1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["skipped_steps"] for line in lines] == [0, 1, 1, 1]
    assert all("2 of training.max_skipped_steps=1" in one["error"] for one in found["limit"])


@pytest.mark.parametrize("decay_type", ["linear", "cosine"])
def test_the_rate_stays_at_the_end_of_its_schedule(decay_type: str) -> None:
    import torch
    from torchtitan.config.job_config import LRScheduler

    from cookbook.titan.tt_0_2_2.loss_and_optimizer import build_lr_schedulers

    def rates(steps: int, total: int | None) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        config = LRScheduler(warmup_steps=2, total_steps=total, decay_type=decay_type)
        config.min_lr_factor = 0.1
        schedulers = build_lr_schedulers([optimizer], config, steps)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedulers.step()
        return found

    assert rates(10, 6)[:6] == rates(6, None)
    assert rates(10, 6)[6:] == [rates(6, None)[-1]] * 4
