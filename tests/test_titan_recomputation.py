"""Recomputation: what is saved, also of scored experts, and that nothing else changes."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.titan_ranks import run_ranks
from tests.titan_run import (
    DEEPEP,
    EP2,
    EP4,
    FULL,
    NUM_HEADS,
    NUM_LAYERS,
    PP2,
    SAVE,
    SELECTIVE,
    TP2,
    active,
    job,
    run,
    train,
)

pytestmark = pytest.mark.titan


def count_and_train(argv: list[str], attempt: None) -> dict[str, Any]:
    """Train, and count how often rows were exchanged and grouped GEMMs ran."""
    calls: Counter[str] = Counter()
    exchange = dist.all_to_all_single

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        calls["exchanges"] += 1
        return exchange(*args, **kwargs)

    # DeepEP's stand-in sends by it.
    dist.all_to_all_single = all_to_all_single
    return train(argv) | {"calls": dict(calls)}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, (*EP2, *DEEPEP, "--deepep.score_activations")),
        pytest.param(4, (*EP4, *TP2, *DEEPEP, "--deepep.num_chunks=2"), marks=pytest.mark.nightly),
        pytest.param(4, (*EP2, *PP2), marks=pytest.mark.nightly),
    ],
    ids=["deepep, scored", "deepep, tp 2, chunks", "standard, pp 2"],
)
def test_losses_are_bit_equal_to_full_recomputation_and_nothing_is_sent_again(
    assets: Path, tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    keep = "--activation_checkpoint.num_layers_kept=1"
    # The saved operators. TorchTitan's list for DeepEP names operators that the corrected layer
    # does not call.
    modes: dict[str, tuple[tuple[str, ...], str | None, str]] = {
        "a": (FULL, None, "full"),
        "b": (SELECTIVE, "communication and mm", "selective"),
        # On each stage of a pipeline.
        "c": ((*SAVE, keep), "communication and grouped_mm", "none and selective"),
    }
    runs = []
    for name, (mode, saved, recomputed) in modes.items():
        found = run(assets, tmp_path / name, ranks, *options, *mode, of_rank=-1, by=count_and_train)
        assert (active(found)["saved"], active(found)["recomputation"]) == (saved, recomputed)
        runs.append(found)
    assert all(one["losses"] == runs[0]["losses"] for one in runs)
    assert all(one["grad_norms"] == runs[0]["grad_norms"] for one in runs)
    if options[-1] != PP2[0]:
        full, *others = (one["calls"]["exchanges"] for one in runs)
        assert len(set(others)) == 1 and 0 < others[0] < full


@pytest.mark.parametrize(("kept", "left"), [(0, 3), (1, 2), (5, 0)])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_last_layers_are_kept(mode: str, kept: int, left: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torchtitan.config.job_config import ActivationCheckpoint

    from cookbook.titan.tt_0_2_2.recomputation import apply_ac

    model = nn.Module()
    plain = {str(index): Layer() for index in range(3)}
    model.layers = nn.ModuleDict(plain)
    config = ActivationCheckpoint(mode=mode, selective_ac_option="op")
    vars(config).update(op_sac_save_list=[], num_layers_kept=kept)
    apply_ac(model, config, op_sac_save_list=set())
    layers = [model.layers[str(index)] for index in range(3)]
    assert [isinstance(one, CheckpointWrapper) for one in layers] == [
        index < left for index in range(3)
    ]
    # What is kept is the layer itself.
    assert all(model.layers[str(index)] is plain[str(index)] for index in range(left, 3))


class Computed(TorchDispatchMode):
    """How often each operator has run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the modes of checkpointing: without this, torch.compile does not compile below it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """One GEMM, attention and a grouped GEMM, whose outputs something else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.w2(self.w1(x).sin()).sin().view(1, 1, -1, 16)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        rows = out.view(-1, 16).sin()
        offsets = torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
        return torch._grouped_mm(rows, self.experts, offs=offsets).sin()


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
GROUPED = "aten._grouped_mm.default"


def recompute(
    save: list[str],
    change: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    around: Callable[[nn.Module], nn.Module] = lambda layer: layer,
) -> tuple[Counter[str], list[torch.Tensor], set[str]]:
    """Forward and backward of a recomputed layer: what ran, its gradients, what it saved."""
    import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_parallelize
    from torchtitan.config.job_config import ActivationCheckpoint

    from cookbook.titan.tt_0_2_2 import activity
    from cookbook.titan.tt_0_2_2.recomputation import apply_ac

    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": change(Layer())})
    config = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    released = set(deepseek_parallelize._op_sac_save_list)
    vars(config).update(op_sac_save_list=save, num_layers_kept=0)
    apply_ac(model, config, op_sac_save_list=released)
    assert released == deepseek_parallelize._op_sac_save_list
    model.layers["0"] = around(model.layers["0"])
    activity.saved.clear()
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    with Computed() as computed:
        model.layers["0"](x).sum().backward()
    assert x.grad is not None
    grads = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    return computed.calls, grads, set(activity.saved)


@pytest.mark.parametrize(
    ("save", "again"),
    [
        (["communication"], {ATTENTION: 2, GROUPED: 4}),
        (["attention"], {ATTENTION: 1, GROUPED: 4}),
        (["grouped_mm"], {ATTENTION: 2, GROUPED: 3}),
        (["attention", "grouped_mm"], {ATTENTION: 1, GROUPED: 3}),
    ],
)
def test_what_is_named_is_computed_once(save: list[str], again: dict[str, int]) -> None:
    # Backward of the grouped GEMM is two more of them.
    calls, gradients, saved = recompute(save)
    assert {name: calls[name] for name in again} == again
    assert saved == set(save) - {"communication"}
    nothing_saved = recompute(["communication"])[1]
    assert all(map(torch.equal, gradients, nothing_saved))


def test_what_a_layer_without_experts_saves_says_nothing_of_the_others() -> None:
    def compiled(layer: nn.Module) -> nn.Module:
        return torch.compile(layer, fullgraph=True, backend="aot_eager")

    # As TorchTitan compiles such a layer: with its recomputation, as one graph.
    calls, gradients, saved = recompute(["attention", "grouped_mm"], around=compiled)
    assert (calls[ATTENTION], calls[GROUPED], saved) == (1, 3, set())
    assert all(map(torch.equal, gradients, recompute(["attention"])[1]))


def test_the_names_are_those_of_the_driver_and_cover_torchtitans_list() -> None:
    import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_parallelize

    from cookbook.config.facts import SAVED_OPERATORS
    from cookbook.titan.tt_0_2_2.recomputation import OPERATORS, kinds_of_operators

    kinds = kinds_of_operators()
    assert set(OPERATORS) == set(SAVED_OPERATORS) == set(kinds.values())
    unknown = {str(one) for one in deepseek_parallelize._op_sac_save_list - set(kinds)}
    # Kept for FP8, and what needs a switch of Inductor that TorchTitan does not set.
    assert unknown == {"aten.max.default", "inductor_compiled_code"}


def test_recomputation_within_a_budget_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2.recomputation import observe_recomputation

    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Linear(2, 2)})})
    assert observe_recomputation([model]) == {"none"}
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 0.5)
    assert observe_recomputation([model]) == {"memory_budget 0.5"}


LATENTS, VALUES = 128, 96


def train_and_count(argv: list[str]) -> dict[str, Any]:
    """What a rank trains, and by the weights' shape how often the operator multiplied with them.

    And whether one of its products was still there when the next was made.
    """
    from torchtitan.models.deepseek_v3 import deepseekv3_args
    from torchtitan.protocols.train_spec import get_train_spec

    from cookbook.titan.tt_0_2_2 import recomputation

    # Latents shorter than the hidden size, and no two weights of one shape.
    for flavors in (deepseekv3_args, get_train_spec("deepseek_v3").model_args):
        flavors["debugmodel"].kv_lora_rank = LATENTS
        flavors["debugmodel"].v_head_dim = VALUES
    calls: Counter[tuple[int, ...]] = Counter()
    kept: set[tuple[int, ...]] = set()
    made: dict[tuple[int, ...], Any] = {}

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def mm(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            shape = tuple(weights.shape)
            calls[shape] += 1
            if shape in made and made[shape]() is not None:
                kept.add(shape)
            product = torch.mm(rows, weights)
            made[shape] = weakref.ref(product.untyped_storage())
            return product

    vars(recomputation)["torch"] = Counting()
    return train(argv) | {"calls": dict(calls), "kept": kept}


@pytest.mark.nightly
def test_a_job_computes_each_dense_gemm_once_and_trains_the_same(
    assets: Path, tmp_path: Path
) -> None:
    options = (*EP2, *DEEPEP, "--deepep.score_activations")
    save = "--activation_checkpoint.op_sac_save_list=attention,communication,grouped_mm,mm"
    compiled = ("--compile.enable", "--compile.components=model")
    eager, run = (
        run_ranks(train_and_count, 2, job(assets, tmp_path / name, *words))[0]
        for name, words in {"a": options, "b": (*options, *SELECTIVE, save, *compiled)}.items()
    )
    assert run["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert run["grad_norms"] == pytest.approx(eager["grad_norms"], rel=1e-3)
    assert active(run)["saved"] == "communication and grouped_mm and mm"
    assert not eager["calls"]
    steps, routed = len(run["losses"]), NUM_LAYERS - 1
    hidden, shared, values = 256, 512, NUM_HEADS * VALUES
    # The shared experts' gate and up are saved. What comes down is not, nor is it computed again.
    assert run["calls"][hidden, shared] == 2 * steps * routed
    assert run["calls"][shared, hidden] == steps * routed
    # So is attention's output, which the dense layer has too.
    assert run["calls"][values, hidden] == steps * NUM_LAYERS
    assert {(hidden, shared), (values, hidden)} <= run["kept"]
    assert (shared, hidden) not in run["kept"]
    # Keys and values come from the latents, which are short.
    assert not [shape for shape in run["calls"] if shape[0] == LATENTS]


NIGHTLY_INDUCTOR = pytest.param("inductor", marks=pytest.mark.nightly)
DIM, HIDDEN, SIZES = 32, 16, [8, 24, 16]
ROWS = sum(SIZES)


def save_grouped_gemms() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    from cookbook.titan.tt_0_2_2.recomputation import SaveList

    listed = SaveList([torch.ops.aten._grouped_mm.default])
    policy: Any = torch.utils.checkpoint.CheckpointPolicy

    def choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return policy.MUST_SAVE if operator in listed else policy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(choose)
    return forward, again


RECOMPUTED: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=save_grouped_gemms),
}


def layer() -> Any:
    from torchtitan.models.moe.moe import GroupedExperts

    torch.manual_seed(0)
    experts = GroupedExperts(DIM, HIDDEN, len(SIZES), use_grouped_mm=True)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    return experts


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, DIM, generator=generator)
    scores = torch.rand(ROWS, 1, generator=generator)
    return rows.requires_grad_(), scores.requires_grad_(), torch.tensor(SIZES, dtype=torch.int32)


class Products(Computed):
    """Which grouped GEMMs' results still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if str(func) == GROUPED:
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out


