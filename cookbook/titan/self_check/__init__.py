"""Test cases for kernels: errors against a reference in higher precision, and their bounds.

An error is the norm of the difference divided by the norm of the reference. It is computed for each
whole tensor and for every part (a row, a group's column, ...), so that a single wrong row shows.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """The largest allowed error of a whole tensor and of each of its parts, such as its rows."""

    whole: float
    part: float
    least: float = 0.0  # smallest plausible error: below it, the operands were not quantized


# Rounding a tensor to BF16 once causes a relative error of about 0.0017. Allow a few roundings.
BF16 = Bound(0.006, 0.012)
# E4M3 has 3 mantissa bits. A GEMM of two quantized tensors has a relative error of about 0.036.
FP8 = Bound(0.048, 0.09, least=0.008)
# Bounds for values that are rounded to E4M3 once, and for sums of such values. In a sum, rounding
# errors partly cancel, so `least`, the smallest plausible error, is low.
FP8_ONCE = Bound(0.036, 0.06, least=0.004)


@dataclass(frozen=True)
class Error:
    """The errors of one output or gradient of a kernel; infinite if the tensor holds NaN."""

    tensor: str
    whole: float
    part: float
    bound: Bound

    @property
    def share(self) -> float:
        """The larger of two ratios of error to bound: the whole tensor's and the worst part's."""
        return max(self.whole / self.bound.whole, self.part / self.bound.part)

    @property
    def fault(self) -> str | None:
        """Why the tensor is wrong; None if its errors are within their bounds."""
        bound, off = self.bound, f"{self.tensor} is off by {self.whole:.2g}"
        if self.whole < bound.least:
            return f"{off}, its format alone causes {bound.least:g}: nothing was quantized"
        if self.whole > bound.whole:
            return f"{off}, allowed {bound.whole:g}"
        if self.part > bound.part:
            return f"a part of {self.tensor} is off by {self.part:.2g}, allowed {bound.part:g}"
        return None


class KernelCase(NamedTuple):
    """A kernel that a cell uses, at one shape."""

    kernel: str  # such as `grouped GEMM mxfp8`
    shape: str
    run: Callable[[], Iterable[Error]]  # compares output and gradients with a reference
    avoid: str  # advice on how to train without the kernel
    collective: bool = False  # whether all ranks must run the case together


@dataclass(frozen=True)
class CaseResult:
    """The errors of one case; empty if the case failed to run, with the reason in `failure`."""

    kernel: str
    shape: str
    errors: tuple[Error, ...]
    failure: str | None
    avoid: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """Why the kernel failed its case, in one line; None if it passed."""
        found = self.failure or next(filter(None, (error.fault for error in self.errors)), None)
        return f"{self.kernel} at {self.shape}: {found}" if found else None

    @property
    def share(self) -> float:
        """The largest ratio of an error to its bound; infinite if nothing could be compared."""
        return max((error.share for error in self.errors), default=math.inf)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON types; NaN and infinity become null."""
        content = asdict(self) | {"ok": self.fault is None}
        for error in content["errors"]:
            for name in ("whole", "part"):
                error[name] = error[name] if math.isfinite(error[name]) else None
        return content


def run_case(case: KernelCase, device: str) -> CaseResult:
    """Run one case; an exception in the kernel fails this case only."""
    began, failure = time.perf_counter(), None
    errors: tuple[Error, ...] = ()
    try:
        errors = tuple(case.run())
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    seconds = round(time.perf_counter() - began, 2)
    return CaseResult(case.kernel, case.shape, errors, failure, case.avoid, seconds)


