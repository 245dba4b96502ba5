"""Ends a training process that has done its work, with status 0 and without interpreter shutdown.

Threads of PyArrow and gloo outlive the training. A thread that takes the GIL during the shutdown
can abort the process: a job that has trained to its last step then counts as failed
(huggingface/datasets#7566, apache/arrow#45214, pytorch/pytorch#179291; seen here once, on a CPU).
So once everything is closed, the process exits at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from functools import wraps
from typing import Any

import torch.distributed as dist


def exit_without_teardown() -> None:
    """Let `python -m torchtitan.train` end without interpreter shutdown; no other program.

    Exit handlers that are registered after this one run before it.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != "torchtitan.train":
        return
    destroy_process_group = dist.destroy_process_group
    destroyed = False

    @wraps(destroy_process_group)
    def destroy_and_note(*args: Any, **kwargs: Any) -> None:
        nonlocal destroyed
        destroy_process_group(*args, **kwargs)
        destroyed = True

    def leave() -> None:
        # After an exception Python sets the exit status.
        if destroyed and not hasattr(sys, "last_type"):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    # No door: TorchTitan has no hook for the end of a run, and closes its parts after a failure
    # too. What it does last, and after a success only, is to destroy the process group.
    dist.destroy_process_group = destroy_and_note
    atexit.register(leave)
