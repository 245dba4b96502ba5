"""MXFP8 GEMMs, forward and backward, against operands rounded by plain operations."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from bench.proofs.plain_experts import round_to_mxfp8
from tests.titan_ranks import run_ranks
from tests.titan_run import refusal

pytestmark = pytest.mark.titan


GROUPS = (32, 96, 32, 64)
EMPTY_GROUP = 2  # a group of padding only, as an expert without tokens has
K, N = 64, 96


def rounded(values: torch.Tensor, dim: int) -> torch.Tensor:
    """`values` through MXFP8 along `dim`, with plain operations."""
    return round_to_mxfp8(values.movedim(dim, -1)).movedim(-1, dim).double()


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(sum(GROUPS), K) * torch.logspace(-2, 2, K)
    x[sum(GROUPS[:EMPTY_GROUP]) : sum(GROUPS[: EMPTY_GROUP + 1])] = 0
    weight = torch.randn(len(GROUPS), N, K)
    upstream = torch.randn(sum(GROUPS), N) * 1e-3
    offsets = torch.tensor(GROUPS).cumsum(0).to(torch.int32)
    return x.bfloat16(), weight.bfloat16(), upstream.bfloat16(), offsets


def grouped_gemm(recipe: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and both gradients through the weights that the cookbook's converter makes."""
    x, weight, upstream, offsets = operands()
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].w1 = nn.Parameter(weight.clone())
    convert("grouped_mm", emulate=True, recipe=recipe).convert(model)
    x.requires_grad_()
    w = model["experts"].w1
    out = torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets)
    out.backward(upstream)
    assert x.grad is not None and w.grad is not None
    return out.detach(), x.grad, getattr(w.grad, "_data", w.grad)


def slices() -> list[slice]:
    ends = [0, *torch.tensor(GROUPS).cumsum(0).tolist()]
    return [slice(start, end) for start, end in pairwise(ends)]


def bf16_error(expected: torch.Tensor) -> torch.Tensor:
    """What storing a result in BF16 adds, with room for sums in float32."""
    return expected.abs() * 2.0**-8 + 1e-6 * expected.abs().max()


def test_emulation_rounds_as_the_format_says() -> None:
    """Blocks of 32 share a power-of-two scale, rounded up; elements are E4M3."""
    x, weight, upstream, _ = operands()
    groups = slices()
    rx, rw, ru = rounded(x, 1), rounded(weight, 2), rounded(upstream, 1)
    expected = (
        torch.cat([rx[g] @ rw[e].T for e, g in enumerate(groups)]),
        torch.cat([ru[g] @ rounded(weight, 1)[e] for e, g in enumerate(groups)]),
        torch.stack([rounded(upstream[g], 0).T @ rounded(x[g], 0) for g in groups]),
    )
    names = ("output", "input gradient", "weight gradient")
    for name, found, wanted in zip(names, grouped_gemm("mxfp8"), expected, strict=True):
        error = (found.double() - wanted).abs()
        assert bool((error <= bf16_error(wanted)).all()), name


def test_high_precision_weight_gradient_is_one() -> None:
    out, dx, dw = grouped_gemm("mxfp8_wgrad_with_hp")
    quantized = grouped_gemm("mxfp8")
    assert torch.equal(out, quantized[0]) and torch.equal(dx, quantized[1])
    x, _, upstream, _ = (one.double() for one in operands())
    wanted = torch.stack([upstream[g].T @ x[g] for g in slices()])
    assert bool(((dw.double() - wanted).abs() <= bf16_error(wanted)).all())
    assert not torch.equal(dw, quantized[2])


