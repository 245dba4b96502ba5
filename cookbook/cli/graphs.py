"""Graphs of one line of text: how far something is, and how fast it was."""

from __future__ import annotations

from collections.abc import Sequence

_SPARKS, _ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


def bar(fraction: float, length: int, is_unicode: bool) -> str:
    """`fraction` of `length` columns filled."""
    full = round(min(1.0, max(0.0, fraction)) * length)
    done, left = ("█", "░") if is_unicode else ("#", ".")
    return done * full + left * (length - full)


def sparkline(speeds: Sequence[float], length: int, is_unicode: bool) -> str:
    """The newest speeds, a column each, from 0 to the highest: a stall is a dip."""
    newest = speeds[-length:]
    levels = _SPARKS if is_unicode else _ASCII_SPARKS
    top = max(newest) or 1.0
    drawn = [levels[round(max(0.0, speed / top) * (len(levels) - 1))] for speed in newest]
    return "".join(drawn).rjust(length)
