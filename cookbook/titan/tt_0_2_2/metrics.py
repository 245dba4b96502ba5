"""Log TorchTitan's metrics and the experts' load, and report which kernels the job uses.

After the first step, each rank reports the kernels and number formats that it used. The reports are
compared with the precision and the EP backend that the job's options declare (`activity.py`), and
written to the log and to `environment.json`.

`attempt-<k>/metrics.jsonl` has one JSON object per logged step. `cookbook.observe.metrics` reads
it; in a notebook use `pandas.read_json("metrics.jsonl", lines=True)`.
"""

import json
import math
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchtitan.components.metrics as metrics
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.validate import BaseValidator
from torchtitan.tools.logging import logger

from cookbook.base.family import loss_rank
from cookbook.base.files import write_whole
from cookbook.base.gpus import driver_version
from cookbook.titan.common.process import StallAlarm, attempt_folder
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.families.parts import observe_attention
from cookbook.titan.tt_0_2_2.loss_and_optimizer import GradientWatch
from cookbook.titan.tt_0_2_2.mxfp8 import casts_are_emulated
from cookbook.titan.tt_0_2_2.recomputation import observe_recomputation
from cookbook.titan.tt_0_2_2.routing import RouterLoad, observe_routing
from cookbook.titan.tt_0_2_2.self_check import check_kernels
from cookbook.titan.tt_0_2_2.versions import versions

# TorchTitan's name of a metric -> its key in metrics.jsonl.
_NAMES = {
    "loss_metrics/global_avg_loss": "loss",
    "validation_metrics/loss": "validation_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "throughput(tps)": "tokens_per_second",
    "tflops": "tflops",
    "mfu(%)": "mfu",
    "memory/max_reserved(GiB)": "memory_gib",
    "memory/max_reserved(%)": "memory_percent",
    "n_tokens_seen": "tokens_seen",
    "skipped_steps": "skipped_steps",
    "router_load/busiest_over_mean": "router_busiest_over_mean",
    "router_load/starved_experts": "router_starved_experts",
}
_HEARTBEAT_S = 60.0


