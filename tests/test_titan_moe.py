"""One MoE layer over TP and EP ranks, forward and gradients, against plain PyTorch in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

# Three experts on each of four ranks: of two, the first group ends where its size says.
DIM, HIDDEN, EXPERTS, TOP_K = 32, 16, 12, 3
BATCH, LENGTH = 2, 12
RANKS, TP = 4, 2


def build_layer(
    route_norm: bool, experts: int = EXPERTS, top_k: int = TOP_K, unused: tuple[int, ...] = (1, 6)
) -> Any:
    """TorchTitan's standard layer, which its Qwen3 builds whatever the backend."""
    from torchtitan.models.moe.moe import MoE, MoEArgs

    torch.manual_seed(0)
    args = MoEArgs(
        num_experts=experts,
        num_shared_experts=1,
        top_k=top_k,
        score_before_experts=False,
        route_norm=route_norm,
        use_grouped_mm=False,  # the grouped GEMM computes in bfloat16
    )
    layer = MoE(args, DIM, HIDDEN).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    # Two experts that nobody chooses stay empty; their weights must get zero gradients.
    layer.expert_bias = torch.zeros(experts, dtype=torch.float64)
    layer.expert_bias[list(unused)] = -1e3
    layer.tokens_per_expert = torch.zeros(experts, dtype=torch.float64)
    return layer


