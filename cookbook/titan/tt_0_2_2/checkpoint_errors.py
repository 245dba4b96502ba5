"""Raise a failed save or load as an ordinary exception that names its root cause.

DCP's `CheckpointException` is a `BaseException`, for which torchrun's `@record` writes no
`error.json`, and its first line ("CheckpointException ranks:dict_keys([0, 1])") names no cause.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import CheckpointManager


class CheckpointFailedError(RuntimeError):
    """Saving or loading a checkpoint failed on some rank."""


def root_cause(error: BaseException) -> BaseException:
    """Return what failed first: the first rank's error, below all that was raised from it."""
    if isinstance(error, CheckpointException) and error.failures:
        first, _ = error.failures[min(error.failures)]
        return root_cause(first)
    return root_cause(error.__cause__) if error.__cause__ is not None else error


def _naming_the_cause(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except CheckpointException as error:
            cause = root_cause(error)
            ranks = ", ".join(map(str, sorted(error.failures)))
            raise CheckpointFailedError(
                f"{method.__name__} failed on rank {ranks}: {type(cause).__name__}: {cause}"
            ) from error

    return call


def name_checkpoint_causes() -> None:
    """Patch TorchTitan's manager; no door: the Trainer makes its CheckpointManager itself."""
    for name in ("save", "load", "maybe_wait_for_staging", "_async_wait", "close"):
        setattr(CheckpointManager, name, _naming_the_cause(getattr(CheckpointManager, name)))
