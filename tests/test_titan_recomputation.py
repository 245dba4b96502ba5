"""Selective recomputation by operator: what is saved, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.titan_run import DEEPEP, EP2, EP4, PP2, TP2, active, run, train

pytestmark = pytest.mark.titan

FULL = ("--activation_checkpoint.mode=full",)
SELECTIVE = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
SAVE = (*SELECTIVE, "--activation_checkpoint.op_sac_save_list=attention,communication,grouped_mm")


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


trained = partial(run, of_rank=-1, by=count_and_train)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(
            *(4, (*EP4, *TP2, *DEEPEP, "--deepep.num_chunks=2")),
            id="deepep, tp 2, chunks",
            marks=pytest.mark.nightly,
        ),
        pytest.param(2, (*EP2, *DEEPEP, "--deepep.score_activations"), id="deepep, scored"),
        pytest.param(4, (*EP2, *PP2), id="standard, pp 2", marks=pytest.mark.nightly),
    ],
)
def test_losses_are_bit_equal_to_full_recomputation(
    assets: Path, tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    full = trained(assets, tmp_path / "a", ranks, *options, *FULL)
    selective = trained(assets, tmp_path / "b", ranks, *options, *SAVE)
    assert selective["losses"] == full["losses"]
    assert selective["grad_norms"] == full["grad_norms"]
    assert (active(full)["recomputation"], active(full)["saved"]) == ("full", None)
    found = active(selective)
    assert (found["recomputation"], found["saved"]) == (
        "selective",
        "communication and grouped_mm",
    )
    if "--parallelism.expert_parallel_comm_backend=deepep" in options:
        # What forward sent is not sent again.
        nothing_again = trained(assets, tmp_path / "c", ranks, *options)
        assert nothing_again["losses"] == full["losses"]
        sent = [run["calls"]["exchanges"] for run in (nothing_again, selective, full)]
        assert 0 < sent[0] == sent[1] < sent[2]


@pytest.mark.parametrize(
    ("ranks", "layout", "mode"),
    [
        pytest.param(2, (*EP2, *DEEPEP, "--deepep.score_activations"), SAVE, id="deepep, saved"),
        # Each stage keeps its last layer: with two of them nothing is left of four layers but two.
        pytest.param(4, (*EP2, *PP2), FULL, id="standard, pp 2", marks=pytest.mark.nightly),
    ],
)
def test_kept_layers_compute_nothing_again_and_losses_stay(
    assets: Path, tmp_path: Path, ranks: int, layout: tuple[str, ...], mode: tuple[str, ...]
) -> None:
    keep = "--activation_checkpoint.num_layers_kept=1"
    runs = [
        trained(assets, tmp_path / str(index), ranks, *layout, *more)
        for index, more in enumerate((mode, (*mode, keep)))
    ]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert runs[0]["grad_norms"] == runs[1]["grad_norms"]
    first, second = (active(run)["recomputation"] for run in runs)
    assert second == " and ".join(sorted(("none", first)))


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
    apply_ac([], kept, model, config, op_sac_save_list=set())
    layers = [model.layers[str(index)] for index in range(3)]
    assert [isinstance(one, CheckpointWrapper) for one in layers] == [
        index < left for index in range(3)
    ]
    # What is kept is the layer itself.
    assert all(model.layers[str(index)] is plain[str(index)] for index in range(left, 3))


def test_without_a_list_deepep_sends_nothing_again(assets: Path, tmp_path: Path) -> None:
    """TorchTitan lists its own operators, which the corrected layer does not call."""
    options = (*EP2, *DEEPEP)
    runs = [
        trained(assets, tmp_path / str(index), 2, *options, *mode)
        for index, mode in enumerate(((), SELECTIVE))
    ]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert active(runs[1])["saved"] == "communication and mm"
    sent = [run["calls"]["exchanges"] for run in runs]
    assert 0 < sent[0] == sent[1]


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
GROUPED, MM = "aten._grouped_mm.default", "aten.mm.default"


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
    apply_ac(save, 0, model, config, op_sac_save_list=released)
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


@pytest.mark.nightly
def test_a_compiled_regions_grouped_gemms_are_saved_and_gradients_stay() -> None:
    def compiled(layer: nn.Module) -> nn.Module:
        layer.compile(fullgraph=True)
        return layer

    calls, gradients, saved = recompute(["attention", "grouped_mm"], compiled)
    again, expected, _ = recompute(["communication"], compiled)
    assert "grouped_mm" in saved
    assert again[GROUPED] - calls[GROUPED] == 1
    # It was compiled: Inductor gives a GEMM a buffer to write to, which no list of operators sees.
    assert again[MM] == 0 < again["aten.mm.out"]
    # Inductor must not have written over what was saved.
    assert all(map(torch.equal, gradients, expected))


def test_what_a_layer_without_experts_saves_says_nothing_of_the_others() -> None:
    def compiled(layer: nn.Module) -> nn.Module:
        return torch.compile(layer, fullgraph=True, backend="aot_eager")

    # As TorchTitan compiles such a layer: with its recomputation, as one graph.
    calls, gradients, saved = recompute(["attention", "grouped_mm"], around=compiled)
    assert (calls[ATTENTION], calls[GROUPED], saved) == (1, 3, set())
    assert all(map(torch.equal, gradients, recompute(["attention"])[1]))


def test_the_names_are_those_of_the_driver() -> None:
    from cookbook.config.cell import SAVED_OPERATORS
    from cookbook.titan.tt_0_2_2.recomputation import OPERATORS, kinds_of_operators

    assert set(OPERATORS) == set(SAVED_OPERATORS) == set(kinds_of_operators().values())


def test_every_operator_of_torchtitans_list_is_known() -> None:
    """But for what it keeps for FP8, and what needs a switch of Inductor that it does not set."""
    import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_parallelize

    from cookbook.titan.tt_0_2_2.recomputation import kinds_of_operators

    unknown = deepseek_parallelize._op_sac_save_list - set(kinds_of_operators())
    assert {str(operator) for operator in unknown} == {
        "aten.max.default",
        "inductor_compiled_code",
    }


def test_recomputation_within_a_budget_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2.recomputation import observe_recomputation

    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Linear(2, 2)})})
    assert observe_recomputation([model]) == {"none"}
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 0.5)
    assert observe_recomputation([model]) == {"memory_budget 0.5"}
