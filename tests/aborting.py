"""In: a training process. Out: the cookbook's hooks in it, and an abort when it is torn down.

A stand-in, named by `--experimental.custom_import`, for a thread of PyArrow or gloo that is still
at work when the interpreter goes; those abort now and then only.
"""

from __future__ import annotations

import os

import cookbook.titan.stack_2026_02  # noqa: F401  (hooks)


class _Abort:
    def __del__(self) -> None:
        os.abort()


_kept = _Abort()
