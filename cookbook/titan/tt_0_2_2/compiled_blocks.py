"""Start the processes that compile Triton kernels before they are needed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


def start_compiling_workers(job_config: Any) -> None:
    """Start the processes that compile Triton's kernels for a GPU, and do not wait for them.

    They import torch, for seconds, and torch starts them when it compiles the first function. That
    comes after other things that a job can do meanwhile.
    """
    if not torch.cuda.is_available() or job_config.comm.mode != "default":
        return
    if not job_config.compile.enable or job_config.compile.backend != "inductor":
        return
    # No public function; where another torch lacks it, the start is only slower.
    with suppress(ImportError):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