class JsonLines(BaseLogger):
    """Wraps TorchTitan's `logger` to write metrics.jsonl too; NaN and infinity become strings."""

    def __init__(self, logger: BaseLogger, path: Path, rank: int) -> None:
        self._logger, self._rank = logger, rank
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write a line for the step; a validation gets a line of its own, without `loss`."""
        self._logger.log(metrics, step)
        line: dict[str, float | str] = {"step": step, "time": time.time(), "rank": self._rank}
        for name, ours in _NAMES.items():
            if name in metrics:
                value = metrics[name] if isinstance(metrics[name], int) else float(metrics[name])
                line[ours] = value if math.isfinite(value) else str(value)
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._logger.close()
        self._file.close()


class CookbookMetrics(metrics.MetricsProcessor):
    """TorchTitan's MetricsProcessor with router load, stall alarm and a report of what ran."""

    logger: BaseLogger
    alarm: StallAlarm | None = None
    _load: RouterLoad | None = None  # None before the first step
    _logged_step = 0  # the last logged step
    _logged_at = -math.inf  # time.monotonic() of the last log line

    def __init__(self, job_config: Any, parallel_dims: Any, model_args: Any) -> None:
        """Check the kernels, and end the job if one gives wrong results."""
        compiler = job_config.compile
        uses_inductor = compiler.enable and compiler.backend == "inductor"
        if torch.cuda.is_available() and job_config.comm.mode == "default" and uses_inductor:
            from torch._inductor.async_compile import maybe_warm_pool

            # The worker processes that compile Triton kernels take seconds to import torch. Start
            # them now: torch would start them only when it compiles the first function.
            maybe_warm_pool()
        self.model_args = model_args
        self.self_check = check_kernels(job_config, parallel_dims, model_args)
        with patch.object(metrics, "_get_metrics_rank", metrics_rank):
            super().__init__(job_config, parallel_dims)
        if attempt := attempt_folder():
            rank, comm = torch.distributed.get_rank(), job_config.comm
            traces = Path(job_config.job.dump_folder, comm.save_traces_folder)
            self.alarm = StallAlarm(attempt, traces / comm.save_traces_file_prefix, rank)
            if self._is_metrics_rank():
                self.logger = JsonLines(self.logger, attempt / "metrics.jsonl", rank)

    def should_log(self, step: int) -> bool:
        """Return whether to log this step; called on every rank after each optimizer step."""
        is_last = step >= self.job_config.training.steps
        if self.alarm and is_last:
            self.alarm.end()
        elif self.alarm:
            self.alarm.step()
        if self._load is None:
            self._load = RouterLoad(self, step, self._is_metrics_rank())
            self._logged_step = step - 1
            self._report()
        config = self.job_config
        validates = config.validation.enable and BaseValidator(config).should_validate(step)
        is_logged: bool = is_last or validates or super().should_log(step)
        # The supervisor reads the log and would take a long silence for a hang.
        now = time.monotonic()
        is_due = now - self._logged_at >= _HEARTBEAT_S
        if is_due and not is_logged and self._is_metrics_rank():
            logger.info(f"cookbook: made step {step}, which is not logged")
        if is_due or is_logged:
            self._logged_at = now
        return is_logged

    def log(self, step: int, *values: float, extra_metrics: dict[str, Any] | None = None) -> None:
        assert self._load is not None
        extra = (extra_metrics or {}) | self._load.log(step)
        # TorchTitan divides by `log_freq` even if fewer steps have run since the last log.
        seconds = time.perf_counter() - self.time_last_log
        extra["time_metrics/end_to_end(s)"] = seconds / (step - self._logged_step)
        self._logged_step = step
        if self.job_config.training.max_skipped_steps:
            extra["skipped_steps"] = GradientWatch.skipped
        super().log(step, *values, extra_metrics=extra)

    def _is_metrics_rank(self) -> bool:
        return torch.distributed.get_rank() == metrics_rank(self.parallel_dims, self.job_config)

    def _report(self) -> None:
        views: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(views, self._observe())
        found = activity.merge(views)
        activity.hold_to_declared(self.job_config, found)
        if not self._is_metrics_rank():
            return
        on_gpu = torch.cuda.is_available()
        active = {
            **{kind: getattr(self.job_config.cookbook, kind) or None for kind in activity.KINDS},
            **found,
            "device": "cuda" if on_gpu else "cpu",
            "gpu": torch.cuda.get_device_name() if on_gpu else None,
            "driver": driver_version() if on_gpu else None,
            "patches_applied": sorted({name for view in views for name in view.patches_applied}),
            "self_check": self.self_check,
            "versions": versions(),
        }
        logger.info(f"cookbook active: {json.dumps(active)}")
        if attempt := attempt_folder():
            environment = active | {"nodes": sorted({view.node for view in views})}
            write_whole(attempt / "environment.json", json.dumps(environment, indent=2) + "\n")

    def _observe(self) -> activity.RankActivity:
        assert self.model_parts is not None
        quantization, is_emulated = activity.observe_model(self.model_parts)
        attention, mean_attended_length = observe_attention()
        pp_mesh = self.parallel_dims.get_optional_mesh("pp")
        quantized = activity.dispatches & {activity.MXFP8_DISPATCH, activity.MXFP8_COMBINE}
        return activity.RankActivity(
            stage=0 if pp_mesh is None else pp_mesh.get_local_rank(),
            found={
                **quantization,
                "dispatch": activity.observe_dispatch(),
                "rows": frozenset(activity.rows),
                "loss": frozenset(activity.losses),
                "recomputation": observe_recomputation(self.model_parts),
                "saved": frozenset(activity.saved),
                "moe_routing": observe_routing(self.model_parts),
                "attention": attention,
            },
            emulated=is_emulated or (bool(quantized) and casts_are_emulated()),
            mean_attended_length=mean_attended_length,
            patches_applied=frozenset(activity.patches_applied),
            node=socket.gethostname(),
        )


def metrics_rank(parallel_dims: Any, job_config: Any) -> int:
    """Return the rank that logs the metrics: one whose pipeline stage computes the loss.

    TorchTitan's own choice is wrong for V-shaped schedules other than ZBVZeroBubble.
    """
    schedule = job_config.parallelism.pipeline_parallel_schedule
    return loss_rank(schedule, parallel_dims.pp, parallel_dims.world_size)
