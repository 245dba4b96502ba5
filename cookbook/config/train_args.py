"""The words that a cell adds to TorchTitan's command line."""

from __future__ import annotations

from cookbook.config.cell import Cell
from cookbook.config.overlay import Overlay
from cookbook.config.stack import Stack
from cookbook.config.titan_flags import argv_of


def train_argv(cell: Cell) -> list[str]:
    """All of the cell's words, but for the folders of the run."""
    stack = cell.options.stack
    return [
        *launch_argv(stack, f"{cell.name}: {cell.recipe.description}"),
        *overlay_argv(stack, cell.precision),
        *overlay_argv(stack, cell.ep_backend),
        *(["--cookbook.emulated"] if cell.emulated else []),
        *argv_of(stack, cell.options.settings),
    ]


def launch_argv(stack: Stack, description: str) -> list[str]:
    """What every job of the stack is started with: the cookbook's options and hooks."""
    return [
        f"--job.custom_config_module={stack.hooks}.job_config",
        f"--experimental.custom_import={stack.hooks}",
        f"--job.description={description}",
    ]


def overlay_argv(stack: Stack, overlay: Overlay) -> list[str]:
    """The overlay's name, for log and report, and what it declares, which the job is held to."""
    return [f"--cookbook.{overlay.kind}={overlay.name}", *argv_of(stack, overlay.active)]
