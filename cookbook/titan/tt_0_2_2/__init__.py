"""The cookbook's part in a training process of stack 2026.02.

TorchTitan imports it, before its Trainer exists, with `--job.custom_config_module` (`.job_config`)
and `--experimental.custom_import` (this package). `spec.py` shows what enters TorchTitan by which
door. Nothing in site-packages is edited, and any other version of TorchTitan is refused.
"""

from __future__ import annotations

from cookbook.titan.tt_0_2_2.versions import check_versions

check_versions()

from cookbook.titan.tt_0_2_2.install import install  # noqa: E402  (TorchTitan's internals, once the version is right)

install()
