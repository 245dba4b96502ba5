"""Write the metrics of each logged step to `attempt-<k>/metrics.jsonl`, one JSON object a line.

`cookbook.observe.metrics` reads it, and so does any notebook:
`pandas.read_json("metrics.jsonl", lines=True)`.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from torchtitan.components.metrics import BaseLogger, LoggerContainer

FILE = "metrics.jsonl"
# TorchTitan's name of a metric -> ours. The router's load keeps its own name.
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
    "router_load/busiest_over_mean": "router_busiest_over_mean",
    "router_load/starved_experts": "router_starved_experts",
}


class JsonLines(BaseLogger):
    """Append a line for each logged step; NaN and infinite values become text."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write the step; a validation is a line of its own, without `loss`."""
        line: dict[str, float | str] = {"step": step, "time": time.time(), "rank": self._rank}
        for name, ours in _NAMES.items():
            if name in metrics:
                line[ours] = _finite_or_text(metrics[name])
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def with_json_lines(logger: BaseLogger, rank: int) -> BaseLogger:
    """Return TorchTitan's `logger` with the attempt's file added, where there is an attempt.

    A new container, because TorchTitan returns an empty one on ranks and in jobs without loggers.
    """
    attempt = os.environ.get("COOKBOOK_ATTEMPT_DIR")
    if not attempt:
        return logger
    both = LoggerContainer()
    both.add_logger(logger)
    both.add_logger(JsonLines(Path(attempt) / FILE, rank))
    return both


def _finite_or_text(value: Any) -> float | int | str:
    """Return a number that every JSON reader accepts: `NaN` is none."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