def exchange() -> dict[str, Any]:
    """One dispatch and combine of the quantized all-to-all, and of the plain one."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    from cookbook.titan.tt_0_2_2 import activity, mxfp8

    mxfp8.prepare_quantized_a2a()
    group, rank = dist.group.WORLD, dist.get_rank()
    sends, receives = ([3, 5], [3, 4]) if rank == 0 else ([4, 0], [5, 0])
    torch.manual_seed(rank)
    tokens = torch.randn(sum(sends), K).bfloat16().requires_grad_()
    upstream = torch.randn(sum(sends), K).bfloat16()

    def there_and_back(dispatch: Any, combine: Any) -> dict[str, torch.Tensor]:
        there = dispatch(tokens, receives, sends, group)
        there.retain_grad()
        back = combine(there * 1.0, sends, receives, group)
        tokens.grad = None
        back.backward(upstream)
        assert there.grad is not None and tokens.grad is not None
        found = {"there": there.detach(), "back": back.detach()}
        return found | {"gradient there": there.grad, "gradient": tokens.grad.clone()}

    plain = all_to_all_single_autograd
    return {
        "quantized": there_and_back(mxfp8._Dispatch.apply, mxfp8._Combine.apply),
        "plain": there_and_back(plain, plain),
        "noted": activity.observe_dispatch(),
    }


def test_quantized_all_to_all_rounds_what_it_sends_and_nothing_else() -> None:
    for found in run_ranks(exchange, 2):
        # Both of them, one in the forward and one in the backward.
        assert found["noted"] == {"mxfp8"}
        quantized, plain = found["quantized"], found["plain"]
        for name in ("there", "gradient there"):
            expected = rounded(plain[name], 1).bfloat16()
            assert torch.equal(quantized[name], expected), name
        # The way back of each is BF16: no further rounding.
        assert torch.equal(quantized["gradient"], rounded(plain["gradient"], 1).bfloat16())
        assert torch.equal(quantized["back"], rounded(plain["back"], 1).bfloat16())


def convert(
    kind: str, emulate: bool, fqns: Sequence[str] = ("experts",), recipe: str = "mxfp8"
) -> Any:
    from cookbook.titan.tt_0_2_2 import mxfp8

    grouped = SimpleNamespace(fqns=fqns, recipe_name=recipe, emulate=emulate)
    linear = SimpleNamespace(
        recipe_name="mxfp8_cublas",
        emulate=emulate,
        mxfp8_dim1_cast_kernel_choice="cuda",
        filter_fqns=["output"],
    )
    config: Any = SimpleNamespace(
        model=SimpleNamespace(converters=[f"quantize.{kind}.mx"]),
        compile=SimpleNamespace(enable=True, components=["model"]),
        quantize=SimpleNamespace(
            grouped_mm=SimpleNamespace(mx=grouped), linear=SimpleNamespace(mx=linear)
        ),
    )
    dims: Any = SimpleNamespace(tp_enabled=False)
    converter = {"grouped_mm": mxfp8.MXGroupedMMConverter, "linear": mxfp8.MXLinearConverter}[kind]
    return converter(config, dims)


def pretend(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2 import mxfp8

    monkeypatch.setattr(mxfp8, "has_cuda_capability", lambda *wanted: capability >= wanted)


@pytest.fixture(autouse=True)
def alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.models.moe.utils as utils
    from torchao.prototype.moe_training import scaled_grouped_mm

    monkeypatch.setattr(utils, "TOKEN_GROUP_ALIGN_SIZE_M", 8)
    name = "_emulated_mxfp8_scaled_grouped_mm_2d_2d"
    monkeypatch.setattr(scaled_grouped_mm, name, getattr(scaled_grouped_mm, name))


def test_a_converter_that_replaces_no_layer_is_refused(caplog: Any) -> None:
    reason = refusal(lambda: convert("grouped_mm", emulate=True, fqns=()), caplog)
    assert reason.startswith("quantize.grouped_mm.mx.fqns is empty")


@pytest.mark.parametrize("kind", ["grouped_mm", "linear"])
def test_gpus_before_blackwell_are_refused_without_emulation(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    pretend((9, 0), monkeypatch)
    reason = refusal(lambda: convert(kind, emulate=False), caplog)
    # The option is that of this converter.
    assert reason.startswith("MXFP8 needs a GPU of SM100 (B200) or later")
    assert reason.endswith(f"--quantize.{kind}.mx.emulate")
    emulated = convert(kind, emulate=True)
    pretend((10, 3), monkeypatch)
    assert convert(kind, emulate=False).emulate is False
    if kind == "linear":
        # Emulated layers use no kernel.
        assert emulated.config.kernel_preference.name == "EMULATED"
        assert emulated.config.mxfp8_dim1_cast_kernel_choice.name == "TORCH"
        config = convert(kind, emulate=False).config
        assert config.mxfp8_dim1_cast_kernel_choice.name == "CUDA"


@pytest.mark.parametrize(("capability", "emulates"), [((9, 0), True), ((10, 0), False)])
def test_the_exchange_casts_with_operations_below_blackwell(
    capability: tuple[int, int], emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchao.prototype.moe_training.ep import a2a_combine, a2a_dispatch

    from cookbook.titan.tt_0_2_2 import mxfp8

    modules: Any = (a2a_dispatch, a2a_combine)
    kernel = object()
    for module in modules:
        for name in ("triton_to_mxfp8_dim0", "all_to_all_single"):
            monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mxfp8, "has_cuda_capability", lambda *wanted: capability >= wanted)
    mxfp8.prepare_quantized_a2a()
    for module in modules:
        assert (module.triton_to_mxfp8_dim0 is not kernel) is emulates
        # NCCL knows the type.
        assert module.all_to_all_single is kernel


def test_groups_are_padded_to_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.models.moe.utils as utils

    pretend((10, 0), monkeypatch)
    convert("linear", emulate=False)
    assert utils.TOKEN_GROUP_ALIGN_SIZE_M == 8
    convert("grouped_mm", emulate=False)
    assert utils.TOKEN_GROUP_ALIGN_SIZE_M == 32
