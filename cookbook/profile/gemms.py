"""FLOPs of a GEMM, from the shapes that the profiler recorded of its operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Where the two matrices stand among an operation's inputs.
_MATRICES = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::_grouped_mm": 0,
    "aten::_scaled_grouped_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
_BITS = {"BFloat16": 16, "Half": 16, "float": 32, "Float": 32, "double": 64}


@dataclass(frozen=True)
class Gemm:
    """Floating-point operations of one call, and the bits of an element of its inputs."""

    flops: float
    bits: int


def is_gemm(operation: str) -> bool:
    """Whether FLOPs can be told from the shapes of `operation`."""
    return operation in _MATRICES


def gemm_of(operation: str, arguments: Mapping[str, Any]) -> Gemm | None:
    """The work of a GEMM's operation; None where its shapes were not recorded.

    Args:
        arguments: the event's, with `Input Dims` and `Input type` as PyTorch writes them. A grouped
            GEMM's rows include the padding of its groups: that is what the kernel multiplies.
    """
    first = _MATRICES[operation]
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or len(dims) < first + 2:
        return None
    left, right = dims[first], dims[first + 1]
    if not (_is_shape(left) and _is_shape(right)):
        return None
    kind = str(types[first]).removeprefix("c10::") if isinstance(types, list) else ""
    bits = 8 if kind.startswith("Float8") else _BITS.get(kind, 0)
    if operation in ("aten::bmm", "aten::baddbmm"):
        return Gemm(2.0 * math.prod(left) * right[-1], bits)
    # (M, K) x (K, N); grouped: (M, K) x (groups, K, N), and for weight gradients (M, K) x (K, N),
    # where the groups share K out. (groups, M, K) x (K, N) shares N out.
    return Gemm(2.0 * left[-2] * left[-1] * right[-1], bits)


def _is_shape(dims: Any) -> bool:
    return (
        isinstance(dims, Sequence)
        and len(dims) in (2, 3)
        and all(isinstance(size, int) and size >= 0 for size in dims)
    )
