"""Values that TorchTitan takes and nobody means: no steps, an interval of 0, a ratio of 7."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cookbook.base.errors import nearest
from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, TORCHTITAN, Finding

_REFERENCE = f"{TORCHTITAN}/config/job_config.py"
# The smallest and the largest value that makes sense.
_BOUNDS: dict[str, tuple[float, float]] = {
    "training.steps": (1, math.inf),
    "training.max_norm": (0, math.inf),
    "training.gc_freq": (1, math.inf),
    "metrics.log_freq": (1, math.inf),
    "checkpoint.interval": (1, math.inf),
    "checkpoint.interval_minutes": (0, math.inf),
    "checkpoint.keep_latest_k": (0, math.inf),
    "profiling.profile_freq": (1, math.inf),
    "comm.init_timeout_seconds": (1, math.inf),
    "comm.train_timeout_seconds": (1, math.inf),
    "comm.num_sms": (0, 64),
    "lr_scheduler.warmup_steps": (0, math.inf),
    "lr_scheduler.decay_ratio": (0, 1),
    "lr_scheduler.min_lr_factor": (0, 1),
    "optimizer.lr": (0, math.inf),
    "optimizer.eps": (0, math.inf),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.beta1": (0, 1),
    "optimizer.beta2": (0, 1),
    "activation_checkpoint.memory_budget": (0, 1),
    "loss.num_chunks": (0, math.inf),
    "deepep.num_chunks": (1, math.inf),
    "activation_checkpoint.num_layers_kept": (0, math.inf),
    "debug.seed": (0, 2**63 - 1),
}


def bounds(cell: Cell) -> Iterator[Finding]:
    """Numbers below or above all sense."""
    for name, (low, high) in _BOUNDS.items():
        value = cell.options[name]
        if value is not None and not low <= value <= high:
            allowed = f"{low:g} and up" if high == math.inf else f"{low:g} to {high:g}"
            yield _wrong("values", name, f"found {value}, allowed: {allowed}")


def dataset(cell: Cell) -> Iterator[Finding]:
    """TorchTitan looks the data set up by name, and only when every rank has started."""
    name, known = cell.options["training.dataset"], cell.options.stack.datasets
    if name not in known:
        close = nearest(name, known)
        remedy = f"did you mean {close[0]!r}?" if close else ""
        reason = f"found {name!r}, allowed: {', '.join(known)}"
        yield _wrong("dataset", "training.dataset", reason, remedy)


def kept_checkpoints(cell: Cell) -> Iterator[Finding]:
    """TorchTitan refuses to keep one, on every rank."""
    if cell.options["checkpoint.enable"] and cell.options["checkpoint.keep_latest_k"] == 1:
        yield _wrong(
            "kept_checkpoints",
            "checkpoint.keep_latest_k",
            "1 would leave none while the next is being written, and TorchTitan refuses it",
            "set it to 2, or to 0 to keep all",
        )


def pinned_memory(cell: Cell) -> Iterator[Finding]:
    """PyTorch stages into pinned memory with the help of a GPU, and fails at the first save."""
    option = "checkpoint.async_mode"
    pinned = cell.options[option] == "async_with_pinned_mem"
    if cell.options["checkpoint.enable"] and pinned and cell.cluster.gpu is None:
        reason = f"async_with_pinned_mem needs GPUs, cluster {cell.cluster.name} runs on the CPU"
        yield _wrong("pinned_memory", option, reason, "set it to async")


def _wrong(rule: str, option: str, reason: str, remedy: str = "") -> Finding:
    return Finding(ERROR, rule, option, reason, remedy, _REFERENCE, is_input=True)
