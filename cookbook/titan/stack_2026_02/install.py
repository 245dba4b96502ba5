"""In: nothing. Out: every hook of this package, put in place once."""

from __future__ import annotations

import torch

from cookbook.titan.any_stack.leave import leave_when_done
from cookbook.titan.stack_2026_02.activity import hook_first_step, note_standard_dispatch
from cookbook.titan.stack_2026_02.checks import hook_checks
from cookbook.titan.stack_2026_02.cpu import prepare_cpu
from cookbook.titan.stack_2026_02.expert_parallel import correct_expert_parallel
from cookbook.titan.stack_2026_02.flavors import add_flavors
from cookbook.titan.stack_2026_02.mx import replace_mx_converters
from cookbook.titan.stack_2026_02.pipeline_loss import correct_pipeline_loss
from cookbook.titan.stack_2026_02.plain_checkpoint import save_plain_weights


def install() -> None:
    if not torch.cuda.is_available():
        prepare_cpu()
    add_flavors()
    hook_checks()
    replace_mx_converters()
    correct_expert_parallel()
    correct_pipeline_loss()
    save_plain_weights()
    note_standard_dispatch()
    hook_first_step()
    leave_when_done()
