"""Selective recomputation with a recipe's own list of operators to save.

TorchTitan's `selective_ac_option=op` saves the results of a fixed list of operators, which lacks
grouped GEMMs. In compiled layers, results of kernels that Inductor generates, such as
FlexAttention, cannot be saved. Results of dense GEMMs cannot be saved either, because Inductor
calls the variant that writes to a given buffer. `show_gemms` works around this with an operator
that can be saved, `cookbook::mm`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
import torchtitan.distributed.activation_checkpoint as titan
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from cookbook.titan.tt_0_2_2 import activity

# The operators that each name in `op_sac_save_list` stands for.
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
        "deepep.combine",
        "deepep.dispatch",
    ),
    "grouped_mm": ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2"),
    "mm": ("aten.mm", "cookbook.mm"),
}

# Operators that recomputation skips if no gradient needs their results. `aten.mm` is not skipped,
# because TorchTitan counts its calls in order to save every second one.
_SKIPPED = {f"{name}.default" for name in (*OPERATORS["grouped_mm"], "cookbook.mm")}
# True inside `not_saved`: no gradient needs the results of operators that run there.
_is_needless = False


def in_recompute() -> bool:
    """Return whether this forward is a recomputation, which runs within autograd's backward."""
    return torch._C._current_graph_task_id() != -1


def kinds_of_operators() -> dict[Any, str]:
    """Return each installed operator with its kind, such as `attention`."""
    kinds = {torch._higher_order_ops.flex_attention: "attention"}
    for kind, names in OPERATORS.items():
        for namespace, operator in (name.split(".") for name in names):
            if packet := getattr(getattr(torch.ops, namespace), operator, None):
                kinds[packet.default] = kind
    return kinds


@contextmanager
def not_saved() -> Iterator[None]:
    """Save no result of the operators that run in this `with` block: no gradient needs them."""
    global _is_needless
    before, _is_needless = _is_needless, True
    try:
        yield
    finally:
        _is_needless = before


@contextmanager
def last_product() -> Iterator[None]:
    """Do not save or recompute the GEMMs of this `with` block: no gradient needs their results."""
    with not_saved(), _Unmultiplied() if in_recompute() else nullcontext():
        yield


class _Unmultiplied(TorchDispatchMode):
    """A mode that skips GEMMs whose results are not needed: they return uninitialized tensors."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # By default, torch.compile does not work under a TorchDispatchMode. True allows it.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func) not in _SKIPPED:
            return func(*args, **(kwargs or {}))
        rows, weights = args[:2]
        dtype = torch.bfloat16 if rows.dtype.itemsize == 1 else rows.dtype
        return rows.new_empty(len(rows), weights.shape[-1], dtype=dtype)


class SaveList(set[Any]):
    """The operators whose results are saved; `activity.saved` records those that really run."""

    def __init__(self, operators: Iterable[Any]) -> None:
        super().__init__(operators)
        self._kinds = kinds_of_operators()

    def __contains__(self, operator: object) -> bool:
        is_saved = super().__contains__(operator) and not _is_needless
        # Do not record an operator while the compiler traces a layer: it does not run then.
        if is_saved and TracingContext.try_get() is None:
            activity.saved.add(self._kinds.get(operator, str(operator)))
        return is_saved


def apply_ac(model: Any, ac_config: Any, **options: Any) -> None:
    """Wrap the layers of `model`, or of a pipeline stage, for recomputation, as TorchTitan does."""
    save = ac_config.op_sac_save_list
    if "mm" in save and options.get("model_compile_enabled"):
        show_gemms(least_inner=model.model_args.dim)
    # TorchTitan's list names its own attention and DeepEP operators; add the cookbook's, which
    # replace them. Add the all-to-all too, which TorchTitan's list for Qwen3 lacks.
    kinds = kinds_of_operators()
    operators = {operator for operator, kind in kinds.items() if kind == "communication"}
    operators.add(torch.ops.cookbook.varlen_attention.default)
    operators |= options.pop("op_sac_save_list")
    if save:
        # Keep saving TorchTitan's other operators, such as the maximum that FP8 scales need.
        operators -= kinds.keys()
        operators |= {operator for operator, kind in kinds.items() if kind in save}
    titan.apply_ac(model, ac_config, op_sac_save_list=SaveList(operators), **options)
    layers = model.get_submodule("layers")
    last_first = [*layers.named_children()][::-1]
    for name, layer in last_first[: ac_config.num_layers_kept]:
        if isinstance(layer, CheckpointWrapper):
            layers.register_module(name, layer._checkpoint_wrapped_module)


def observe_recomputation(model_parts: Iterable[nn.Module]) -> frozenset[str]:
    """Return how this rank's layers recompute: `none`, `full`, `selective` or `memory_budget N`."""
    if (budget := torch._functorch.config.activation_memory_budget) < 1:
        return frozenset({f"memory_budget {budget:g}"})
    found = set()
    for part in model_parts:
        for layer in part.get_submodule("layers").children():
            wrappers = [one for one in layer.modules() if isinstance(one, CheckpointWrapper)]
            is_selective = wrappers and "context_fn" in wrappers[0].checkpoint_fn.keywords
            found.add("selective" if is_selective else "full" if wrappers else "none")
    return frozenset(found)


@torch.library.custom_op("cookbook::mm", mutates_args=())
def multiply(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply (rows, inner) by (inner, columns), as `aten::mm` does."""
    return torch.mm(rows, weights)


multiply.register_fake(lambda rows, weights: rows.new_empty(rows.shape[0], weights.shape[1]))


def show_gemms(least_inner: int) -> None:
    """Make the compiler replace `aten::mm` by `cookbook::mm`.

    In compiled code, selective recomputation can save the results of `cookbook::mm`, but not those
    of `aten::mm`. GEMMs with an inner dimension below `least_inner` are not replaced, because
    recomputing them is cheap.
    """
    import torch._inductor.config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    operator = torch.ops.cookbook.mm.default
    call = fallback_handler(operator, add_to_fallback_set=False)

    @register_lowering(operator, type_promotion_kind=None)
    def _keep(rows: Any, weights: Any) -> Any:
        # The result may be saved, so Inductor must not reuse its buffer.
        out = call(rows, weights)
        V.graph.never_reuse_buffers.add(out.get_name())
        return out

    class ShowGemms(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            # Skip backward graphs, which have inputs named `tangents`: their results are not saved.
            if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
                return
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
                if node.args[0].meta["val"].shape[1] >= least_inner:
                    node.target = operator

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,)), least_inner

    inductor.post_grad_custom_post_pass = ShowGemms()
