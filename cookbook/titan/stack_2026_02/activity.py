"""In: the model and the calls of a first step. Out: what was active, in one log line and one file.

What the driver asked for (`--cookbook.precision` and so on) is compared with what is found in the
model and with the token dispatch that ran; a difference ends the run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torchtitan.components.metrics as metrics
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability

from cookbook.base.files import write_whole
from cookbook.titan.stack_2026_02.versions import refuse, versions

# Filled by the hooks while they run: which dispatch sent tokens, which corrections were applied.
dispatches: set[str] = set()
corrections: set[str] = set()

# The precisions of the cookbook, by the scaling of the grouped GEMMs and the kind of linear layers.
_PRECISIONS = {
    ("", ""): "bf16",
    ("mxfp8", ""): "mxfp8",
    ("mxfp8_wgrad_with_hp", ""): "mxfp8_wgrad_hp",
    ("mxfp8", "mx"): "mxfp8_linear",
    ("fp8_rowwise", "float8"): "float8",
}


# Both exchanges of the quantized all-to-all, which one training step makes.
_QUANTIZED_A2A = {"mxfp8-dispatch-forward", "mxfp8-combine-backward"}


def _casts_emulated() -> bool:
    """Whether the quantized all-to-all casts with PyTorch operations, as below SM100."""
    return bool(dispatches & _QUANTIZED_A2A) and not has_cuda_capability(10, 0)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def _grouped_gemms(model_parts: list[nn.Module]) -> Iterator[tuple[str, bool]]:
    """Scaling type and emulation of every routed expert weight; ("", False) for none."""
    from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor
    from torchao.quantization.quantize_.common import KernelPreference

    for part in model_parts:
        for module in part.modules():
            if not isinstance(module, GroupedExperts):
                continue
            for parameter in module.parameters(recurse=False):
                weight = _local(parameter)
                # The for-loop over experts multiplies without torch._grouped_mm: nothing quantizes.
                if isinstance(weight, ScaledGroupedMMTensor) and module.use_grouped_mm:
                    preference = weight.kernel_preference
                    yield weight.scaling_type.value, preference == KernelPreference.EMULATED
                else:
                    yield "", False


def _linear_layers(model_parts: list[nn.Module]) -> Iterator[tuple[str, bool]]:
    """Kind and emulation of every quantized linear layer."""
    from torchao.float8.float8_linear import Float8Linear
    from torchao.prototype.mx_formats.mx_linear import MXLinear
    from torchao.quantization.quantize_.common import KernelPreference

    for part in model_parts:
        for module in part.modules():
            if isinstance(module, MXLinear):
                yield "mx", module.config.kernel_preference == KernelPreference.EMULATED
            elif isinstance(module, Float8Linear):
                yield "float8", bool(module.config.emulate)


def observe(model_parts: list[nn.Module]) -> dict[str, Any]:
    """What this rank's part of the model computes with, and how it sent its tokens.

    Returns:
        `precision` and `ep_backend` in the cookbook's words, null where this rank has none of it.
    """
    grouped, linear = set(_grouped_gemms(model_parts)), set(_linear_layers(model_parts))
    scalings = "+".join(sorted({scaling for scaling, _ in grouped}))
    kinds = "+".join(sorted({kind for kind, _ in linear}))
    found = f"grouped GEMMs {scalings or 'bf16'}, linear layers {kinds or 'bf16'}"
    backends = {"mxfp8_a2a"} if dispatches == _QUANTIZED_A2A else dispatches
    return {
        "precision": _PRECISIONS.get((scalings, kinds), found),
        "ep_backend": "+".join(sorted(backends)) or None,
        "emulated": any(emulated for _, emulated in grouped | linear) or _casts_emulated(),
        "has_experts": bool(grouped),
        "has_quantized_linear": bool(linear),
    }


def _merged(rank_views: list[dict[str, Any]]) -> dict[str, Any]:
    """One view of all ranks: a pipeline stage may hold no linear layer that the filter leaves."""
    precisions = {view["precision"] for view in rank_views if view["has_experts"]}
    if precisions == {"mxfp8", "mxfp8_linear"}:
        precisions = {"mxfp8_linear"}
    backends = {view["ep_backend"] for view in rank_views if view["has_experts"]} - {None}
    return {
        "precision": " and ".join(sorted(precisions)) or None,
        "ep_backend": " and ".join(sorted(backends)) or None,
        "emulated": any(view["emulated"] for view in rank_views),
    }


def check(job_config: Any, found: dict[str, Any]) -> None:
    """End the run where `found` is not what the driver asked for."""
    asked = job_config.cookbook
    if not asked.precision and not asked.ep_backend:
        return
    for option in ("precision", "ep_backend", "emulated"):
        wanted, active = getattr(asked, option), found[option]
        if option == "ep_backend" and job_config.parallelism.expert_parallel_degree == 1:
            continue  # with one EP rank no token is sent, whatever the backend
        if wanted != "" and wanted != active:
            raise refuse(f"asked for {option} {wanted}, but what is active is {active}")


def report_first_step(processor: MetricsProcessor) -> None:
    """Gather what every rank found, check it, and log it once; a collective of all ranks."""
    assert processor.model_parts is not None
    world = torch.distributed.get_world_size()
    mine = observe(processor.model_parts) | {
        "node": socket.gethostname(),
        "corrections": sorted(corrections),
    }
    views: list[Any] = [None] * world
    torch.distributed.all_gather_object(views, mine)
    found = _merged(views)
    check(processor.job_config, found)

    metrics_rank = metrics._get_metrics_rank(processor.parallel_dims, processor.job_config)
    if torch.distributed.get_rank() != metrics_rank:
        return
    on_gpu = torch.cuda.is_available()
    active = found | {
        "device": "cuda" if on_gpu else "cpu",
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "corrections": sorted({name for view in views for name in view["corrections"]}),
        "versions": versions(),
    }
    logger.info(f"cookbook active: {json.dumps(active)}")
    attempt = os.environ.get("COOKBOOK_ATTEMPT_DIR")
    if attempt:
        environment = active | {"nodes": sorted({view["node"] for view in views})}
        write_whole(Path(attempt) / "environment.json", json.dumps(environment, indent=2) + "\n")


def hook_first_step() -> None:
    """`should_log` is the first thing that every rank calls after each step's optimizer."""
    should_log = MetricsProcessor.should_log

    @wraps(should_log)
    def should_log_after_report(self: MetricsProcessor, step: int) -> bool:
        if not getattr(self, "_cookbook_reported", False):
            self._cookbook_reported = True
            report_first_step(self)
        return should_log(self, step)

    MetricsProcessor.should_log = should_log_after_report


def note_standard_dispatch() -> None:
    """Record that the all-to-all of TorchTitan's standard backend ran."""
    from torchtitan.distributed.expert_parallel import ExpertParallel

    dispatch = ExpertParallel._token_dispatch

    @wraps(dispatch)
    def noted_dispatch(self: ExpertParallel, mod: nn.Module, inputs: Any, mesh: Any) -> Any:
        dispatches.add("standard")
        return dispatch(self, mod, inputs, mesh)

    ExpertParallel._token_dispatch = noted_dispatch
