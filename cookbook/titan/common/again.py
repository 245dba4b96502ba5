"""Whether a forward runs for the first time, or again in the backward."""

from __future__ import annotations

import torch


def in_recompute() -> bool:
    """Whether this forward recomputes what was not kept, for the gradients of the same tensors."""
    # It runs within the backward, so within a task of autograd's engine.
    return torch._C._current_graph_task_id() != -1
