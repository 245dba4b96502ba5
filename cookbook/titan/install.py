"""In: nothing. Out: every hook of this package, put in place once."""

from __future__ import annotations

import torch

from cookbook.titan.activity import hook_first_step, note_standard_dispatch
from cookbook.titan.checks import hook_checks
from cookbook.titan.cpu import prepare_cpu
from cookbook.titan.expert_parallel import correct_expert_parallel
from cookbook.titan.flavors import add_flavors
from cookbook.titan.leave import leave_when_done
from cookbook.titan.mx import replace_mx_converters
from cookbook.titan.pipeline_loss import correct_pipeline_loss
from cookbook.titan.plain_checkpoint import save_plain_weights


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