def error_of(
    tensor: str,
    found: Tensor,
    expected: Tensor,
    bound: Bound,
    parts: Sequence[tuple[int, ...]] = ((0,),),
    floor: float = 1e-8,
    sizes: Tensor | None = None,
) -> Error:
    """Return the relative errors of a whole tensor and of its worst part.

    Each tuple in `parts` names the dimensions to cut along: (0,) cuts a matrix into rows, (0, 1) a
    stack of matrices into their rows.

    The norm of `found - expected` is divided by the norm of `expected` or, if given, of `sizes`.
    Pass the elements' usual magnitudes as `sizes` if each is a sum of terms that nearly cancel.

    A part with a tiny norm would have a huge error. So every part is divided by at least
    sqrt(`floor`) times the root mean square of all parts' norms (in a stack: of the same matrix).
    """
    if found.shape != expected.shape:
        raise ValueError(f"{tensor} has the shape {[*found.shape]}, not {[*expected.shape]}")
    wrong = (found.to(expected.dtype) - expected).square_()
    right = (expected if sizes is None else sizes).square()
    whole, part = worst_ratio(wrong.sum() / right.sum().clamp_min(1e-30)), 0.0
    for cut in parts if right.numel() else ():
        others = [dim for dim in range(right.dim()) if dim not in cut]
        squares = [wrong, right]
        if cut == (1,):
            # Normalize the rows: otherwise a few large ones would dominate a column's error.
            rows = right.sum(1, keepdim=True).clamp_min(1e-30)
            squares = [wrong / rows, right / rows]
        one, other = (x.sum(others) if others else x for x in squares)
        least = (floor * other.mean(-1, keepdim=True)).clamp_min(1e-30)
        part = max(part, worst_ratio(one / other.maximum(least)))
    return Error(tensor, whole, part, bound)


def worst_ratio(squares: Tensor) -> float:
    """Return the largest error ratio, given the squared ratios; infinite if any is NaN."""
    worst = float(squares.amax().sqrt())
    return math.inf if math.isnan(worst) else worst


def with_gradients(
    function: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """Return `function(*leaves)` and the leaves' gradients; `grad` is the result's gradient."""
    out = function(*(leaf.requires_grad_() for leaf in leaves))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def run_both(
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    grad: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Run kernel and reference; return (found, expected) of the result and of each leaf's gradient.

    `grad` is the gradient of the result. The reference runs in float32.
    """
    found = with_gradients(kernel, leaves, grad)
    exact = with_gradients(reference, [leaf.detach().float() for leaf in leaves], grad.float())
    return list(zip(found, exact, strict=True))


# --- Inputs that make faults visible: uneven sizes and groups, empty experts. They have their own
# random generators, so that the check does not change the random numbers of the training.


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_rows(rows: int, columns: int, device: str, seed: int) -> Tensor:
    """Return a BF16 tensor (rows, columns), drawn from the standard normal distribution."""
    return torch.randn(rows, columns, device=device, generator=generator(device, seed)).bfloat16()


def uneven_values(rows: int, columns: int, device: str, seed: int) -> Tensor:
    """Return a random BF16 tensor (rows, columns), scaled by powers of two per row and block.

    A block is 32 columns. A kernel that uses another row's or block's scale has a large error.
    """
    random = generator(device, seed)
    values = torch.randn(rows, columns, device=device, generator=random)
    by_row = torch.randint(-3, 4, (rows, 1), device=device, generator=random)
    by_block = torch.randint(-1, 2, (1, -(-columns // 32)), device=device, generator=random)
    sizes = by_row + by_block.repeat_interleave(32, dim=1)[:, :columns]
    return (values * torch.exp2(sizes.float())).bfloat16()


def uneven_counts(experts: int, rows: int) -> list[int]:
    """Return the number of rows per expert, about `rows` in all.

    Some experts have no row, one row, or one row more than a tile. The last expert has rows, so
    that a kernel that stops early is noticed.
    """
    unusual = (0, 1, 31, 33, 129, 7)[:experts]
    counts = [max(1, rows // experts)] * experts
    for place, count in enumerate(unusual):
        counts[place * experts // len(unusual)] = count
    counts[-1] = min(127, max(3, rows // experts - 1))
    if experts > 2:
        counts[1] += max(0, rows - sum(counts))
    return counts


def random_routing(
    tokens: int, experts: int, top_k: int, device: str, seed: int
) -> tuple[Tensor, Tensor]:
    """Return each token's experts and scores, both (tokens, top k).

    Expert 0 is overloaded; experts 1 and `experts - 2` get no tokens, if enough others remain.
    Scores are uniform in [0.25, 1), so a lost copy of a token always shows.
    """
    random = generator(device, seed)
    preference = torch.rand(tokens, experts, device=device, generator=random)
    preference[:, 0] += 0.3
    if experts >= top_k + 2:
        preference[:, [1, experts - 2]] = -1
    scores = 0.25 + 0.75 * torch.rand(tokens, top_k, device=device, generator=random)
    return preference.topk(top_k, dim=1).indices, scores
