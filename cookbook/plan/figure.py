"""The layouts as a picture: memory against speed, and the front of those that none beats. SVG."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from cookbook.config.cell import Cell
from cookbook.plan.describe import degrees
from cookbook.plan.search import Candidate, Found

_WIDTH, _HEIGHT = 1000, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 50, 50
_MOST_POINTS, _LABELS = 4000, 6
_LEGEND = 'text-anchor="end" stroke="white" stroke-width="4" paint-order="stroke"'
_GREY, _FRONT, _RECIPE = "#b8c4d0", "#d1495b", "#00798c"


def render_svg(found: Found, base: Cell, recipe: Candidate | None) -> str:
    """The picture; layouts that do not fit have no place in it."""
    ranked = found.ranked()
    shown = [*ranked, *([recipe] if recipe else [])]
    speeds = [_speed(one) for one in shown]
    sizes = [one.memory.total for one in shown]
    gpu = base.cluster.gpu
    most_gib = max([*sizes, gpu.memory_gib if gpu else 0.0]) * 1.02
    most_speed = max([*speeds, 1.0]) * 1.08

    def at(one: Candidate) -> tuple[float, float]:
        x = _LEFT + one.memory.total / most_gib * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - _speed(one) / most_speed * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(base.recipe.name)}: '
        "predicted speed against memory</text>",
        *_axes(most_gib, most_speed),
    ]
    # The slow ones are many and lie on one another.
    for one in ranked[:_MOST_POINTS]:
        x, y = at(one)
        lines.append(f'<circle cx="{x}" cy="{y}" r="2" fill="{_GREY}"/>')
    front = found.front()
    path = " ".join(f"{x},{y}" for x, y in map(at, front))
    lines.append(f'<polyline points="{path}" fill="none" stroke="{_FRONT}" stroke-width="1.5"/>')
    for place, one in enumerate(front, 1):
        x, y = at(one)
        lines.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{_FRONT}"/>')
        if place <= _LABELS:
            lines.append(f'<text x="{x - 4}" y="{y - 8}" font-weight="bold">{place}</text>')
            words = f"{place}: {_speed(one):,.0f}, {degrees(one.cell)}, {one.cell.pair}"
            row = _HEIGHT - _BOTTOM - 20 * (_LABELS + 1 - place)
            lines.append(f'<text x="{_WIDTH - _RIGHT}" y="{row}" {_LEGEND}>{escape(words)}</text>')
    if recipe is not None:
        x, y = at(recipe)
        lines.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{_RECIPE}"/>')
        lines.append(f'<text x="{x - 8}" y="{y + 16}" text-anchor="end">the recipe as it is</text>')
    return "\n".join([*lines, "</svg>", ""])


def _axes(most_gib: float, most_speed: float) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#555"/>'
    for part in range(5):
        x = _LEFT + part / 4 * (right - _LEFT)
        y = bottom - part / 4 * (bottom - _TOP)
        gib, speed = f"{most_gib * part / 4:.0f}", f"{most_speed * part / 4:,.0f}"
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{gib}</text>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{speed}</text>'
    yield f'<text x="{right}" y="{bottom + 38}" text-anchor="end">GiB a GPU</text>'
    yield f'<text x="10" y="{_TOP - 10}">tokens/s/GPU</text>'


def _speed(one: Candidate) -> float:
    return one.step.tokens_per_second_per_gpu if one.step else 0.0
