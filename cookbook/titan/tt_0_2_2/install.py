"""What importing the package does to the process; the rest waits for a deepseek_v3 job."""

from __future__ import annotations

import torch

from cookbook.titan.common.orphan import die_with_parent
from cookbook.titan.common.process import exit_without_teardown
from cookbook.titan.tt_0_2_2.checkpoint_errors import name_checkpoint_causes
from cookbook.titan.tt_0_2_2.cpu import prepare_cpu
from cookbook.titan.tt_0_2_2.spec import register


def install() -> None:
    """Register the changed spec; bind TorchTitan to the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        prepare_cpu()
    register()
    name_checkpoint_causes()
    exit_without_teardown()
    die_with_parent()
