"""Record which kernels and number formats each rank uses, and check them against the options.

EP backends, losses and patches add their names to the sets below when they run. Quantization is
found by inspecting the model (`observe_model`). `merge` joins the records of all ranks, and
`hold_to_declared` compares the result with what the job's options declare.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor
from torchao.prototype.mx_formats.mx_linear import MXLinear
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.models.moe.moe import GroupedExperts

from cookbook.titan.common import fp8
from cookbook.titan.tt_0_2_2.float8 import FP8Linear
from cookbook.titan.tt_0_2_2.versions import refuse

# If both of these are in `dispatches`, `observe_dispatch` returns `mxfp8` in their place.
MXFP8_DISPATCH = "mxfp8 in the dispatch only"
MXFP8_COMBINE = "mxfp8 in the combine only"

# What was active in this process: EP dispatch backends, row kernels, losses, the kinds of operators
# that selective recomputation saved, and patches of TorchTitan.
dispatches: set[str] = set()
rows: set[str] = set()
losses: set[str] = set()
saved: set[str] = set()
patches_applied: set[str] = set()

KINDS = {"precision": "precision", "ep_backend": "EP backend"}


@dataclass(frozen=True)
class RankActivity:
    """The number formats, kernels and patches that one rank used in its first step."""

    stage: int  # the rank's pipeline stage
    found: dict[str, frozenset[str]]  # what ran for each feature, e.g. {"dispatch": {"deepep"}}
    emulated: bool
    mean_attended_length: float | None  # mean number of keys per token; None if not counted
    patches_applied: frozenset[str]
    node: str


def words(found: Iterable[str]) -> str | None:
    """Join the sorted strings with " and "; return None if there are none."""
    return " and ".join(sorted(found)) or None


def observe_model(model_parts: Iterable[nn.Module]) -> tuple[dict[str, frozenset[str]], bool]:
    """Return how grouped GEMMs and linear layers are quantized, and whether any is emulated."""
    grouped, linear, emulated = set(), set(), False
    for module in (module for part in model_parts for module in part.modules()):
        if isinstance(module, MXLinear):
            linear.add("mx")
            emulated |= module.config.kernel_preference == KernelPreference.EMULATED
        elif isinstance(module, FP8Linear):
            linear.add("fp8")
            emulated |= not fp8.has_kernels()
        elif isinstance(module, GroupedExperts) and getattr(module, "cookbook_fp8", False):
            grouped.add("fp8")
            emulated |= not fp8.has_kernels()
        elif isinstance(module, GroupedExperts):
            for one in module.parameters(recurse=False):
                weight = one._local_tensor if isinstance(one, DTensor) else one.data
                # TorchAO quantizes torch._grouped_mm only, not the for-loop over experts.
                if isinstance(weight, ScaledGroupedMMTensor) and module.use_grouped_mm:
                    grouped.add(weight.scaling_type.value)
                    emulated |= weight.kernel_preference == KernelPreference.EMULATED
                else:
                    grouped.add("bf16")
    found = {"grouped_gemms": frozenset(grouped), "linear_layers": frozenset(linear or {"bf16"})}
    return found, emulated


def observe_dispatch() -> frozenset[str]:
    """Return the kinds of dispatch that this rank ran, such as `standard`, `deepep` or `mxfp8`."""
    both = {MXFP8_DISPATCH, MXFP8_COMBINE}
    return frozenset(dispatches - both | {"mxfp8"} if both <= dispatches else dispatches)


def merge(views: Sequence[RankActivity]) -> dict[str, Any]:
    """Merge the ranks' observations, joining different values, as in `bf16 and mxfp8`.

    A value that no rank observed is None.
    """
    found = {
        name: set[str]().union(*(view.found[name] for view in views)) for name in views[0].found
    }
    # A pipeline stage without linear layers to quantize reports `bf16`. Drop this `bf16` if another
    # stage quantizes. Keep it if ranks of the same stage differ: `hold_to_declared` must see that.
    by_stage = {(view.stage, view.found["linear_layers"]) for view in views}
    if len(by_stage) == len({view.stage for view in views}):
        found["linear_layers"] = found["linear_layers"] - {"bf16"} or {"bf16"}
    # All ranks have batches of the same size, so the mean of their means is the mean over tokens.
    lengths = [one.mean_attended_length for one in views if one.mean_attended_length is not None]
    return {
        **{name: words(one) for name, one in found.items()},
        "emulated": any(view.emulated for view in views),
        "mean_attended_length": round(fmean(lengths), 1) if lengths else None,
    }


def hold_to_declared(job_config: Any, found: dict[str, Any]) -> None:
    """Exit with an error if `found`, the result of `merge`, differs from what the job declares.

    The options `cookbook.grouped_gemms`, `linear_layers`, `dispatch` and `emulated` declare what
    should run. Empty options are not compared, nor is `dispatch` if EP is 1: no tokens are sent.
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
            wanted, active = str(value).lower(), str(found[aspect]).lower()
            texts.append(f"{overlay} declares {aspect} {wanted}, but {active} is active")
    if texts:
        raise refuse("; ".join([*texts, "correct the overlay's `expect` or its options"]))
