"""In: a training process that has done its work. Out: the process gone, with status 0.

Threads of PyArrow and gloo outlive the training. One that wants Python's lock while the interpreter
is torn down is ended there and aborts the whole process: a job that has trained to its last step
counts as failed (huggingface/datasets#7566, apache/arrow#45214, pytorch/pytorch#179291; seen here
once, on a CPU). So there is no tearing down once all is closed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from functools import wraps
from typing import Any

import torch.distributed as dist


def leave_when_done() -> None:
    """Have a process of `python -m torchtitan.train` end without its interpreter's end.

    TorchTitan destroys the process group last, and only where no exception was raised. What other
    packages registered for the exit after this is called runs before.
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
        # After an exception the status is Python's to set.
        if destroyed and not hasattr(sys, "last_type"):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    dist.destroy_process_group = destroy_and_note
    atexit.register(leave)
