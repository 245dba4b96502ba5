"""The cookbook's hooks in a training process of stack 2026.02.

Named by `--experimental.custom_import`, and imported a little before that with `.job_config`: after
`torchtitan.train` has imported everything and before its Trainer exists, so the names replaced here
are bound but not yet used.
Nothing in site-packages is edited, and no other TorchTitan version is touched.
"""

from __future__ import annotations

from cookbook.titan.stack_2026_02.versions import check_versions

check_versions()

from cookbook.titan.stack_2026_02.install import install  # noqa: E402  (TorchTitan's internals, once the version is right)

install()
