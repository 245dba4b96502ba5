"""The layouts as a picture: memory against speed, and their Pareto front. SVG."""

from __future__ import annotations

import io
from typing import Any

from cookbook.config.cell import Cell
from cookbook.plan.report import degrees
from cookbook.plan.search import Candidate, Found
from cookbook.results.charts import COLOURS

_MOST_POINTS, _LABELS = 4000, 6
_INK, _QUIET, _GRID = "#1b2026", "#5d6670", "#e3e6e9"
_DOTS, _FRONT, _RECIPE = "#b9c2cb", COLOURS[2][0], COLOURS[1][0]


def render_svg(found: Found, base: Cell, recipe: Candidate | None) -> str:
    """Return the picture; layouts that do not fit have no place in it.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    front, gpu = found.front(), base.cluster.gpu
    style: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "plan"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(f"{base.recipe.name}: predicted speed against memory", loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=_QUIET, length=0)
        axes.grid(color=_GRID)
        axes.set_axisbelow(True)
        axes.set_xlabel("GiB a GPU", color=_QUIET)
        axes.set_ylabel("tokens/s/GPU", color=_QUIET)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,g}")

        def draw(some: list[Candidate], marker: str, gid: str, colour: str, size: int) -> None:
            """Draw the layouts at (memory, speed)."""
            x, y = [one.memory.total for one in some], [one.speed for one in some]
            axes.plot(x, y, marker, color=colour, markersize=size, gid=gid)

        # The slow ones are many and lie on one another.
        draw(found.ranked()[:_MOST_POINTS], ".", "layouts", _DOTS, 3)
        draw(front, "o-", "front", _FRONT, 5)
        if recipe is not None and recipe.step:
            draw([recipe], "D", "recipe", _RECIPE, 6)
        if gpu:
            axes.axvline(gpu.memory_gib, color=_INK, linestyle=":", gid="card")
            words, box = f"{gpu.memory_gib:g} GiB, the card", {"ha": "right", "va": "bottom"}
            axes.text(gpu.memory_gib, 1, words, box, transform=axes.get_xaxis_transform())
        axes.set(xlim=(0, None), ylim=(0, None))
        names = [
            f"{place}: {one.speed:,.0f}, {degrees(one.cell)}, {one.cell.pair}"
            for place, one in enumerate(front[:_LABELS], 1)
        ]
        for place, one in enumerate(front[:_LABELS], 1):
            at = (one.memory.total, one.speed)
            axes.annotate(str(place), at, (-4, 6), textcoords="offset points", weight="bold")
        if recipe is not None and recipe.step:
            names.append("diamond: the recipe as it is")
        small = {"fontsize": 9, "linespacing": 1.4}
        axes.text(0.01, 0.02, "\n".join(names), small, transform=axes.transAxes)
        file = io.BytesIO()
        # Without a date the same numbers make the same file.
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().decode()
