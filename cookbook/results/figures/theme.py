"""The colours of the figures and the page, light and dark, and the CSS that changes between them.

A figure is drawn once, in the light colours. Its own style sheet gives each of them its dark
counterpart, so that one SVG fits both themes, in the page and by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """One colour as it is on a light and on a dark ground."""

    light: str
    dark: str


GROUND = Colour("#ffffff", "#14181d")
INK = Colour("#1b2026", "#e8ebee")
# Text of second rank; 5:1 against the ground in both themes.
QUIET = Colour("#5d6670", "#a3adb8")
GRID = Colour("#e3e6e9", "#2b323a")
BAND = Colour("#edf0f2", "#20262d")
ALARM = Colour("#b3261e", "#ff8a80")

# The map of the router's load; the more opaque, the more tokens. Legible on both grounds.
MAP = "#1f86d6"

# One for each cell in the run's order. They differ in lightness as well as in hue, after Okabe and
# Ito, so that readers who do not see red and green apart can tell them; at least 3:1 on the ground.
CELLS = (
    Colour("#4a525a", "#b9c2cb"),
    Colour("#0a6ebd", "#5fb4f0"),
    Colour("#c2500a", "#ff9d5c"),
    Colour("#00836a", "#35cfa6"),
    Colour("#9b4a8c", "#e59bd3"),
    Colour("#8a6a00", "#e0bb45"),
    Colour("#5658c4", "#a9abff"),
    Colour("#96304c", "#f08ba5"),
)
# Cells beyond those take a colour again, with another dash.
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
ALL = (GROUND, INK, QUIET, GRID, BAND, ALARM, *CELLS)


def colour_of(position: int) -> Colour:
    """The colour of the cell at that position in the run."""
    return CELLS[position % len(CELLS)]


def dash_of(position: int) -> object:
    """The dash of its lines, as Matplotlib takes it."""
    return DASHES[position // len(CELLS) % len(DASHES)]


def dark_rules(root: str = "") -> str:
    """The CSS by which a figure below `root` (a selector) is dark where the reader prefers that.

    Paper stays light. An inline style loses against `!important` alone.
    """
    rules = "".join(
        f'{root}[style*="{part}: {colour.light}"]{{{part}:{colour.dark}!important}}'
        for colour in ALL
        for part in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"
