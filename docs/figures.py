"""The figures that open the evidence pages, from the data beside them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.fits import memory, step_times
from bench.proofs import convergence
from bench.proofs.gradient_table import BOUNDS, GRADIENTS, rounding_of, worst
from cookbook.base.paths import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, GRID, BAND = "#1b2026", "#5d6670", "#e3e6e9", "#edf0f2"

_BLUE, _ORANGE, _GREY = "#0a6ebd", "#c2500a", "#b9c2cb"
EVIDENCE = ROOT / "docs/evidence"
_KINDS = {"float32": "float32", "mxfp8": "MXFP8, FP8", "bfloat16": "FP8 in BF16"}
_KINDS |= {"fault": "known faults"}


def _draw(name: str, height: float, paint: Callable[[Axes], None]) -> str:
    """Return the figure that `paint` draws as SVG; equal numbers give equal text.

    `name` seeds the SVG's ids. `height` is in inches; the width is 7.6.
    """
    # Import lazily: the driver's tests, which draw nothing, run without Matplotlib.
    import matplotlib
    from matplotlib.figure import Figure

    # Draw `$` as it is: Matplotlib would otherwise read it as the start of a formula.
    style: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=QUIET, length=0)
        axes.grid(color=GRID, axis="x")
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter("{x:,g}")
        paint(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def read_data(path: str) -> Any:
    return json.loads((EVIDENCE / path).read_text(encoding="utf-8"))


def speeds() -> str:
    """Draw each change of the fast options on 4 H200, long documents."""
    runs = read_data("performance/h200x4-bars.json")["rounds"][0]["runs"]
    order = ["released-standard", "released-deepep", "deepep"]
    order += ["fast-attention", "fast-worker", "fast-ep2", "fast-saved", "fast"]
    values = [runs[name]["tokens_per_second_per_gpu"] for name in order]

    def paint(axes: Axes) -> None:
        colours = [_GREY, _GREY, *[_BLUE] * (len(order) - 3), _ORANGE]
        axes.barh(order, values, color=colours, height=0.6)
        for place, value in enumerate(values):
            words = f"{value:,.0f}  {value / values[1]:.2f}x"
            axes.annotate(words, (value, place), (4, 0), textcoords="offset points", va="center")
        axes.set(xlim=(0, 1.2 * max(values)))
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s per GPU", color=QUIET)

    return _draw("speeds", 3.2, paint)


def losses() -> str:
    """Draw each arm's difference from BF16 with its 90% interval and the margin."""
    rows = []
    for measure, share in convergence.MEASURES.items():
        for arm, found in convergence.differences(convergence.read_losses(share)).items():
            mean, half = convergence.mean_and_half_interval(found)
            rows.append((f"{arm}, {measure}", 100 * mean, 100 * half))

    def paint(axes: Axes) -> None:
        margin = 100 * convergence.MARGIN
        axes.axvspan(-margin, margin, color=BAND)
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, (_, middle, half) in enumerate(rows):
            colour = _ORANGE if "float8" in rows[place][0] else _BLUE
            axes.errorbar(middle, place, xerr=half, fmt="o", color=colour, capsize=3)
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("loss minus BF16's, %; grey: the margin of 0.25%", color=QUIET)

    return _draw("losses", 3.2, paint)


def gradients() -> str:
    """Draw the largest gradient error of each cell and each known fault."""
    groups: dict[str, list[float]] = {}
    bounds: list[float | None] = []
    for family, name in (("DeepSeek-V3", "gradients"), ("Qwen3-MoE", "gradients-qwen3")):
        for kind in ("float32", "mxfp8", "bfloat16", "fault"):
            found = [
                worst(run, GRADIENTS)
                for run in read_data(f"numerics/{name}.json")["runs"]
                if run["reference"] and not run.get("scale")
                if run["exact"] or run["precision"] == "float8"
                if kind == ("fault" if run["fault"] else rounding_of(run))
            ]
            if values := [one.error for one in found if one]:
                groups[f"{family}, {_KINDS[kind]}"] = values
                bounds.append(BOUNDS[kind][GRADIENTS] if kind in BOUNDS else None)

    def paint(axes: Axes) -> None:
        for place, (values, bound) in enumerate(zip(groups.values(), bounds, strict=True)):
            colour = _BLUE if bound else _ORANGE
            axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.5)
            if bound:
                axes.plot([bound, bound], [place - 0.3, place + 0.3], color=INK)
        axes.set_xscale("log")
        axes.set_xticks([1e-6, 1e-4, 1e-2, 1, 100], ["1e-6", "1e-4", "1e-2", "1", "100"])
        axes.minorticks_off()
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlabel("largest relative error of a gradient; line: the bound", color=QUIET)

    return _draw("gradients", 2.9, paint)


def predictions() -> str:
    """Draw the error of each predicted step and job."""
    groups: dict[str, list[float]] = {}
    for one in step_times.compare(step_times.read_points()):
        if one.error is not None and not one.point.note and not one.point.fitted:
            groups.setdefault(f"step, {one.point.group}", []).append(100 * one.error)
    jobs = memory.compare(memory.read_measured())
    groups[f"memory, {len(jobs)} jobs"] = [100 * job.error for job in jobs]

    def paint(axes: Axes) -> None:
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, values in enumerate(groups.values()):
            colour = _ORANGE if place == len(groups) - 1 else _BLUE
            axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.4)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlabel("predicted over measured, %", color=QUIET)

    return _draw("predictions", 2.4, paint)


FIGURES: dict[str, Callable[[], str]] = {
    "performance/speeds.svg": speeds,
    "convergence/losses.svg": losses,
    "numerics/gradients.svg": gradients,
    "prediction/errors.svg": predictions,
}
