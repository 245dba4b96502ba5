"""Verdicts and tables of the results of `bench.proofs.gradients`."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from cookbook.base.tables import markdown_table

Result = dict[str, Any]

GRADIENTS, CHANGES = "gradients", "changes"
# Faults that end a run, with their error; any other error is the comparison's own.
ENDING = {"expert groups are not padded": "must be divisible by block_size 32"}
# The bound of the comparison of losses: docs/notebook/2026-11/2026-11-22-losses-on-4-h200.md.
BOUND_OF_LOSSES = 1e-4


class Worst(NamedTuple):
    """The largest error of a run, its parameter, and the ratio of norms."""

    error: float
    where: str
    ratio: float


def rounding_of(result: Result) -> str:
    """Return the rounding that makes correct cells differ: of float32, BF16 or MXFP8."""
    if not result["exact"]:
        return "bfloat16"
    if result["precision"] == "bf16" and result["backend"] != "mxfp8_a2a":
        return "float32"
    return "mxfp8"


BOUNDS = {
    "float32": {GRADIENTS: 5e-6, CHANGES: 2e-4},
    "mxfp8": {GRADIENTS: 5e-3, CHANGES: 1e-2},
    # BF16 changes which experts a few tokens take, and so which parameters change.
    "bfloat16": {GRADIENTS: 1e-1},
}

# With rounded scores a few tokens may take another expert than in the reference; one such token
# moves its layer's experts by 0.5% to 3%, above the bound of parameters.
MOST_CHOICES = 7


def bounds_of(result: Result) -> dict[str, float]:
    """Return the largest relative errors with which a cell still agrees."""
    rounding = rounding_of(result)
    if rounding == "mxfp8" and 0 < result.get("choices", 0) <= MOST_CHOICES:
        return {GRADIENTS: BOUNDS[rounding][GRADIENTS]}
    return BOUNDS[rounding]


def worst(result: Result, what: str) -> Worst | None:
    """Return the largest error of the gradients or of the changes of parameters."""
    found = [
        Worst(error, kind.replace("*", str(layer[0])) if layer else kind, ratio)
        for kind, (error, ratio, *layer) in result["errors"].get(what, {}).items()
    ]
    # NaN is worse than any.
    return max(found, key=lambda one: one.error if one.error == one.error else inf, default=None)


def is_seen(result: Result) -> bool:
    """Return whether the run differs from its reference."""
    if result["stopped"]:
        said = ENDING.get(result["fault"])
        return not result["fault"] or (said is not None and said in result["stopped"])
    found = {what: worst(result, what) for what in (GRADIENTS, *result["errors"])}
    # NaN is above every bound.
    return any(
        (one := found[what]) is None or not one.error <= bound
        for what, bound in bounds_of(result).items()
        if what in found
    )


def verdict(result: Result) -> str:
    """Return `agrees`, `DIFFERS`, `reference`, or `stopped` for another reason than the fault."""
    if not result["reference"]:
        return "reference"
    if is_seen(result):
        return "DIFFERS"
    return "stopped" if result["stopped"] else "agrees"


def loss_difference(result: Result, reference: Result) -> float | None:
    """Return the largest relative difference of two runs' losses; None if one lacks steps."""
    pairs = list(zip(result["losses"], reference["losses"], strict=False))
    if result["stopped"] or len(pairs) < len(reference["losses"]):
        return None
    return max(abs(a - b) / abs(b) if a == a else inf for a, b in pairs)


def corrected(runs: Iterable[Result]) -> list[Result]:
    """Return the runs without a fault that have a reference."""
    # The data of commit bbdf732 also has runs with one scaled gradient.
    kept = [run for run in runs if run["reference"] and not run["fault"]]
    return [run for run in kept if not run.get("scale")]


def render(document: dict[str, Any]) -> str:
    """Return the corrected cells, then the faults, as Markdown.

    A run in BF16 is left out if the same run in float32 is there.
    """
    by_name: dict[str, Result] = {run["name"]: run for run in document["runs"]}
    runs = [run for name, run in by_name.items() if run["exact"] or _exact(name) not in by_name]
    agree = markdown_table(
        ["precision", "EP backend", "layout", "variant", "gradients", "parameters", "verdict"],
        [
            [
                *(run[key] for key in ("precision", "backend", "layout", "variant")),
                *(_error(run, what) for what in (GRADIENTS, CHANGES)),
                verdict(run)
                + (f", {run['choices']} chose otherwise" if run.get("choices") else ""),
            ]
            for run in corrected(runs)
        ],
        "llllrrl",
    )
    differ = markdown_table(
        ["fault", "cell", "gradients", "of", "parameters", "verdict", "losses", "by losses"],
        [_fault_row(run, by_name[run["reference"]]) for run in runs if run["fault"]],
        "llrlrlrl",
    )
    return f"{agree}\n\n{differ}\n"


def _exact(name: str) -> str:
    return name.replace("-bfloat16", "")


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
