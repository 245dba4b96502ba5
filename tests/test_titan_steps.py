"""Steps whose gradients are not finite, the learning rate, and validation beside training."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.titan_ranks import run_ranks
from tests.titan_run import BF16, EP2, MXFP8, PP2, STANDARD, TP2, job, run, train

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


def test_bad_steps_are_skipped_counted_and_limited(assets: Path, tmp_path: Path) -> None:
    options = (*EP2, *STANDARD, *BF16, "--lr_scheduler.warmup_steps=0")
    found: dict[str, Any] = {}
    for name, steps in (("skipped", (2,)), ("limit", (2, 3))):
        attempt = tmp_path / name / "attempt-1"
        attempt.mkdir(parents=True)
        skip = "--training.max_skipped_steps=1"
        argv = job(assets, tmp_path / name, *options, skip, steps=4)
        found[name] = run_ranks(poisoned, 2, argv, attempt, steps)
    losses = found["skipped"][0]["losses"]
    assert all(map(math.isfinite, losses)) and losses[3] < losses[0]
    lines = (tmp_path / "skipped/attempt-1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["skipped_steps"] for line in lines] == [0, 1, 1, 1]
    assert all("2 of training.max_skipped_steps=1" in one["error"] for one in found["limit"])


def test_the_tokens_of_a_skipped_step_move_no_routing_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torchtitan.config.job_config import Optimizer

    from cookbook.titan.tt_0_2_2.loss_and_optimizer import GradientWatch, build_optimizers

    monkeypatch.setattr(GradientWatch, "limit", 1)
    dims: Any = SimpleNamespace(get_optional_mesh=lambda name: None)

    def bias(*steps: tuple[list[float], float]) -> list[float]:
        """The bias after steps of these counts and gradient norms."""
        monkeypatch.setattr(GradientWatch, "skipped", 0)
        model, block, moe = torch.nn.Module(), torch.nn.Module(), torch.nn.Linear(4, 4)
        moe.register_buffer("expert_bias", torch.zeros(4))
        moe.register_buffer("tokens_per_expert", torch.zeros(4))
        moe.load_balance_coeff = 1e-3
        block.moe_enabled, block.moe = True, moe
        model.layers = torch.nn.ModuleDict({"0": block})
        optimizers = build_optimizers([model], Optimizer(implementation="for-loop"), dims)
        for counts, norm in steps:
            moe.tokens_per_expert += torch.tensor(counts)
            monkeypatch.setattr(GradientWatch, "norm", torch.tensor(norm))
            optimizers.step()
        return list(moe.expert_bias.tolist())

    good = ([40.0, 20.0, 20.0, 0.0], 1.0)
    assert bias(good, ([0.0, 0.0, 0.0, 100.0], math.nan), good) == bias(good, good) != [0.0] * 4


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


@pytest.mark.parametrize("saved_after", [1, 4])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_resume_trains_with_the_options_asked_at_the_schedules_position(
    tmp_path: Path, saved_after: int, in_backward: bool
) -> None:
    import torch
    from torch.distributed import checkpoint
    from torchtitan.config.job_config import LRScheduler, Optimizer

    from cookbook.titan.tt_0_2_2.loss_and_optimizer import build_lr_schedulers, build_optimizers

    dims: Any = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=0, pp_enabled=0)

    def train(steps: int, resumes: bool, **asked: float) -> list[dict[str, Any]]:
        """Train two model parts; what each optimizer's step used, but not its parameters."""
        parts = [torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False)}) for name in "ab"]
        for part in parts:
            part.layers = torch.nn.ModuleDict()
        config = Optimizer(early_step_in_backward=in_backward, implementation="for-loop", **asked)
        optimizers = build_optimizers(parts, config, dims)
        schedulers = build_lr_schedulers(optimizers, LRScheduler(warmup_steps=2), 8)
        state = {"optimizer": optimizers, "lr_scheduler": schedulers}
        if resumes:
            checkpoint.load(state, checkpoint_id=tmp_path)
        used = []
        for _ in range(steps):
            (logged,) = schedulers.schedulers[0].get_last_lr()
            for one in optimizers:
                (group,) = one.param_groups
                used.append({**group, "params": None, "logged": logged})
            for part, name in zip(parts, "ab", strict=True):
                part[name](torch.ones(1, 2)).sum().backward()
            optimizers.step()
            schedulers.step()
        if not resumes:
            checkpoint.save(state, checkpoint_id=tmp_path)
        return used

    other = {"lr": 1e-6, "weight_decay": 0.3, "eps": 1e-5, "beta1": 0.5, "beta2": 0.6}
    whole = train(8, resumes=False, **other)
    train(saved_after, resumes=False)
    assert train(8 - saved_after, resumes=True, **other) == whole[2 * saved_after :]


VALIDATE = (
    "--validation.enable",
    "--validation.freq=2",
    "--validation.steps=2",
    "--validation.dataset=text",
)


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
