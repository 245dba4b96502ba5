"""Bars and sparklines of one line: as wide as asked, whatever the numbers."""

from __future__ import annotations

import pytest

from cookbook.cli.graphs import bar, sparkline


@pytest.mark.parametrize(
    ("fraction", "expected"),
    # A cell may have made more steps than are asked for now.
    [(0.0, "...."), (0.5, "##.."), (1.0, "####"), (1.5, "####"), (-0.5, "....")],
)
def test_a_bar_is_filled_from_the_left_and_never_longer(fraction: float, expected: str) -> None:
    assert bar(fraction, 4, is_unicode=False) == expected


def test_a_sparkline_has_the_newest_speeds_from_zero_to_the_highest() -> None:
    assert sparkline([9.0, 1.0, 0.0, 2.0], 3, is_unicode=False) == "=_#"
    # Half the speed is half the height, however little the others differ.
    assert sparkline([4.0, 8.0, 8.0], 4, is_unicode=True) == " ▅██"
    assert sparkline([0.0, 0.0], 2, is_unicode=False) == "__"
