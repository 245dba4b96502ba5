"""The options in force: each rank's observation, merged over ranks and held to the declaration.

The model's own weights and layers say how GEMMs quantize: a scaling type of TorchAO for the routed
experts (`mxfp8`, ...), a kind of linear layers (`mx`, `float8`), or `bf16`. Running code notes the
rest here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor
from torchao.prototype.mx_formats.mx_linear import MXLinear
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.models.moe.moe import GroupedExperts

from cookbook.titan.tt_0_2_2.versions import refuse

# One training step makes both exchanges of the quantized all-to-all.
MXFP8_DISPATCH = "mxfp8 in the dispatch only"
MXFP8_COMBINE = "mxfp8 in the combine only"

# Filled while the code runs: the dispatch that sent tokens, the mover of their rows, the loss, the
# operators that selective recomputation saved, the patches of TorchTitan that took effect.
dispatches: set[str] = set()
rows: set[str] = set()
losses: set[str] = set()
saved: set[str] = set()
patches_applied: set[str] = set()

KINDS = {"precision": "precision", "ep_backend": "EP backend"}


class ModelActivity(NamedTuple):
    """The scaling types of one rank's routed experts, and the kinds of its linear layers."""

    grouped_gemms: frozenset[str]
    linear_layers: frozenset[str]
    emulated: bool  # whether one of them multiplies in high precision


@dataclass(frozen=True)
class RankActivity:
    """One rank's observations in its first step."""

    stage: int  # its place in the pipeline
    found: dict[str, frozenset[str]]  # the words for each aspect, such as `dispatch`
    emulated: bool
    mean_attended_length: float | None  # in tokens; None where the rank saw no mask
    patches_applied: frozenset[str]
    node: str


def words(found: Iterable[str]) -> str | None:
    """Join the words into one text; None for none."""
    return " and ".join(sorted(found)) or None


def observe_model(model_parts: Iterable[nn.Module]) -> ModelActivity:
    """Look at the weights and layers themselves, not at the options that made them."""
    grouped, linear, emulated = set(), set(), False
    for module in (module for part in model_parts for module in part.modules()):
        if isinstance(module, MXLinear):
            linear.add("mx")
            emulated |= module.config.kernel_preference == KernelPreference.EMULATED
        elif isinstance(module, Float8Linear):
            linear.add("float8")
            emulated |= bool(module.config.emulate)
        elif isinstance(module, GroupedExperts):
            for one in module.parameters(recurse=False):
                weight = one._local_tensor if isinstance(one, DTensor) else one.data
                # The for-loop over experts multiplies without torch._grouped_mm: nothing quantizes.
                if isinstance(weight, ScaledGroupedMMTensor) and module.use_grouped_mm:
                    grouped.add(weight.scaling_type.value)
                    emulated |= weight.kernel_preference == KernelPreference.EMULATED
                else:
                    grouped.add("bf16")
    return ModelActivity(frozenset(grouped), frozenset(linear or {"bf16"}), emulated)


def observe_dispatch() -> frozenset[str]:
    """Return how this rank sent tokens: `standard`, `deepep`, `mxfp8`; empty where it sent none."""
    both = {MXFP8_DISPATCH, MXFP8_COMBINE}
    return frozenset(dispatches - both | {"mxfp8"} if both <= dispatches else dispatches)


def merge(views: Sequence[RankActivity]) -> dict[str, Any]:
    """Merge the ranks' observations; values on which ranks differ are joined, `a and b`.

    An aspect that no rank has is null; `mean_attended_length` is in tokens.
    """

    def joined(name: str) -> frozenset[str]:
        return frozenset().union(*(view.found[name] for view in views))

    linear = joined("linear_layers")
    # A filter may leave no layer to quantize on one stage of a pipeline. Ranks of one stage hold
    # the same layers and must agree: `bf16` counts only where nothing is quantized, or they differ.
    by_stage = {(view.stage, view.found["linear_layers"]) for view in views}
    if len(by_stage) == len({view.stage for view in views}):
        linear = linear - {"bf16"} or linear
    # Ranks have batches of one size, so the mean of their means is that of all tokens.
    lengths = [view.mean_attended_length for view in views]
    means = [length for length in lengths if length is not None]
    return {
        **{name: words(joined(name)) for name in views[0].found},
        "linear_layers": words(linear),
        "emulated": any(view.emulated for view in views),
        "mean_attended_length": round(fmean(means), 1) if means else None,
    }


def check(job_config: Any, found: dict[str, Any]) -> None:
    """End this rank where `found`, from `merge`, differs from the declaration of the overlays.

    Empty options declare nothing. At one EP rank, where no token is sent, the dispatch is ignored.
    """
    options = job_config.cookbook
    names = ("grouped_gemms", "linear_layers", "dispatch")
    declared: dict[str, Any] = {name: one for name in names if (one := getattr(options, name))}
    if not declared:
        return
    if job_config.parallelism.expert_parallel_degree == 1:
        declared.pop("dispatch", None)
    declared["emulated"] = options.emulated
    texts = []
    for aspect, value in declared.items():
        if value != found[aspect]:
            kind = "ep_backend" if aspect == "dispatch" else "precision"
            overlay = f"{KINDS[kind]} {getattr(options, kind)}".rstrip()
            wanted, active = (
                str(one).lower() if aspect == "emulated" else one for one in (value, found[aspect])
            )
            texts.append(f"{overlay} declares {aspect} {wanted}, but {active or 'none'} is active")
    if texts:
        raise refuse("; ".join([*texts, "correct the overlay's `expect` or its options"]))
