"""Selective recomputation with a list of what to save that a recipe states.

TorchTitan's `selective_ac_option=op` looks every operator up in one list of its own, which lacks
grouped GEMMs. The list sees an operator in a compiled region too, as long as Inductor calls it: the
grouped GEMMs, DeepEP's dispatch and combine, FlashAttention-4, and dense GEMMs where they are named
(`compiled_gemms.py`). It does not see what Inductor writes itself: FlexAttention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
import torchtitan.distributed.activation_checkpoint as titan
from torch._guards import TracingContext
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from cookbook.titan.common.again import in_recompute
from cookbook.titan.tt_0_2_2 import activity

# What an option may name. Operators that are not installed are passed over.
OPERATORS = {
    "attention": (
        "aten._scaled_dot_product_attention_math",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "cookbook.varlen_attention",
    ),
    "communication": (
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.reduce_scatter_tensor",
        "cookbook.deepep_combine",
        "cookbook.deepep_dispatch",
        # Of TorchTitan as released.
        "deepep.combine",
        "deepep.dispatch",
    ),
    "grouped_mm": ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2"),
    # TorchTitan saves every second one of aten; the other stands for those of compiled code.
    "mm": ("aten.mm", "cookbook.mm"),
}

# What a corrected layer calls in place of an operator that TorchTitan's list has.
IN_PLACE_OF = {
    "deepep.combine": "cookbook.deepep_combine",
    "deepep.dispatch": "cookbook.deepep_dispatch",
}

# What computes now is needed by no gradient.
_is_needless = False


def operators_of(names: Iterable[str]) -> Iterator[Any]:
    """The operators of these names that are installed."""
    for name in names:
        namespace, _, operator = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            yield packet.default


def with_own(operators: set[Any]) -> set[Any]:
    """TorchTitan's list, with the cookbook's operators that run in place of some in it."""
    own = [
        name for released, name in IN_PLACE_OF.items() if operators & {*operators_of([released])}
    ]
    return operators | {*operators_of(own)}


def kinds_of_operators() -> dict[Any, str]:
    """What each known operator is for, by operator."""
    found: dict[Any, str] = {torch._higher_order_ops.flex_attention: "attention"}
    for kind, names in OPERATORS.items():
        found |= dict.fromkeys(operators_of(names), kind)
    return found


@contextmanager
def not_saved() -> Iterator[None]:
    """Within it a `SaveList` saves nothing: no gradient needs what is computed."""
    global _is_needless
    before, _is_needless = _is_needless, True
    try:
        yield
    finally:
        _is_needless = before


@contextmanager
def last_product() -> Iterator[None]:
    """Within it computes the GEMM whose result no gradient needs: not saved, not repeated."""
    with not_saved(), _Unmultiplied() if in_recompute() else nullcontext():
        yield


class _Unmultiplied(TorchDispatchMode):
    """GEMMs return memory as it is found; autograd notes their operands all the same.

    But for those of aten: TorchTitan counts them, to save every second one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._products = {*operators_of((*OPERATORS["grouped_mm"], "cookbook.mm"))}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled code runs below this mode as it does below selective recomputation's own.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in self._products:
            return func(*args, **(kwargs or {}))
        rows, weights = args[:2]
        # Quantized operands are multiplied into BF16.
        dtype = torch.bfloat16 if rows.dtype.itemsize == 1 else rows.dtype
        return rows.new_empty(len(rows), weights.shape[-1], dtype=dtype)


class SaveList(set[Any]):
    """Operators to save, which notes for the report of the first step what it was asked for."""

    def __init__(self, operators: Iterable[Any]) -> None:
        super().__init__(operators)
        self._kinds = kinds_of_operators()

    def __contains__(self, operator: object) -> bool:
        is_saved = super().__contains__(operator) and not _is_needless
        # A layer without experts is compiled as a whole: asked while it is traced, of operators
        # that layers with experts may compute again.
        if is_saved and TracingContext.try_get() is None:
            activity.saved.add(self._kinds.get(operator, str(operator)))
        return is_saved


def apply_ac(
    save: list[str], num_layers_kept: int, model: Any, ac_config: Any, **options: Any
) -> None:
    """Wrap the layers of `model`, the whole or one stage, as TorchTitan does.

    Args:
        save: kinds of operators that selective recomputation saves; empty for TorchTitan's own.
        num_layers_kept: of how many layers, the last ones, nothing is recomputed.
        options: TorchTitan's own, `op_sac_save_list` and so on.
    """
    if "mm" in save and options.get("model_compile_enabled"):
        # It takes seconds to import what compiles, and only then is it needed.
        from cookbook.titan.common.compiled_gemms import show_gemms

        show_gemms(least_inner=model.model_args.dim)
    operators = with_own(options.pop("op_sac_save_list"))
    if save:
        kinds = kinds_of_operators()
        # What TorchTitan lists beyond these kinds, as the maximum that scales FP8, stays.
        operators = {operator for operator in operators if operator not in kinds}
        operators |= {operator for operator, kind in kinds.items() if kind in save}
    titan.apply_ac(model, ac_config, op_sac_save_list=SaveList(operators), **options)
    layers = model.get_submodule("layers")
    wrapped = list(layers.named_children())
    for name, layer in wrapped[len(wrapped) - min(num_layers_kept, len(wrapped)) :]:
        if isinstance(layer, CheckpointWrapper):
            layers.register_module(name, layer._checkpoint_wrapped_module)


def observe_recomputation(model_parts: Iterable[nn.Module]) -> frozenset[str]:
    """How the layers of this rank are recomputed: `none`, `full`, `selective`."""
    if (budget := torch._functorch.config.activation_memory_budget) < 1:
        return frozenset({f"memory_budget {budget:g}"})
    layers = [layer for part in model_parts for layer in part.get_submodule("layers").children()]
    return frozenset(_recomputation(layer) for layer in layers)


def _recomputation(layer: nn.Module) -> str:
    for module in layer.modules():
        if isinstance(module, CheckpointWrapper):
            # A functools.partial; what it calls gets no context where everything is recomputed.
            return "selective" if "context_fn" in module.checkpoint_fn.keywords else "full"
    return "none"
