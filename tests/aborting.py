"""Lets a training process abort when its interpreter shuts down.

A stand-in, named by `--experimental.custom_import`, for a thread of PyArrow or gloo that is still
running at the shutdown; those abort only now and then.
"""

import os

import cookbook.titan.tt_0_2_2  # noqa: F401  (what a job imports here)


class _Abort:
    def __del__(self) -> None:
        os.abort()


_kept = _Abort()
