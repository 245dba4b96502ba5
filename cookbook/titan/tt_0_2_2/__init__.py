"""The cookbook's part in a training process of stack 2026.02.

TorchTitan imports it, before its Trainer exists, with `--job.custom_config_module` (`.job_config`)
and `--experimental.custom_import` (this package). `spec.py` lists each part and the door by which
it enters TorchTitan. Nothing in site-packages is edited; other versions of TorchTitan are refused.
"""

# ruff: noqa: E402  (TorchTitan's internals are imported once the version is known to be right)
from __future__ import annotations

from cookbook.titan.tt_0_2_2.versions import check_versions

check_versions()

import torch

from cookbook.titan.common.process import die_with_parent, exit_without_teardown
from cookbook.titan.tt_0_2_2.cpu import prepare_cpu
from cookbook.titan.tt_0_2_2.spec import register

if not torch.cuda.is_available():
    prepare_cpu()
register()
exit_without_teardown()
die_with_parent()
