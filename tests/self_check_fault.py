"""Faults of kernels, how they are put in, and the options of the jobs that they are tried in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch

from tests import titan_run
from tests.titan_run import EP2, TP2

JOB = (*titan_run.JOB, "--training.seq_len=64", "--training.local_batch_size=2")
DEEPEP = (*EP2, "--parallelism.expert_parallel_comm_backend=deepep")
A2A = (*EP2, *titan_run.A2A[:2])
CHUNKS = ("--loss.num_chunks=4",)
ROW_KERNELS = ("--cookbook.row_kernels",)
MXFP8 = (
    "--model.converters=quantize.grouped_mm.mx,quantize.linear.mx",
    "--quantize.grouped_mm.mx.fqns=experts",
    "--quantize.grouped_mm.mx.emulate",
    "--quantize.linear.mx.emulate",
    "--quantize.linear.mx.recipe_name=mxfp8_cublas_rceil",
)
FLOAT8 = (
    "--model.converters=quantize.linear.float8,quantize.grouped_mm.float8",
    "--quantize.linear.float8.filter_fqns=output,router.gate",
    "--quantize.grouped_mm.float8.fqns=experts",
    "--cookbook.row_kernels",
)
WGRAD_HP = (*MXFP8, "--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp")

Wrapper = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A fault, the kernel that has it, and the options of a job that uses that kernel."""

    name: str
    kernel: str
    options: tuple[str, ...]
    target: str
    wrapper: Callable[[Any], Wrapper]
    gpu_only: bool = False

    @property
    def ranks(self) -> int:
        return 2 if set(EP2 + TP2) & set(self.options) else 1

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Have the fault while this lasts."""
        with put_in(self.target, self.wrapper):
            yield


@contextmanager
def put_in(target: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    """Put what `wrapper` makes of `target`, a name of a module or class, in its place."""
    place, _, name = target.rpartition(".")
    owner = resolve_name(place)
    original = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    with patch.object(owner, name, wrapper(original)):
        yield


class _Spoil(torch.autograd.Function):
    """The same values; their gradient is changed."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, change: Any) -> torch.Tensor:
        ctx.change = change
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(grad.clone()), None


def with_argument(place: int | slice, change: Callable[[Any], Any]) -> Any:
    """A kernel that takes the argument at `place` for another."""

    def wrap(original: Any) -> Wrapper:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            changed = list(args)
            changed[place] = change(changed[place])
            return original(*changed, **kwargs)

        return faulty

    return wrap


def with_gradient(place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A kernel whose gradient of the argument at `place` is changed."""
    return with_argument(place, lambda values: _Spoil.apply(values, change))


def with_result(change: Callable[[Any], Any]) -> Any:
    """A kernel whose result is changed."""

    def wrap(original: Any) -> Wrapper:
        return lambda *args, **kwargs: change(original(*args, **kwargs))

    return wrap


def instead(function: Any) -> Any:
    """Another function in the kernel's place."""
    return lambda original: function


def scaled(factor: float, *, at: int, dim: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor of which one place along `dim` is multiplied, where it has that many."""

    def change(values: torch.Tensor) -> torch.Tensor:
        size = values.shape[dim]
        here = torch.arange(size, device=values.device) == (at if at >= 0 else size + at)
        shape = [size if one == dim else 1 for one in range(values.dim())]
        return values * torch.where(here, factor, 1.0).view(shape).to(values.dtype)

    return change


def halves_swapped(values: torch.Tensor) -> torch.Tensor:
    return values.roll(len(values) // 2, 0)


def neighbours(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.roll(1, dim)


def neighbours_scales(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    scale, data = made
    return scale.view(torch.uint8).roll(1, -1).view(scale.dtype), data
