"""The tables of docs/numerics/h200.md, made from the results of `bench.gpu_numerics`."""

from __future__ import annotations

from typing import Any

from bench.numerics_cases import PARTS
from cookbook.base.tables import markdown_table

Result = dict[str, Any]


def difference(found: Result, reference: Result) -> tuple[float, int] | None:
    """The largest relative difference of two runs' losses, and its step."""
    pairs = list(zip(found["losses"], reference["losses"], strict=False))
    if not pairs or any(a is None or b is None for a, b in pairs):
        return None
    # A loss that is no number compares as far away, not as equal.
    gaps = [abs(a - b) / abs(b) if a == a and b == b else float("inf") for a, b in pairs]
    largest = max(gaps)
    return largest, gaps.index(largest) + 1


def bound_of(result: Result, by_name: dict[str, Result]) -> float | None:
    """The bound of a cell; for the quantized all-to-all under high-precision weight gradients, the
    whole effect of quantized weight gradients, of whose two operands it rounds one, on top of what
    two runs of one and the same cell differ by.
    """
    if result["backend"] == "mxfp8_a2a" and result["precision"] == "mxfp8_wgrad_hp":
        layout, variant = result["layout"], result["variant"]
        both = [
            by_name.get(f"{p}-standard-{layout}-{variant}") for p in ("mxfp8", "mxfp8_wgrad_hp")
        ]
        if both[0] and both[1] and (found := difference(both[0], both[1])):
            return found[0] + _noise(layout, variant, by_name)
    bound: float | None = result["bound"]
    return bound


def _noise(layout: str, variant: str, by_name: dict[str, Result]) -> float:
    """What a second run of the BF16 cell differs by; the kernels' sums have no fixed order."""
    first = by_name.get(f"bf16-standard-{layout}-{variant}")
    second = by_name.get(f"bf16-standard-{layout}-{variant}-again")
    found = difference(second, first) if first and second else None
    return found[0] if found else 0.0


def verdict(result: Result, by_name: dict[str, Result]) -> str:
    if result["expected_to_fail"] and result["status"] != "not run":
        return "fails, as known" if result["status"] == "failed" else "did not fail"
    if result["status"] != "finished":
        return f"{result['status']}: {result['reason']}"
    if not result["reference"]:
        return "reference"
    reference = by_name.get(result["reference"])
    found = reference and difference(result, reference)
    if not found:
        return "no reference"
    bound = bound_of(result, by_name)
    if bound is None:
        return "shown"
    return "agrees" if found[0] <= bound else "DIFFERS"


def _row(result: Result, by_name: dict[str, Result]) -> list[str]:
    reference = by_name.get(result["reference"])
    found = difference(result, reference) if reference else None
    bound = bound_of(result, by_name) if reference else None
    losses, norms = result["losses"], result["grad_norms"]
    code = "released" if result["released"] else "emulated" if result["emulated"] else ""
    return [
        result["precision"],
        result["backend"],
        result["layout"],
        result["variant"] + (" (again)" if result["name"].endswith("-again") else ""),
        code,
        str(len(losses)),
        f"{losses[-1]:.5f}" if losses and losses[-1] is not None else "",
        f"{norms[0]:.4f}" if norms and norms[0] is not None else "",
        f"{found[0]:.1e} (step {found[1]})" if found else "",
        f"{bound:.0e}" if bound is not None else "",
        verdict(result, by_name),
    ]


_HEAD = [
    "precision", "EP backend", "layout", "variant", "code", "steps", "last loss",
    "first grad norm", "largest relative difference", "bound", "verdict",
]  # fmt: skip
_ALIGN = "lllllrrrrrl"
_SPEED_HEAD = [
    "EP backend", "code", "tokens/s/GPU", "over released DeepEP", "memory (GiB)", "status",
]  # fmt: skip


def render_report(results: list[Result], cpu: bool) -> str:
    """Markdown: versions, one table of numerics, one of throughput where there is one."""
    # Cells end in any order; the table has that of the matrix.
    names = (case.name for part in PARTS.values() for case in part())
    order = {name: number for number, name in enumerate(names)}
    results = sorted(results, key=lambda result: order.get(result["name"], len(order)))
    by_name = {result["name"]: result for result in results}
    lines: list[str] = []
    if cpu:
        lines += ["**Tried out on a CPU with a stand-in for DeepEP: not a result.**", ""]
    active = next((r["active"] for r in results if r.get("active")), None)
    if active:
        versions = ", ".join(f"{name} {found}" for name, found in active["versions"].items())
        lines += [f"{active['gpu'] or active['device']}; {versions}", ""]
    numerics = [result for result in results if result["part"] != "throughput"]
    if numerics:
        lines += [
            markdown_table(_HEAD, [_row(result, by_name) for result in numerics], _ALIGN),
            "",
        ]
    throughput = [result for result in results if result["part"] == "throughput"]
    if throughput:
        released = by_name.get("bf16-deepep-tp2-ep4-recompute-compile-16b-released", {})
        rows = [_speed_row(result, released.get("tokens_per_second")) for result in throughput]
        lines += [markdown_table(_SPEED_HEAD, rows, "llrrrl"), ""]
    return "\n".join(lines)


def _speed_row(result: Result, released: float | None) -> list[str]:
    speed = result.get("tokens_per_second")
    return [
        result["backend"],
        "released" if result["released"] else "corrected",
        f"{speed:,.0f}" if speed else "",
        f"{speed / released:.2f}x" if speed and released else "",
        f"{result['memory_gib']:.1f}" if result.get("memory_gib") else "",
        result["status"] + (f": {result['reason']}" if result["reason"] else ""),
    ]
