"""Verdicts, tables and sentences from the results of `bench.gradients`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from cookbook.base.tables import markdown_table

Result = dict[str, Any]

GRADIENTS, CHANGES = "gradients", "changes"
# The faults that end a run, and what they say then. Where a run with a fault ends otherwise, the
# comparison itself is at fault.
ENDING = {"expert groups are not padded": "must be divisible by block_size 32"}
# What the comparison of losses allowed: docs/numerics/h200.md.
BOUND_OF_LOSSES = 1e-4


class Worst(NamedTuple):
    """The largest error of a run: in which parameter, and how its norm is to what is expected."""

    error: float
    where: str
    ratio: float


def rounding_of(result: Result) -> str:
    """What makes two right cells differ: float32's sums, BF16, or the blocks that MXFP8 rounds."""
    if not result["exact"]:
        return "bfloat16"
    if result["precision"] == "bf16" and result["backend"] != "mxfp8_a2a":
        return "float32"
    return "mxfp8"


BOUNDS = {
    "float32": {GRADIENTS: 5e-6, CHANGES: 2e-4},
    "mxfp8": {GRADIENTS: 5e-3, CHANGES: 1e-2},
    # BF16 changes the choice of a few experts, and with it what moves.
    "bfloat16": {GRADIENTS: 1e-1},
}


# The bound of parameters holds where every token takes the experts that it takes in the reference.
# With rounded scores a few may not, and one such token moves its layer's experts by 0.5% to 3%.
MOST_CHOICES = 7


def bounds_of(result: Result) -> dict[str, float]:
    """The largest relative errors at which a cell still agrees."""
    rounding = rounding_of(result)
    if rounding == "mxfp8" and 0 < result.get("choices", 0) <= MOST_CHOICES:
        return {GRADIENTS: BOUNDS[rounding][GRADIENTS]}
    return BOUNDS[rounding]


def worst(result: Result, what: str) -> Worst | None:
    """Of the gradients of the first step, or of the changes of the parameters."""
    found = [
        Worst(error, kind.replace("*", str(layer[0])) if layer else kind, ratio)
        for kind, (error, ratio, *layer) in result["errors"].get(what, {}).items()
    ]
    # What is no number is worse than any.
    return max(found, key=lambda one: one.error if one.error == one.error else inf, default=None)


def is_seen(result: Result) -> bool:
    """Whether the comparison says that the run differs from its reference."""
    if result["stopped"]:
        said = ENDING.get(result["fault"])
        return not result["fault"] or (said is not None and said in result["stopped"])
    # A run of one step has no changes.
    found = {what: worst(result, what) for what in (GRADIENTS, *result["errors"])}
    # An error that is no number is above every bound.
    return any(
        (one := found[what]) is None or not one.error <= bound
        for what, bound in bounds_of(result).items()
        if what in found
    )


def verdict(result: Result) -> str:
    """`agrees`, `DIFFERS`, `reference`, or `stopped` where that says nothing of the fault."""
    if not result["reference"]:
        return "reference"
    if is_seen(result):
        return "DIFFERS"
    return "stopped" if result["stopped"] else "agrees"


def loss_difference(result: Result, reference: Result) -> float | None:
    """The largest relative difference of two runs' losses; None where one has not all steps."""
    pairs = list(zip(result["losses"], reference["losses"], strict=False))
    if result["stopped"] or len(pairs) < len(reference["losses"]):
        return None
    return max(abs(a - b) / abs(b) if a == a else inf for a, b in pairs)


def corrected(runs: Iterable[Result]) -> list[Result]:
    """The runs without a fault that are compared with a reference."""
    return [run for run in runs if run["reference"] and not run["fault"] and not run["scale"]]


def faulty(runs: Iterable[Result]) -> list[Result]:
    """The runs with a known fault."""
    return [run for run in runs if run["fault"]]


def smallest_seen(runs: Iterable[Result]) -> tuple[float, float]:
    """By how much a gradient was scaled: the most that was not seen, and the least that was."""
    tried = {run["scale"][1] - 1: is_seen(run) for run in runs if run["scale"]}
    return (
        max(eps for eps, seen in tried.items() if not seen),
        min(eps for eps, seen in tried.items() if seen),
    )


def render(document: dict[str, Any]) -> str:
    """Markdown: the corrected cells, then the faults."""
    runs: list[Result] = document["runs"]
    by_name = {run["name"]: run for run in runs}
    agree = markdown_table(
        ["precision", "EP backend", "layout", "variant", "gradients", "parameters", "verdict"],
        [
            [
                *(run[key] for key in ("precision", "backend", "layout", "variant")),
                *(_error(run, what) for what in (GRADIENTS, CHANGES)),
                _verdict(run),
            ]
            for run in corrected(runs)
            if run["exact"]
        ],
        "llllrrl",
    )
    differ = markdown_table(
        ["fault", "cell", "gradients", "of", "parameters", "verdict", "losses", "by losses"],
        [_fault_row(run, by_name[run["reference"]]) for run in faulty(runs) if run["exact"]],
        "llrlrlrl",
    )
    return f"{agree}\n\n{differ}\n"


def _verdict(run: Result) -> str:
    """With the tokens that took another expert, where some did."""
    number = run.get("choices", 0)
    return f"{verdict(run)}, {number} chose otherwise" if number else verdict(run)


def _error(run: Result, what: str) -> str:
    found = worst(run, what)
    return f"{found.error:.1e}" if found else ""


def _fault_row(run: Result, reference: Result) -> Sequence[str]:
    found, apart = worst(run, GRADIENTS), loss_difference(run, reference)
    return [
        run["fault"],
        f"{run['precision']} {run['backend']} {run['layout']}",
        _error(run, GRADIENTS),
        _where(found) if found else "stops",
        _error(run, CHANGES),
        verdict(run),
        f"{apart:.1e}" if apart is not None else "",
        "stops" if apart is None else "DIFFERS" if apart > BOUND_OF_LOSSES else "agrees",
    ]


def _where(found: Worst) -> str:
    name = f"`{found.where.removesuffix('.weight')}`"
    is_larger = abs(found.ratio - 1) > 0.01
    return f"{name}, {found.ratio:.3g} times as large" if is_larger else name
