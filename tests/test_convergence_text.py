"""The text of the convergence experiment."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench.convergence_text import CHARACTERS, cut, make_text

pytestmark = pytest.mark.bench


def test_the_text_is_in_short_pieces_in_a_mixed_order(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    line = "value = {}  # a line of a program that is long enough to train on\n"
    for number in range(4):
        text = "".join(line.format(number * 10_000 + row) for row in range(5000))
        (sources / f"part{number}.py").write_text(text)
    found = make_text(tmp_path / "one", sources)
    assert make_text(tmp_path / "two", sources) == found
    path = tmp_path / "one/pieces/pieces.jsonl"
    pieces = [json.loads(row)["text"] for row in path.read_text().splitlines()]
    assert max(map(len, pieces)) <= CHARACTERS
    assert sum(map(len, pieces)) == sum(len(one.read_text()) for one in sources.iterdir())
    assert all(piece.endswith("\n") for piece in pieces)
    # Neighbours are of different files as often as chance has it: in three of four cases.
    files = [int(piece.split()[2]) // 10_000 for piece in pieces]
    apart = sum(a != b for a, b in itertools.pairwise(files)) / (len(files) - 1)
    assert apart == pytest.approx(0.75, abs=0.1)
    (sources / "part0.py").write_text((sources / "part1.py").read_text())
    assert make_text(tmp_path / "three", sources) != found


def test_a_line_longer_than_a_piece_is_cut() -> None:
    text = "a" * (2 * CHARACTERS + 10) + "\n" + "b\n"
    pieces = list(cut(text))
    assert [len(piece) for piece in pieces] == [CHARACTERS, CHARACTERS, 13]
    assert "".join(pieces) == text
