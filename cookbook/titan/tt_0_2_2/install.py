"""What importing the package does to the process; the rest waits for a deepseek_v3 job."""

from __future__ import annotations

import torch

from cookbook.titan.common.leave import leave_when_done
from cookbook.titan.common.orphan import end_with_torchrun
from cookbook.titan.tt_0_2_2.checkpoint_errors import name_checkpoint_causes
from cookbook.titan.tt_0_2_2.cpu import prepare_cpu
from cookbook.titan.tt_0_2_2.spec import register


def install() -> None:
    """Register the changed spec; bind TorchTitan to the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        prepare_cpu()
    register()
    name_checkpoint_causes()
    leave_when_done()
    end_with_torchrun()
