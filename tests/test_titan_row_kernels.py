"""The standard backend's rows by own kernels: plans, activations and training, each beside another.

A layer on several ranks against float64 is in `test_titan_moe.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cookbook.titan.common import expert_groups as swiglu
from cookbook.titan.common.expert_groups import plan_groups, plan_on_device
from tests.titan_run import A2A, EP2, EP4, MXFP8, PP2, TP2, active, run

pytestmark = pytest.mark.titan

ON = "--cookbook.row_kernels"


@pytest.mark.parametrize("tokens", [0, 1, 37, 64])
def test_a_plan_on_the_device_is_that_of_the_host(tokens: int) -> None:
    torch.manual_seed(0)
    experts = torch.rand(tokens, 5).argsort(1)[:, :2]
    counts = torch.bincount(experts.flatten(), minlength=6).tolist()
    there, here = plan_on_device(experts, 6, 8), plan_groups(experts, counts, 8)
    used = int(here.ends[-1])
    assert torch.equal(there.copies[:used], here.copies) and (there.copies[used:] == -1).all()
    assert len(there.copies) % 8 == 0
    for name in ("slots", "sizes", "ends"):
        assert torch.equal(getattr(there, name), getattr(here, name))
    packed = plan_on_device(experts, 6, 1)
    assert packed.sizes.tolist() == counts and len(packed.copies) == experts.numel()
    assert torch.equal(packed.copies.sort().values, torch.arange(experts.numel()).int())


def activation_errors(hidden: int, dtype: torch.dtype, kernels: bool) -> list[float]:
    """Of activations and both gradients, relative, against float64."""
    torch.manual_seed(hidden)
    values = [torch.randn(9, 2 * hidden), torch.rand(9, 1), torch.randn(9, hidden)]
    both, scores, grad = values[0].to(dtype), values[1], values[2].to(dtype)
    exact = [one.double().requires_grad_() for one in (both, scores)]
    gate, up = exact[0].chunk(2, 1)
    out = torch.nn.functional.silu(gate) * up * exact[1]
    wanted = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
    if kernels:
        from cookbook.titan.common import triton_kernels

        found = [triton_kernels.activate(both, scores)]
        found += triton_kernels.gradient(grad, both, scores)
    else:
        leaves = [both.requires_grad_(), scores.requires_grad_()]
        out = swiglu.scored_swiglu(both, scores)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    pairs = zip(found, wanted, strict=True)
    return [float((one.double() - exact).norm() / exact.norm()) for one, exact in pairs]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("hidden", [24, 64])
def test_scored_activations(hidden: int, dtype: torch.dtype, most: float) -> None:
    assert max(activation_errors(hidden, dtype, kernels=False)) < most


def interpreted() -> None:
    """Runs in a process of its own, whose Triton interprets kernels on the CPU."""
    # The kernels take 2048 at a time: once more, ragged.
    for hidden in (24, 1408, 2100):
        assert max(activation_errors(hidden, torch.float32, kernels=True)) < 1e-6
        assert max(activation_errors(hidden, torch.bfloat16, kernels=True)) < 6e-3
    from cookbook.titan.common import triton_kernels

    weight, joined = torch.randn(3, 30, 200), torch.zeros(3, 60, 200, dtype=torch.float64)
    triton_kernels.cast(weight, joined[:, 30:])
    assert torch.equal(joined, torch.cat([torch.zeros_like(weight), weight], 1).double())


def test_two_weights_are_joined_and_their_gradients_are_apart() -> None:
    gate, up = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    joined = swiglu.join(torch.float64, gate, up)
    assert torch.equal(joined, torch.cat([gate, up], 1).double())
    upstream = torch.randn(2, 6, 4, dtype=torch.float64)
    grads = torch.autograd.grad(joined, [gate, up], upstream)
    assert torch.equal(torch.cat(grads, 1), upstream.float())
    assert all(one.untyped_storage().nbytes() == gate.nbytes for one in grads)


Change = Callable[..., Any]


def off(place: int) -> Change:
    """A function whose result at `place` is scaled."""

    def change(original: Change) -> Change:
        def faulty(*args: Any) -> Any:
            found = list(original(*args))
            found[place] = found[place] * (1.01 if place == 0 else 1.1)
            return tuple(found)

        return faulty

    return change


def without_base(original: Change) -> Change:
    return lambda *args: original(*args[:5])


def next_row(original: Change) -> Change:
    return lambda *args: original(*args).roll(1, 0)


def last_column_lost(original: Change) -> Change:
    def faulty(*args: Any) -> Any:
        found = original(*args)
        found[:, -1] = 0
        return found

    return faulty


def one_row_lost(original: Change) -> Change:
    def faulty(*args: Any) -> Any:
        copies, slots = original(*args)
        return copies.masked_fill(copies == 21, -1), slots

    return faulty


def parts_swapped(original: Change) -> Change:
    return lambda dtype, *weights: original(dtype, *reversed(weights))


FAULTS: dict[str, tuple[str, Change, str]] = {
    "the shared experts' output is not added": ("_collect", without_base, "output"),
    "rows go one slot too far": ("_spread", next_row, "not zero"),
    "a row's last number is lost": ("_spread", last_column_lost, "output"),
    "a copy is lost": ("_place", one_row_lost, "output"),
    "scores of the next row": ("_at", next_row, "output"),
    "activations of the next row": ("_activate", next_row, "output"),
    "the gate's gradient is off": ("_activation_gradient", off(0), "gradient of the projections"),
    "the scores' gradient is off": ("_activation_gradient", off(1), "gradient of the scores"),
    "gate and up are swapped": ("join", parts_swapped, "weights"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_self_check_finds_faults(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.self_check import rows

    if fault:
        name, change, _ = FAULTS[fault]
        module = rows if name == "join" else swiglu
        monkeypatch.setattr(module, name, change(getattr(module, name)))
    proofs = [
        rows.row_errors(rows.RowsShape(96, 64, 8, 3, 8), True, "cpu", counted=False),
        rows.swiglu_errors(96, 176, "cpu"),
        rows.join_errors(4, 32, 96, "cpu"),
    ]
    try:
        found = " ".join(error.tensor for proof in proofs for error in proof if error.fault)
    except ValueError as error:
        found = str(error)
    assert FAULTS[fault][2] in found if fault else not found


# As in `bench.gpu_numerics`.
SLOW = (
    "--optimizer.lr=4e-4",
    "--lr_scheduler.warmup_steps=20",
    "--lr_scheduler.decay_ratio=0",
    # Of the experts alone, BF16 would hide less than it does of all layers.
    "--training.mixed_precision_param=float32",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "TP 2": (4, (*EP4, *TP2)),
    "PP 2": (4, (*EP2, *PP2, "--parallelism.pipeline_parallel_microbatch_size=2")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_the_published_options(
    assets: Path, tmp_path: Path, layout: str
) -> None:
    ranks, options = LAYOUTS[layout]

    def trained(name: str, *words: str) -> dict[str, Any]:
        words = (*options, *SLOW, *words)
        found = run(assets, tmp_path / name, ranks, *words, of_rank=-1, steps=20, batch=8)
        return found | {"rows": active(found)["rows"]}

    published, kernels = trained("published"), trained("kernels", ON)
    assert (published["rows"], kernels["rows"]) == (None, "kernels")
    assert len(kernels["losses"]) == 20 and kernels["losses"] != published["losses"]
    assert kernels["losses"] == pytest.approx(published["losses"], rel=1e-4)


@pytest.mark.nightly
def test_quantized_experts_and_exchanges_train_with_them(assets: Path, tmp_path: Path) -> None:
    losses = []
    for number, words in enumerate([(), (ON,)]):
        options = (*EP2, *A2A, *MXFP8, *SLOW[:3], *words)
        trained = run(assets, tmp_path / str(number), 2, *options, steps=3)
        losses.append(trained["losses"])
    found = active(trained)
    assert [found[name] for name in ("rows", "dispatch", "grouped_gemms")] == [
        *("kernels", "mxfp8", "mxfp8")
    ]
    # Scores are applied before the last product is quantized.
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


RECOMPUTED: dict[str, tuple[str, ...]] = {
    "full": ("--activation_checkpoint.mode=full",),
    "selective": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
        "--activation_checkpoint.op_sac_save_list=attention,communication,grouped_mm",
    ),
}


def test_recomputation_changes_no_bit(assets: Path, tmp_path: Path) -> None:
    def trained(name: str, *words: str) -> dict[str, Any]:
        return run(assets, tmp_path / name, 2, *EP2, ON, *words, steps=2)

    kept = trained("kept")
    for mode, words in RECOMPUTED.items():
        again = trained(mode, *words)
        for what in ("losses", "grad_norms"):
            assert again[what] == kept[what], mode
