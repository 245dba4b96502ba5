"""Reports at the first step what is active, and holds the job to what its overlays declare.

A precision declares how grouped GEMMs and linear layers quantize, an EP backend how tokens travel
(`--cookbook.grouped_gemms` and so on). All ranks' observations are merged and compared with that,
aspect by aspect. A difference ends the run with one line; otherwise one line and one file say what
is active.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchtitan.components.metrics as metrics
from torchtitan.tools.logging import logger

from cookbook.base.files import write_whole
from cookbook.base.gpus import driver_version
from cookbook.base.pipelines import loss_rank
from cookbook.titan.common.stall import StallAlarm
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.activity import ModelActivity, words
from cookbook.titan.tt_0_2_2.attention import (
    AttentionActivity,
    merge_attention,
    observe_attention,
)
from cookbook.titan.tt_0_2_2.compiled_blocks import start_compiling_workers
from cookbook.titan.tt_0_2_2.metrics_log import with_json_lines
from cookbook.titan.tt_0_2_2.recomputation import observe_recomputation
from cookbook.titan.tt_0_2_2.router_load import RouterLoad
from cookbook.titan.tt_0_2_2.self_check import check_kernels
from cookbook.titan.tt_0_2_2.versions import refuse, versions

# What may be declared, and by which overlay.
_ASPECTS = {"grouped_gemms": "precision", "linear_layers": "precision", "dispatch": "ep_backend"}
_KINDS = {"precision": "precision", "ep_backend": "EP backend"}
# Of steps that are not logged, one line in a minute.
_TELL_S = 60.0


@dataclass(frozen=True)
class RankActivity:
    """What one rank observed in its first step; `stage` is its place in the pipeline."""

    stage: int
    model: ModelActivity
    attention: AttentionActivity
    dispatch: frozenset[str]
    rows: frozenset[str]
    loss: frozenset[str]
    recomputation: frozenset[str]
    saved: frozenset[str]
    emulated: bool
    patches_applied: frozenset[str]
    node: str


class CookbookMetrics(metrics.MetricsProcessor):
    """TorchTitan's metrics and the router's load, with a report after the first optimizer step."""

    reported = False
    # What `check_kernels` found; its kernels were compared before the model was built.
    self_check: dict[str, Any] | None = None
    alarm: StallAlarm | None = None
    # Of the whole model; `build_metrics_processor` sets it.
    model_args: Any = None
    _load: RouterLoad | None = None
    _first_unlogged: int | None = None
    # Seconds of the monotonic clock.
    _told_at: float | None = None

    def should_log(self, step: int) -> bool:
        """Whether this step is logged: the first that every rank asks after each optimizer step."""
        self._set_alarm(is_last=step >= self.job_config.training.steps)
        if self._first_unlogged is None:
            self._first_unlogged = step
        if not self.reported:
            self.reported = True
            self._report()
        is_logged: bool = super().should_log(step)
        self._tell(step, is_logged)
        return is_logged

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """TorchTitan's metrics of this step, with the router's load since the last such step."""
        if self._load is None:
            assert self.model_parts is not None
            self._load = RouterLoad(
                self.model_parts,
                self.model_args,
                self.parallel_dims,
                self.job_config,
                self._is_metrics_rank(),
            )
        load = self._load.log(self._first_unlogged or step, step)
        self._first_unlogged = None
        extra = {**(extra_metrics or {}), **load}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=extra)

    def _tell(self, step: int, is_logged: bool) -> None:
        """Say at times that steps are made, though none is logged: the supervisor reads the log."""
        now = time.monotonic()
        is_due = self._told_at is None or now - self._told_at >= _TELL_S
        if is_due and not is_logged and self._is_metrics_rank():
            logger.info(f"cookbook: made step {step}, which is not logged")
        if is_due or is_logged:
            self._told_at = now

    def _is_metrics_rank(self) -> bool:
        rank = metrics_rank(self.parallel_dims, self.job_config)
        return bool(torch.distributed.get_rank() == rank)

    def _set_alarm(self, is_last: bool) -> None:
        attempt, comm = os.environ.get("COOKBOOK_ATTEMPT_DIR"), self.job_config.comm
        if self.alarm is None and attempt:
            traces = Path(self.job_config.job.dump_folder) / comm.save_traces_folder
            prefix = traces / comm.save_traces_file_prefix
            self.alarm = StallAlarm(Path(attempt), prefix, torch.distributed.get_rank())
        if self.alarm is not None and is_last:
            self.alarm.end()
        elif self.alarm is not None:
            self.alarm.step()

    def _report(self) -> None:
        """Gather what every rank found, check it, and log it once; a collective of all ranks."""
        views: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(views, self._observe())
        found = merge(views)
        check(self.job_config, found)

        if not self._is_metrics_rank():
            return
        on_gpu = torch.cuda.is_available()
        labels = {kind: getattr(self.job_config.cookbook, kind) or None for kind in _KINDS}
        active = {
            **labels,
            **found,
            **merge_attention([view.attention for view in views]),
            "device": "cuda" if on_gpu else "cpu",
            "gpu": torch.cuda.get_device_name() if on_gpu else None,
            "driver": driver_version() if on_gpu else None,
            "patches_applied": sorted(frozenset().union(*(view.patches_applied for view in views))),
            "self_check": self.self_check,
            "versions": versions(),
        }
        logger.info(f"cookbook active: {json.dumps(active)}")
        attempt = os.environ.get("COOKBOOK_ATTEMPT_DIR")
        if attempt:
            environment = active | {"nodes": sorted({view.node for view in views})}
            path = Path(attempt) / "environment.json"
            write_whole(path, json.dumps(environment, indent=2) + "\n")

    def _observe(self) -> RankActivity:
        assert self.model_parts is not None
        model = activity.observe_model(self.model_parts)
        pp_mesh = self.parallel_dims.get_optional_mesh("pp")
        return RankActivity(
            stage=0 if pp_mesh is None else pp_mesh.get_local_rank(),
            model=model,
            attention=observe_attention(),
            dispatch=activity.observe_dispatch(),
            rows=frozenset(activity.rows),
            loss=frozenset(activity.losses),
            recomputation=observe_recomputation(self.model_parts),
            saved=frozenset(activity.saved),
            emulated=model.emulated or activity.casts_are_emulated(),
            patches_applied=frozenset(activity.patches_applied),
            node=socket.gethostname(),
        )


def metrics_rank(parallel_dims: Any, job_config: Any) -> int:
    """The rank that knows the loss, and so reports.

    TorchTitan knows of one V-shaped schedule, spelt in one way; of the others it would take a rank
    whose loss is negative, for TensorBoard and Weights & Biases.
    """
    schedule = job_config.parallelism.pipeline_parallel_schedule
    return loss_rank(schedule, parallel_dims.pp, parallel_dims.world_size)


def build_metrics_processor(
    job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None
) -> CookbookMetrics:
    """What TorchTitan's function of this name takes and returns, with the report.

    It is called once, after the converters and before the model has memory: when a kernel can be
    proved as the job will call it.
    """
    start_compiling_workers(job_config)
    found = check_kernels(job_config, parallel_dims, model_args)
    # No door: TorchTitan chooses the rank by a function of this name.
    with patch.object(metrics, "_get_metrics_rank", metrics_rank):
        report = CookbookMetrics(job_config, parallel_dims, tag)
    report.self_check = found
    report.model_args = model_args
    if report._is_metrics_rank():
        report.logger = with_json_lines(report.logger, torch.distributed.get_rank())
    return report


def merge(views: Sequence[RankActivity]) -> dict[str, Any]:
    """What is active in the job; where ranks disagree, `a and b`.

    Returns:
        `grouped_gemms`, `linear_layers`, `dispatch`, what moved `rows`, `loss`, `recomputation`,
        what it `saved` (each null where no rank has any), `emulated`.
    """
    return {
        "grouped_gemms": words(frozenset().union(*(view.model.grouped_gemms for view in views))),
        "linear_layers": words(_linear_layers(views)),
        "dispatch": words(frozenset().union(*(view.dispatch for view in views))),
        "rows": words(frozenset().union(*(view.rows for view in views))),
        "loss": words(frozenset().union(*(view.loss for view in views))),
        "recomputation": words(frozenset().union(*(view.recomputation for view in views))),
        "saved": words(frozenset().union(*(view.saved for view in views))),
        "emulated": any(view.emulated for view in views),
    }


def _linear_layers(views: Sequence[RankActivity]) -> frozenset[str]:
    """The kinds of linear layers; `bf16` only where nothing is quantized, or ranks disagree.

    A filter may leave no layer to quantize on one stage of a pipeline. Ranks of the same stage hold
    the same layers and must agree.
    """
    kinds: frozenset[str] = frozenset().union(*(view.model.linear_layers for view in views))
    by_stage = {(view.stage, view.model.linear_layers) for view in views}
    if len(by_stage) > len({view.stage for view in views}):
        return kinds
    return kinds - {"bf16"} or kinds


def check(job_config: Any, found: dict[str, Any]) -> None:
    """End this rank where `found` is not what the job's overlays declare."""
    declared = {
        aspect: value for aspect in _ASPECTS if (value := getattr(job_config.cookbook, aspect))
    }
    if not declared:
        return
    if job_config.parallelism.expert_parallel_degree == 1:
        # With one EP rank no token is sent, whatever the backend.
        declared.pop("dispatch", None)
    differences = [
        f"{_declarer(job_config, _ASPECTS[aspect])} declares {aspect} {value}, "
        f"but {found[aspect] or 'none'} is active"
        for aspect, value in declared.items()
        if found[aspect] != value
    ]
    emulated = job_config.cookbook.emulated
    if emulated != found["emulated"]:
        differences.append(
            f"{_declarer(job_config, 'precision')} declares emulated {str(emulated).lower()}, "
            f"but {str(found['emulated']).lower()} is active"
        )
    if differences:
        remedy = "correct the overlay's active block or its options"
        raise refuse("; ".join([*differences, remedy]))


def _declarer(job_config: Any, kind: str) -> str:
    """The overlay that a refusal names, `precision mine`; without a label its kind alone."""
    return f"{_KINDS[kind]} {getattr(job_config.cookbook, kind)}".rstrip()
