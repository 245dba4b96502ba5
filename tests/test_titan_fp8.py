"""FP8 experts and linear layers, and the AdamW that clips: against references, and as kernels."""

from copy import deepcopy
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cookbook.titan.common import adamw, fp8
from cookbook.titan.common.expert_groups import plan_on_device, row_scores
from cookbook.titan.common.weight_copies import keep_dtypes
from cookbook.titan.self_check import low_precision, products
from cookbook.titan.tt_0_2_2.float8 import (
    FP8GroupedMMConverter,
    FP8Linear,
    FP8LinearConverter,
    expert_weights,
)
from tests.started import python
from tests.titan_run import EP2, PP2, TP2, active, refusal, run

pytestmark = pytest.mark.titan


@pytest.mark.parametrize("shape", [(96, 256, 128, 4, 3, 16), (130, 128, 192, 8, 2, 16)])
def test_a_layer_of_experts_is_within_fp8_of_float32(
    shape: tuple[int, int, int, int, int, int],
) -> None:
    found = list(low_precision.layer_errors(*shape, device="cpu"))
    assert len(found) == 6 and [one.fault for one in found] == [None] * 6


def test_a_linear_layer_is_within_fp8_of_float32() -> None:
    layer = torch.nn.Linear(256, 128, bias=False)
    layer.__class__ = FP8Linear
    found = list(products.linear_errors(layer, 96, "fp8", "cpu"))
    assert len(found) == 3 and [one.fault for one in found] == [None] * 3


def test_rows_have_power_of_two_scales_that_use_the_whole_range() -> None:
    rows = torch.tensor([[448.0, 1.0], [449.0, 1.0], [-3e-5, 0.0], [0.0, 0.0]])
    values, scales, group_scales = fp8.quantize(rows[None])
    mantissas, _ = torch.frexp(scales)
    assert (mantissas == 0.5).all() and scales[0, 0] == 1 and scales[0, 1] == 2
    # The largest value of a row lies in the upper half of FP8's range: 224 to 448.
    assert (values[0, :3].float().abs().amax(1) >= 224).all() and not values[0, 3].any()
    # The row of zeros does not raise the scale of its group.
    assert group_scales.item() == 2 and scales[0, 3] < 1e-20


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    rows = torch.ones(1, 16, 32)
    rows[0, 3, 5] = bad
    quantized = fp8.quantize(rows)
    one = fp8.Quantized(quantized.values[0], quantized.scales[0], quantized.group_scales)
    weights = fp8.quantize(torch.ones(1, 16, 32))
    ends = torch.tensor([16], dtype=torch.int32)
    out = fp8.products(one, weights.values, weights.scales, ends)
    assert not out[3].isfinite().any() and out[:3].isfinite().all() and out[4:].isfinite().all()


def test_an_expert_without_tokens_gets_zero_gradients() -> None:
    tokens = torch.randn(24, 32, requires_grad=True)
    chosen = torch.tensor([0, 2]).repeat(12)[:, None]
    plan = plan_on_device(chosen, 3, 16)
    weights = [
        torch.randn(3, *shape, requires_grad=True) for shape in ((16, 32), (32, 16), (16, 32))
    ]
    gate, down, up = weights
    quantized = fp8.quantize_weights(gate.detach(), up.detach(), down.detach())
    scores = row_scores(torch.ones(24, 1), plan)
    fp8.experts(tokens, scores, None, (gate, down, up), quantized, plan).sum().backward()
    for weight in weights:
        assert weight.grad is not None
        assert not weight.grad[1].any() and weight.grad[0].any() and weight.grad[2].any()


def test_weights_are_quantized_once_until_they_change() -> None:
    weights = [torch.randn(2, *shape) for shape in ((16, 32), (32, 16), (16, 32))]
    layer = torch.nn.Module()
    first = expert_weights(layer, weights)
    assert expert_weights(layer, weights) is first
    weights[1].mul_(2)
    again = expert_weights(layer, weights)
    assert again is not first and torch.equal(again.down.scales, 2 * first.down.scales)


def test_a_linear_layers_weight_is_quantized_once_a_step_also_where_it_is_compiled() -> None:
    options: Any = SimpleNamespace(
        model=SimpleNamespace(converters=["quantize.linear.float8"]),
        quantize=SimpleNamespace(linear=SimpleNamespace(float8=SimpleNamespace(filter_fqns=[]))),
    )
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
    converter, layer = FP8LinearConverter(options, None), model[0]
    converter.convert(model)
    layer.compile(backend="aot_eager")
    x, kept = torch.randn(16, 32), []
    unkept: Any = SimpleNamespace(quantized=())
    for _ in range(3):
        for _ in range(2):
            expected = FP8Linear._multiply(unkept, x, layer.weight)
            assert torch.equal(model(x), expected)
            kept.append(layer.quantized)
        assert kept[-1] is kept[-2]
        with torch.no_grad():
            layer.weight.mul_(3)
        converter.post_optimizer_hook(model)
        assert layer.quantized is not kept[-1]


