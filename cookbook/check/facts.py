"""In: a cell. Out: what several rules ask of it, and where they find their facts."""

from __future__ import annotations

from typing import Any

from cookbook.cells.cell import Cell

TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan"
TORCHAO = "https://github.com/pytorch/ao/blob/v0.16.0/torchao"
DEEPEP = "https://github.com/deepseek-ai/DeepEP/blob/29d31c095796f3c8ece47ee9cdcc167051bbeed9"
PIPELINING = (
    "https://github.com/pytorch/pytorch/blob/v2.10.0/torch/distributed/pipelining/schedules.py"
)


def value(cell: Cell, name: str) -> Any:
    """What the job holds for the option `name`."""
    return cell.stack.value(cell.options, name)


def uses_deepep(cell: Cell) -> bool:
    """Whether tokens travel by DeepEP."""
    return bool(value(cell, "parallelism.expert_parallel_comm_backend") == "deepep")


def model_is_compiled(cell: Cell) -> bool:
    """Whether torch.compile sees the model's layers."""
    return bool(value(cell, "compile.enable") and "model" in value(cell, "compile.components"))