def scored(mode: str, backend: str | None) -> tuple[list[torch.Tensor], int, list[bool]]:
    """Outputs and gradients, how many products ran, and which still existed after the forward."""
    from cookbook.titan.tt_0_2_2.row_kernels import ProbsOnActivations

    compute = ProbsOnActivations()
    if backend:
        compute.compile(backend)
    experts, (rows, scores, sizes) = layer(), inputs()
    ends = sizes.cumsum(0, dtype=torch.int32)
    upstream = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(2))
    around = RECOMPUTED[mode] or (lambda function: function())
    shared = torch.ones(ROWS, DIM, requires_grad=True)

    def block() -> torch.Tensor:
        # What follows saves something, so that nothing before it is left out for being the last.
        return compute(experts, rows, scores, ends) + shared.sin()

    with Products() as products:
        out = around(block)
        gc.collect()
        alive = [not one.expired() for one in products.made]
        out.backward(upstream)
    grads = [one.grad for one in (rows, scores, *experts.parameters())]
    found = [out.detach(), *(grad for grad in grads if grad is not None)]
    return found, products.calls[GROUPED], alive


# Three products forward and six backward; the first two again where they are not saved.
@pytest.mark.parametrize("backend", [None, NIGHTLY_INDUCTOR])
@pytest.mark.parametrize(
    ("mode", "again", "kept"), [("none", 0, 2), ("full", 2, 0), ("selective", 0, 2)]
)
def test_the_last_product_is_neither_saved_nor_repeated(
    mode: str, again: int, kept: int, backend: str | None
) -> None:
    found, products, alive = scored(mode, backend)
    assert products == 3 + again + 6
    assert alive == [True] * kept + [False] * (3 - kept)
    assert all(map(torch.equal, found, scored("none", backend)[0]))