def test_experts_that_would_train_in_bf16_are_refused(caplog: Any) -> None:
    options = SimpleNamespace(
        model=SimpleNamespace(converters=["quantize.grouped_mm.float8"]),
        parallelism=SimpleNamespace(expert_parallel_comm_backend="standard"),
        cookbook=SimpleNamespace(row_kernels=False),
        quantize=SimpleNamespace(grouped_mm=SimpleNamespace(float8=SimpleNamespace(fqns=["x"]))),
    )
    assert "--cookbook.row_kernels" in refusal(lambda: FP8GroupedMMConverter(options, None), caplog)


def test_weights_that_fsdp_gathers_are_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP writes the next step's weights into the same memory, and the version stays."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    weights = [torch.randn(2, *shape) for shape in ((16, 32), (32, 16), (16, 32))]
    layer = torch.nn.Module()
    first = expert_weights(layer, weights)
    with torch.autograd._unsafe_preserve_version_counter(weights[1]):
        weights[1].mul_(2)
    assert torch.equal(expert_weights(layer, weights).down.scales, 2 * first.down.scales)


def kernels_against_operations() -> None:
    """Compare the kernels, run by Triton's interpreter, with PyTorch's operations."""
    from cookbook.titan.common import fp8_kernels as kernels

    torch.manual_seed(0)
    rows, columns, count = 40, 80, 3

    def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
        # The interpreter rounds ties and subnormal values otherwise than a GPU, by one step of FP8,
        # and does not carry from a mantissa that rounds up to 2: then the value is halved.
        wrong, size = (found.float() - wanted.float()).abs(), wanted.float().abs()
        assert (wrong <= torch.maximum(size / 2, torch.tensor(2.0**-9))).all()
        assert (wrong > torch.maximum(size / 8, torch.tensor(2.0**-9))).float().mean() < 0.06

    x = torch.randn(count, rows, columns) * torch.randn(count, rows, 1).exp()
    x[0, 3] = 0
    wanted = fp8.quantize(x[:, :16], x[:, 16:])
    values, scales = torch.empty_like(wanted.values), torch.empty_like(wanted.scales)
    group_scales = torch.zeros(count)
    kernels.quantize(x[:, :16].contiguous(), values, scales, group_scales)
    kernels.quantize(x[:, 16:].contiguous(), values, scales, group_scales, 16)
    close(values, wanted.values)
    assert torch.equal(scales, wanted.scales) and torch.equal(group_scales, wanted.group_scales)
    close(kernels.transpose(*wanted), fp8.transpose(wanted))

    groups = torch.tensor([0] * 16 + [1] * 8 + [2] * 10 + [3] * 6, dtype=torch.int32)
    used = groups < count
    gate_up, score = torch.randn(rows, 2 * columns).bfloat16(), torch.rand(rows, 1)
    grad = torch.randn(rows, columns).bfloat16()
    maxima = torch.zeros(2, count)
    one = fp8.activate(gate_up, score, groups, count)
    by, by_score = fp8.gradient(grad, gate_up, score, groups, count)
    made = kernels.activate(gate_up, score, groups, maxima[0])
    *found, found_score = kernels.gradient(grad, gate_up, score, groups, maxima[1])
    for (values, scales), right, most in ((made, one, maxima[0]), (found, by, maxima[1])):
        close(values[used], right.values[used])
        assert torch.equal(scales[used], right.scales[used])
        assert torch.equal(most, right.group_scales)
    assert torch.allclose(found_score, by_score, atol=1e-5)
    close(kernels.transpose(by[0][None], by[1][None], by[2], groups), fp8.transpose(by, groups))
    few = fp8.quantize(torch.randn(1, 11, columns))
    copies = torch.randint(-1, 22, (rows,), dtype=torch.int32)
    close(kernels.transpose(*few, None, copies, 2), fp8.transpose(few, None, copies, 2))


