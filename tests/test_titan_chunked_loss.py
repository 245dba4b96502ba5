"""Real Trainers on CPU ranks, with the loss over whole logits and without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.titan_ranks import run_ranks
from tests.titan_run import EP2, EP4, PP2, TP2, active, job, refused, train, write_assets

pytestmark = pytest.mark.titan

CHUNKED = "--loss.num_chunks=3"
ACCUMULATE = ("--training.global_batch_size=8",)
NO_LOSS_PARALLEL = ("--parallelism.disable_loss_parallel",)
COMPILED = ("--compile.enable", "--compile.components=loss", "--compile.backend=aot_eager")
FLOAT32 = ("--training.mixed_precision_param=float32",)
ALWAYS = ("--parallelism.fsdp_reshard_after_forward=always",)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    yield folder


def trained(assets: Path, out: Path, ranks: int, *options: str) -> dict[str, Any]:
    """Losses and norms of the last rank, which has them under PP too; and what all ranks said."""
    results = run_ranks(train, ranks, job(assets, out, *options), None, seconds=200)
    assert not any(result["ended"] for result in results), results[0]["said"][-3:]
    return dict(results[-1]) | {"said": [text for result in results for text in result["said"]]}


@pytest.mark.parametrize(
    ("ranks", "options", "tolerance"),
    [
        # In BF16 both round, at different places: a part of 2**-9 over few tokens.
        pytest.param(2, (*EP2, *COMPILED), 1e-4, id="tp 1, bf16, compiled"),
        pytest.param(2, (*EP2, *FLOAT32, *ACCUMULATE), 5e-6, id="tp 1, accumulated"),
        pytest.param(
            4, (*EP4, *TP2, *FLOAT32, *ACCUMULATE, *ALWAYS), 5e-6, id="tp 2, accumulated, resharded"
        ),
        pytest.param(
            4, (*EP4, *TP2, *FLOAT32, *NO_LOSS_PARALLEL), 5e-6, id="tp 2, loss replicated"
        ),
        pytest.param(4, (*EP2, *PP2, *FLOAT32), 5e-6, id="pp 2"),
        pytest.param(4, (*TP2, *PP2, *FLOAT32, *COMPILED), 5e-6, id="tp 2, pp 2, compiled"),
    ],
)
def test_losses_are_those_of_whole_logits(
    assets: Path, tmp_path: Path, ranks: int, options: tuple[str, ...], tolerance: float
) -> None:
    whole = trained(assets, tmp_path / "a", ranks, *options)
    chunked = trained(assets, tmp_path / "b", ranks, *options, CHUNKED)
    assert active(whole)["loss"] == "cross_entropy"
    assert active(chunked)["loss"] == "cross_entropy in 3 chunks"
    # The second step's loss has all gradients of the first in it.
    assert chunked["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    assert chunked["grad_norms"] == pytest.approx(whole["grad_norms"], rel=10 * tolerance)
    assert whole["losses"][0] > 5


def test_without_fsdp_it_multiplies_in_the_type_of_autocast() -> None:
    from cookbook.titan.any_stack.chunked_loss import chunked_cross_entropy
    from cookbook.titan.stack_2026_02.chunked_loss import build_chunked_loss

    # A compiled model has no say in how the loss is computed.
    compiled = SimpleNamespace(enable=True, components=["model"], backend="there is no such")
    config = SimpleNamespace(loss=SimpleNamespace(num_chunks=3), compile=compiled)
    torch.manual_seed(0)
    hidden: Any = torch.randn(2, 7, 16)
    weight, labels = torch.randn(40, 16), torch.randint(40, (2, 7))
    hidden.output_weight = weight
    loss = build_chunked_loss(config)
    low, high = (
        chunked_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, 3)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert loss(hidden, labels).equal(high) and not low.equal(high)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(hidden, labels).equal(low)


def test_an_output_layer_that_a_converter_replaced_is_refused(assets: Path, tmp_path: Path) -> None:
    options = (
        "--model.converters=quantize.linear.float8",
        "--quantize.linear.float8.emulate",
        "--quantize.linear.float8.recipe_name=rowwise",
        "--quantize.linear.float8.filter_fqns=moe",
        # A CPU has no FP8 rowwise kernel to prove.
        "--cookbook.no_self_check",
    )
    reason = refused(1, job(assets, tmp_path, *options, CHUNKED))
    assert "made it a Float8Linear; add output to their filter_fqns" in reason