def parallelize(layer: Any, dims: Any, backend: str, **options: Any) -> None:
    """Apply TorchTitan's plan and the cookbook's to one layer; `options` has DeepEP's too."""
    from cookbook.titan.tt_0_2_2.job_config import Cookbook, DeepEP, Parallelism
    from cookbook.titan.tt_0_2_2.parallelize import apply_moe_ep_tp

    block = nn.Module()
    block.moe, block.moe_enabled = layer, True
    model: Any = SimpleNamespace(layers={"0": block})
    meshes = {f"{name}_mesh": dims.get_optional_mesh(name) for name in ("tp", "ep", "etp")}
    meshes["ep_etp_mesh"] = dims.get_optional_mesh(["ep", "etp"])
    meshes["dual_pipe_v"] = options.pop("dual_pipe_v", False)
    job: Any = SimpleNamespace(parallelism=Parallelism())
    job.parallelism.expert_parallel_comm_backend = backend
    job.cookbook = Cookbook(row_kernels=options.pop("row_kernels", False))
    job.deepep = DeepEP(**options)
    apply_moe_ep_tp(job, model, **meshes)


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and upstream gradients of the data-parallel ranks, (dp, batch, length, dim)."""
    generator = torch.Generator().manual_seed(1)
    shape = (RANKS // TP, BATCH, LENGTH, DIM)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


def reference(route_norm: bool) -> dict[str, torch.Tensor]:
    """Every expert on every token with plain operations; no TorchTitan forward takes part."""
    layer = build_layer(route_norm)
    inputs, upstream = batches()
    x = inputs.reshape(-1, DIM).requires_grad_()
    probabilities = torch.sigmoid((x @ layer.router.gate.weight.T).float()).double()
    chosen = torch.topk(probabilities + layer.expert_bias, TOP_K).indices
    scores = probabilities.gather(1, chosen)
    if route_norm:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    gate = torch.zeros_like(probabilities).scatter(1, chosen, scores)

    def feed_forward(tokens: Any, w1: Any, w2: Any, w3: Any) -> Any:
        return (nn.functional.silu(tokens @ w1.T) * (tokens @ w3.T)) @ w2.T

    shared, experts = layer.shared_experts, layer.experts
    out = feed_forward(x, shared.w1.weight, shared.w2.weight, shared.w3.weight)
    for expert in range(EXPERTS):
        weights = experts.w1[expert], experts.w2[expert], experts.w3[expert]
        out = out + feed_forward(x, *weights) * gate[:, expert : expert + 1]
    out.backward(upstream.reshape(-1, DIM))
    assert x.grad is not None
    counts = torch.bincount(chosen.reshape(-1), minlength=EXPERTS)
    shape = inputs.shape
    found = {"out": out.detach().view(shape), "x": x.grad.view(shape), "counts": counts}
    for name, parameter in layer.named_parameters():
        found[name] = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return found


def run_layer(
    moe_impl: str,
    tp: int,
    route_norm: bool,
    *,
    compiled: bool = False,
    ep: int = RANKS,
    etp: int = 1,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """What `reference` returns, from this rank's part of the layer and whole again."""
    from torch.distributed.tensor import DTensor, Replicate
    from torchtitan.distributed import ParallelDims

    dims = ParallelDims(
        dp_replicate=1, dp_shard=RANKS // tp, cp=1, tp=tp, pp=1, ep=ep, etp=etp, world_size=RANKS
    )
    dims.build_mesh()
    layer = build_layer(route_norm)
    parallelize(layer, dims, moe_impl, **options)
    if compiled:
        # As TorchTitan's apply_compile: every child but the experts, as one graph each.
        for name in ("router", "reorderer", "shared_experts"):
            if (child := getattr(layer, name)) is not None:
                setattr(layer, name, torch.compile(child, backend="aot_eager", fullgraph=True))
    inputs, upstream = (values.view(RANKS // tp, -1, LENGTH, DIM) for values in batches())
    dp_rank, tp_rank = divmod(dist.get_rank(), tp)
    part = LENGTH // tp
    mine = slice(tp_rank * part, (tp_rank + 1) * part)
    x = inputs[dp_rank, :, mine].clone().requires_grad_()
    out = layer(x)
    out = out.to_local() if isinstance(out, DTensor) else out
    out.backward(upstream[dp_rank, :, mine])

    def gathered(local: torch.Tensor) -> torch.Tensor:
        everywhere = [torch.empty_like(local) for _ in range(RANKS)]
        dist.all_gather(everywhere, local.contiguous())
        ranks = [torch.cat(everywhere[r : r + tp], dim=1) for r in range(0, RANKS, tp)]
        return torch.stack(ranks).view(RANKS // TP, BATCH, LENGTH, DIM)

    assert x.grad is not None
    counts = layer.tokens_per_expert.clone()
    # TorchTitan sums the counts over data-parallel ranks alone.
    dist.all_reduce(counts)
    found = {"out": gathered(out.detach()), "x": gathered(x.grad), "counts": counts / tp}
    for name, parameter in layer.named_parameters():
        name, grad = name.replace("_orig_mod.", ""), parameter.grad
        assert grad is not None, name
        if isinstance(grad, DTensor):
            whole = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim).to_local()
        else:
            whole = grad
        if not name.startswith("experts.") or ep == 1:
            # Data-parallel ranks are summed by FSDP later; TP ranks should agree by now.
            dist.all_reduce(whole)
            whole = whole / tp
        found[name] = whole
    return found


Layer = tuple[str, int, dict[str, Any]]
LAYERS: list[Layer] = [
    *((moe_impl, tp, {}) for moe_impl in ("standard", "deepep") for tp in (1, TP)),
    *((moe_impl, TP, {"compiled": True}) for moe_impl in ("standard", "deepep")),
    # Parts of 24 or 12 tokens: 5 are not of one length, one of 13 is empty.
    ("deepep", 1, {"num_chunks": 5}),
    ("deepep", TP, {"num_chunks": 13}),
    # With several parts each has scores of its own.
    ("deepep", 1, {"score_activations": True}),
    ("deepep", TP, {"num_chunks": 3, "score_activations": True}),
    # Without EP, and with ETP, TP cuts every expert: a rank has one term of its output.
    ("standard", TP, {"ep": 1}),
    ("standard", TP, {"ep": 2, "etp": TP}),
    ("standard", 1, {"row_kernels": True}),
    ("standard", TP, {"row_kernels": True, "compiled": True}),
    ("standard", TP, {"row_kernels": True, "ep": 1}),
    ("standard", TP, {"row_kernels": True, "ep": 2, "etp": TP}),
    ("standard", TP, {"dual_pipe_v": True}),
]


def run_layers(layers: list[Layer]) -> list[dict[str, torch.Tensor]]:
    """Run layers one after another; scores are normalized in those without TP."""
    return [run_layer(moe_impl, tp, tp == 1, **options) for moe_impl, tp, options in layers]


@pytest.fixture(scope="module")
def found_everywhere() -> list[list[dict[str, torch.Tensor]]]:
    return run_ranks(run_layers, RANKS, LAYERS)


@pytest.mark.parametrize("number", range(len(LAYERS)), ids=map(str, LAYERS))
def test_a_layer_matches_plain_pytorch(
    number: int, found_everywhere: list[list[dict[str, torch.Tensor]]]
) -> None:
    expected = reference(LAYERS[number][1] == 1)
    for rank in found_everywhere:
        for name, exact in expected.items():
            # The router computes its scores in float32, and DeepEP carries them so.
            assert (rank[number][name] - exact).abs().max() < 2e-6 * exact.abs().max(), name


def test_scores_before_the_experts_are_refused() -> None:
    """On one rank too, where TorchTitan calls no `apply_moe_ep_tp`."""
    from cookbook.titan.tt_0_2_2.parallelize import parallelize

    model: Any = nn.Module()
    model.layers = nn.ModuleDict({"0": nn.Module()})
    model.layers["0"].moe_enabled = True
    model.layers["0"].moe = SimpleNamespace(score_before_experts=True)
    job: Any = SimpleNamespace(model=SimpleNamespace(name="deepseek_v3"))
    with pytest.raises(ValueError, match="score_before_experts is on"):
        parallelize(model, None, job)