def adamw_against_pytorch() -> None:
    """Compare six clipped steps with PyTorch's own clipping and AdamW, and a resume's state."""
    torch.manual_seed(0)
    random, dtypes = Random(0), (torch.float32, torch.bfloat16)
    given = [torch.randn(33, 77), torch.randn(5)]
    both = [[one.clone().requires_grad_() for one in given] for _ in range(2)]
    options: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    theirs, ours = (torch.optim.AdamW(weights, fused=True, **options) for weights in both)
    ours.__class__ = adamw.ClippingAdamW
    keep_dtypes(both[1])
    for step in range(6):
        for left, right in zip(*both, strict=True):
            right.grad = (torch.randn_like(left) * 3).to(random.choice(dtypes))
            left.grad = right.grad.to(torch.float32, copy=True)
        norm = torch.nn.utils.clip_grad_norm_(both[0], 1.0)
        ours.factor = (1 / (norm + 1e-6)).clamp(max=1)
        theirs.step()
        ours.step()
        for left, right in zip(*both, strict=True):
            assert torch.allclose(left, right, rtol=0, atol=2e-6)
        if step == 2:
            ours.load_state_dict(deepcopy(theirs.state_dict()))
    assert ours.state[both[1][0]]["step"] == 6


@pytest.mark.parametrize("check", ["kernels_against_operations", "adamw_against_pytorch"])
def test_triton_kernels_do_what_the_operations_do(check: str) -> None:
    code = f"from tests.test_titan_fp8 import *; {check}()"
    done = python("-c", code, variables={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_for_hopper_and_blackwell(capability: int) -> None:
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, compile  # type: ignore[import-untyped]

    from cookbook.titan.common import adamw_kernel, fp8_kernels

    kinds = dict.fromkeys(("rows", "gate_up", "grad"), "*bf16")
    kinds |= dict.fromkeys(("values", "transposed"), "*fp8e4nv")
    kinds |= dict.fromkeys(("groups", "copies"), "*i32")
    floats = ("scales", "group_scales", "scores", "grad_scores", "corrections", "factor")
    kinds |= dict.fromkeys((*floats, "weights", "grads", "means", "squares"), "*fp32")
    whole = ("columns", "part", "stride", "first", "num_groups", "hidden", "num_rows", "size")
    kinds |= dict.fromkeys(whole, "i32") | {"lr": "fp32"}
    constants: dict[str, Any] = {"block": 2048, "top_k": 8, "tile_rows": 128, "tile_columns": 128}
    constants |= {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}
    kernels = [
        kernel
        for module in (fp8_kernels, adamw_kernel)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]
    assert len(kernels) == 5
    for kernel in kernels:
        signature = {one: kinds.get(one, "constexpr") for one in kernel.arg_names}
        used = {one: constants[one] for one in kernel.arg_names if signature[one] == "constexpr"}
        source = ASTSource(kernel, signature, used)
        assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


FP8 = (
    "--model.converters=quantize.linear.float8,quantize.grouped_mm.float8",
    "--quantize.linear.float8.filter_fqns=output,router.gate",
    "--quantize.grouped_mm.float8.fqns=experts",
    "--cookbook.row_kernels",
    "--cookbook.precision=float8",
    "--cookbook.grouped_gemms=fp8",
    "--cookbook.linear_layers=fp8",
    "--cookbook.emulated",
)


@pytest.mark.parametrize("layout", [EP2, TP2, PP2], ids=["ep2", "tp2", "pp2"])
def test_two_ranks_train_in_fp8_as_in_bf16(
    layout: tuple[str, ...], assets: Path, tmp_path: Path
) -> None:
    """Under TP each shard of a linear layer is quantized; losses differ by FP8's rounding."""
    rank = int(layout == PP2)  # whose losses are those of the last stage
    plain = run(assets, tmp_path / "plain", 2, *layout, "--cookbook.row_kernels", of_rank=rank)
    found = run(assets, tmp_path / "fp8", 2, *layout, *FP8, of_rank=rank)
    assert active(found)["grouped_gemms"] == active(found)["linear_layers"] == "fp8"
    for left, right in zip(plain["losses"], found["losses"], strict=True):
        assert left != right and abs(left - right) < 0.01 * left


def test_compiled_layers_quantize_a_shared_input_once_and_transpose_in_the_backward() -> None:
    from functorch.compile import (  # type: ignore[import-untyped]
        make_boxed_func,
        min_cut_rematerialization_partition,
    )
    from torch._dynamo.backends.common import aot_autograd

    calls: list[list[str]] = []

    def count(graph: Any, _: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if "cookbook" in str(node.target)]
        calls.append([name.split(".")[1].removeprefix("fp8_") for name in names])
        return make_boxed_func(graph.forward)

    layers = torch.nn.ModuleList(torch.nn.Linear(64, 32, bias=False) for _ in range(2))
    for layer in layers:
        layer.__class__ = FP8Linear
    first, second = layers
    whole: Any = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    rows = torch.randn(16, 64, requires_grad=True)
    torch.compile(lambda x: first(x).tanh() * second(x), backend=whole)(rows).sum().backward()
    forward, backward = (sorted(one) for one in calls)
    assert forward == ["quantize"] * 3
    gradients = ["input_gradient"] * 2 + ["quantize"] * 2 + ["weight_gradient"] * 2
    assert backward == gradients
