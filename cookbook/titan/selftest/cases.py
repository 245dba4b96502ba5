"""What a kernel's proof is: its errors against a reference in higher precision, beside the bounds.

An error is a norm of differences over a norm of the reference. It is taken of each whole tensor and
of every part of it by itself (each row, each column of a group, ...), so that one lost row of many
is as large as a wrong tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Bound:
    """How large an error may be.

    Attributes:
        whole, part: of a whole tensor, of one part of it.
        least: of a whole tensor whose operands are quantized: with less, nothing quantized them.
    """

    whole: float
    part: float
    least: float = 0.0


# One rounding to BF16 is 0.0017 on average; the others leave room for a few of them.
BF16 = Bound(0.006, 0.012)
# E4M3 has 3 bits of mantissa: a product of two rounded operands is 0.036 off, with a scale for each
# row as with one for each block of 32.
FP8 = Bound(0.048, 0.09, least=0.008)
# One of two factors is rounded to E4M3; a sum over 8 experts has a third of its error.
FP8_ONCE = Bound(0.036, 0.06, least=0.004)


@dataclass(frozen=True)
class Error:
    """Of one tensor of a kernel, output or gradient; infinite where it holds NaN."""

    tensor: str
    whole: float
    part: float
    bound: Bound

    @property
    def share(self) -> float:
        """How much of its bound it takes; above 1 it is too large."""
        return max(self.whole / self.bound.whole, self.part / self.bound.part)

    @property
    def fault(self) -> str | None:
        """What is wrong with the tensor, in words."""
        if self.whole < self.bound.least:
            return (
                f"{self.tensor} is off by {self.whole:.2g}, and its format alone would make "
                f"{self.bound.least:g} or more: nothing was quantized"
            )
        if self.whole > self.bound.whole:
            return f"{self.tensor} is off by {self.whole:.2g}, allowed {self.bound.whole:g}"
        if self.part > self.bound.part:
            return f"a part of {self.tensor} is off by {self.part:.2g}, allowed {self.bound.part:g}"
        return None


@dataclass(frozen=True)
class Use:
    """A kernel that is used, and how it is proved.

    Attributes:
        compare: makes its errors.
        avoid: which option does without it.
        collective: all ranks must run it together.
    """

    kernel: str
    shape: str
    compare: Callable[[], Iterable[Error]]
    avoid: str
    collective: bool = False


@dataclass(frozen=True)
class Proof:
    """One kernel at one shape.

    Attributes:
        kernel: such as `flash_attention_4` or `grouped GEMM mxfp8`.
        errors: of its output and its gradients; empty where it did not run.
        failure: why it did not run to its end.
        avoid: which option does without the kernel.
    """

    kernel: str
    shape: str
    errors: tuple[Error, ...]
    failure: str | None
    avoid: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """Why the kernel is not to be trusted, in one line; None where it is."""
        found = self.failure or next(filter(None, (error.fault for error in self.errors)), None)
        return f"{self.kernel} at {self.shape}: {found}" if found else None

    @property
    def share(self) -> float:
        """The largest part of its bound that one of its errors takes."""
        return max((error.share for error in self.errors), default=math.inf)

    def as_json(self) -> dict[str, Any]:
        """For a file; numbers that JSON does not know are null."""
        content = asdict(self) | {"ok": self.fault is None}
        for error in content["errors"]:
            for name in ("whole", "part"):
                error[name] = error[name] if math.isfinite(error[name]) else None
        return content


def prove(use: Use, device: str) -> Proof:
    """The proof of one kernel; one that raises has failed, and is no reason to stop."""
    began = time.perf_counter()
    errors: tuple[Error, ...] = ()
    failure = None
    try:
        errors = tuple(use.compare())
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    seconds = round(time.perf_counter() - began, 2)
    return Proof(use.kernel, use.shape, errors, failure, use.avoid, seconds)


def error_of(
    tensor: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    bound: Bound,
    parts: Sequence[tuple[int, ...]] = ((0,),),
    floor: float = 1e-8,
    sizes: torch.Tensor | None = None,
) -> Error:
    """The error of a tensor and of the worst of its parts.

    Args:
        parts: each cuts the tensor into parts, by the dimensions that a part has for itself.
        floor: squares of a part below this share of their mean, over the last of its dimensions,
            are measured by that share. A part that is zero in the reference must be zero.
        sizes: what errors are measured by instead of `expected`, where that may cancel to nothing.
    """
    if found.shape != expected.shape:
        raise ValueError(f"{tensor} has the shape {[*found.shape]}, not {[*expected.shape]}")
    wrong = (found.to(expected.dtype) - expected).square_()
    right = (expected if sizes is None else sizes).square()
    total = float(right.sum())
    whole = _ratio(float(wrong.sum()), total)
    part = 0.0
    for cut in parts:
        if not right.numel():
            continue
        others = [dim for dim in range(right.dim()) if dim not in cut]
        squares = [wrong, right]
        if cut == (1,):
            # In a column all rows weigh the same, or a few large ones would decide.
            rows = right.sum(1, keepdim=True).clamp_min(1e-30)
            squares = [wrong / rows, right / rows]
        one, other = (x.sum(others) if others else x for x in squares)
        least = (floor * other.mean(-1, keepdim=True)).clamp_min(1e-30)
        part = max(part, _ratio(float((one / other.maximum(least)).amax()), 1.0))
    return Error(tensor, whole, part, bound)


def _ratio(wrong: float, right: float) -> float:
    """The root of a ratio of squares; infinite for NaN, and where there should be nothing."""
    if math.isnan(wrong) or math.isnan(right):
        return math.inf
    if right == 0:
        return math.inf if wrong else 0.0
    return math.sqrt(wrong / right)
