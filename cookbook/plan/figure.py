"""The layouts as a picture: memory against speed, and their Pareto front. SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cookbook.base.figure import INK, QUIET, draw_figure
from cookbook.config.cell import Cell
from cookbook.plan.report import degrees
from cookbook.plan.search import Candidate, Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS, _LABELS = 4000, 6
_DOTS, _FRONT, _RECIPE = "#b9c2cb", "#c2500a", "#0a6ebd"


def render_svg(found: Found, base: Cell, recipe: Candidate | None) -> str:
    """Return the picture; layouts that do not fit have no place in it."""
    front, gpu = found.front(), base.cluster.gpu
    names = [
        f"{place}: {one.speed:,.0f}, {degrees(one.cell)}, {one.cell.pair}"
        for place, one in enumerate(front[:_LABELS], 1)
    ]

    def paint(axes: Axes) -> None:
        def draw(some: list[Candidate], marker: str, gid: str, colour: str, size: int) -> None:
            x, y = [one.memory.total for one in some], [one.speed for one in some]
            axes.plot(x, y, marker, color=colour, markersize=size, gid=gid)

        axes.set_title(f"{base.recipe.name}: predicted speed against memory", loc="left")
        axes.set_xlabel("GiB a GPU", color=QUIET)
        axes.set_ylabel("tokens/s/GPU", color=QUIET)
        axes.yaxis.set_major_formatter("{x:,g}")
        # The slow ones are many and lie on one another.
        draw(found.ranked()[:_MOST_POINTS], ".", "layouts", _DOTS, 3)
        draw(front, "o-", "front", _FRONT, 5)
        if recipe is not None and recipe.step:
            draw([recipe], "D", "recipe", _RECIPE, 6)
            names.append("diamond: the recipe as it is")
        if gpu:
            axes.axvline(gpu.memory_gib, color=INK, linestyle=":", gid="card")
            words, box = f"{gpu.memory_gib:g} GiB, the card", {"ha": "right", "va": "bottom"}
            axes.text(gpu.memory_gib, 1, words, box, transform=axes.get_xaxis_transform())
        for place, one in enumerate(front[:_LABELS], 1):
            at = (one.memory.total, one.speed)
            axes.annotate(str(place), at, (-4, 6), textcoords="offset points", weight="bold")
        small = {"fontsize": 9, "linespacing": 1.4}
        axes.text(0.01, 0.02, "\n".join(names), small, transform=axes.transAxes)
        axes.set(xlim=(0, None), ylim=(0, None))

    return draw_figure("plan", 4.6, paint)["svg"].decode()
