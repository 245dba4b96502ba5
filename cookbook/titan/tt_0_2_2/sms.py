"""Divides a GPU's SMs between NCCL and the GEMMs that run beside it, where `comm.num_sms` says so.

A persistent GEMM launches one block for each SM. Where NCCL's kernels hold some of the SMs, its
last blocks wait and run as a second wave, and the GEMM takes twice as long
(pytorch/pytorch#147966).
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch
import torchtitan.distributed.utils
from torchtitan.tools.logging import logger

from cookbook.titan.tt_0_2_2.versions import refuse

_MAX_CTAS = "NCCL_MAX_CTAS"


def divide_sms(num_sms: int) -> None:
    """Give NCCL at most `num_sms` SMs for a collective, and GEMMs those that are left."""
    have = torch.cuda.get_device_properties().multi_processor_count
    if not 0 < num_sms < have:
        raise refuse(f"comm.num_sms: found {num_sms}, allowed with {have} SMs: 0 to {have - 1}")
    exported = os.environ.get(_MAX_CTAS, str(num_sms))
    if exported != str(num_sms):
        logger.warning(
            f"ENV[{_MAX_CTAS}] = {exported} will be overridden to {num_sms} by comm.num_sms"
        )
    os.environ[_MAX_CTAS] = str(num_sms)
    torch._C._set_sm_carveout_experimental(num_sms)
    # cuBLAS, which is preferred by default, does not ask how many SMs it may take.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    logger.info(
        f"cookbook: comm.num_sms={num_sms}: a collective of NCCL takes at most {num_sms} of "
        f"{have} SMs, GEMMs the other {have - num_sms}"
    )


def observe_sms() -> frozenset[str]:
    """What limits NCCL and the GEMMs of this rank; empty where nothing does."""
    found = {_MAX_CTAS: os.environ.get(_MAX_CTAS)}
    found["carveout"] = torch._C._get_sm_carveout_experimental()
    return frozenset(f"{name} {value}" for name, value in found.items() if value is not None)


_init_distributed = torchtitan.distributed.utils.init_distributed


@wraps(_init_distributed)
def _divide_and_init(comm_config: Any, *args: Any, **kwargs: Any) -> int:
    # Without the cookbook's options there is none; `check_job` refuses the job, with the remedy.
    if num_sms := getattr(comm_config, "num_sms", 0):
        divide_sms(num_sms)
    world: int = _init_distributed(comm_config, *args, **kwargs)
    return world


def divide_sms_before_nccl() -> None:
    """Let every later Trainer divide the SMs before it makes its process group."""
    # No door: NCCL reads its variables once, for the first communicator, and the Trainer makes that
    # before it asks the model's spec for anything.
    torchtitan.distributed.utils.init_distributed = _divide_and_init
