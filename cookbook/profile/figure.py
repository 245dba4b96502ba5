"""A profile as a picture: a bar for each rank, divided as its step is. SVG, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from cookbook.profile.kernels import CATEGORIES, COMMUNICATION
from cookbook.profile.profile import Profile
from cookbook.profile.rank import RankProfile
from cookbook.profile.report import HOST, QUEUED

_LEFT, _RIGHT, _TOP = 210, 20, 56
_WIDTH, _BAR, _GAP = 1000, 34, 18
_LEGEND_COLUMNS, _LEGEND_ROW = 3, 20
# Narrower parts have no room for their number.
_NARROWEST = 34
_IDLE = ((HOST, "#e0e0e0"), (QUEUED, "#c2c2c2"))


def render_svg(profile: Profile) -> str:
    """The picture of the ranks that the report shows."""
    shown = profile.shown()
    ranks = [profile.ranks[index] for index, _ in shown]
    parts = [_parts(rank) for rank in ranks]
    titles = {title: colour for bar in parts for title, colour, ms in bar if ms > 0}
    bars = _TOP + len(ranks) * (_BAR + _GAP)
    height = bars + 24 + _LEGEND_ROW * -(-len(titles) // _LEGEND_COLUMNS)
    longest = max(rank.step_ms for rank in ranks) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(profile.source)}: where a step goes</text>',
        f'<text x="10" y="40" fill="#555">milliseconds, of {longest:,.0f} ms</text>',
    ]
    for row, (rank, bar, (_, said)) in enumerate(zip(ranks, parts, shown, strict=True)):
        top = _TOP + row * (_BAR + _GAP)
        name = profile.name(rank) + (f" ({said})" if said else "")
        lines.append(f'<text x="10" y="{top + 21}">{escape(name)}</text>')
        lines += _bar(bar, top, scale)
    for number, (title, colour) in enumerate(titles.items()):
        x = 10 + number % _LEGEND_COLUMNS * (_WIDTH // _LEGEND_COLUMNS)
        y = bars + 14 + number // _LEGEND_COLUMNS * _LEGEND_ROW
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{y}">{escape(title)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _parts(rank: RankProfile) -> list[tuple[str, str, float]]:
    """Title, colour and milliseconds of each part of a bar."""
    parts = [
        (
            category.title + (", exposed" if category.kind == COMMUNICATION else ""),
            category.colour,
            rank.counted.get(category.name, 0.0),
        )
        for category in CATEGORIES
    ]
    idle = (rank.idle_host_ms, rank.idle_queued_ms)
    return parts + [(*one, ms) for one, ms in zip(_IDLE, idle, strict=True)]


def _bar(parts: Sequence[tuple[str, str, float]], top: int, scale: float) -> list[str]:
    lines, x = [], float(_LEFT)
    for title, colour, ms in parts:
        width = ms * scale
        if width <= 0:
            continue
        text = escape(f"{title}: {ms:,.1f} ms")
        lines.append(
            f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{colour}">'
            f"<title>{text}</title></rect>"
        )
        if width >= _NARROWEST:
            middle = x + width / 2
            lines.append(
                f'<text x="{middle:.2f}" y="{top + 21}" text-anchor="middle">{ms:,.0f}</text>'
            )
        x += width
    return lines
