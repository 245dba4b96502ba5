"""In: TorchTitan's training process. Out: the same process with the cookbook's hooks in place.

Named by `--experimental.custom_import=cookbook.titan`, and imported a little before that with
`cookbook.titan.job_config`: after `torchtitan.train` has imported everything and before its Trainer
exists, so the names replaced here are bound but not yet used.
Nothing in site-packages is edited, and no other TorchTitan version is touched.
"""

from __future__ import annotations

from cookbook.titan.versions import check_versions

check_versions()

from cookbook.titan.install import install  # noqa: E402  (TorchTitan's internals, once the version is right)

install()
