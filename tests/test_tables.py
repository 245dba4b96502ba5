"""Tables for a terminal and in Markdown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cookbook.base.tables import display_width, markdown_table, text_table
from tests.submit import ROOT

RED = "\x1b[31mred\x1b[0m"


def test_columns_are_aligned_and_nothing_trails() -> None:
    rows = [["cell", "steps", "state"], ["671b-mxfp8", "1,500", ""], ["16b", "7", "failed"]]
    assert text_table(rows, align="lr", indent=2) == (
        "  cell        steps  state\n  671b-mxfp8  1,500\n  16b             7  failed"
    )
    assert text_table([["a", "1"], ["b", "10"]], align="rr") == "a   1\nb  10"
    assert text_table([]) == ""


def test_wide_characters_and_colours_take_the_columns_that_they_fill() -> None:
    rows = [["名前", "a"], [RED, "b"], ["e\u0301té", "c"], ["12345", "d"]]
    assert text_table(rows).splitlines() == [
        "名前   a",
        f"{RED}    b",
        "e\u0301té    c",
        "12345  d",
    ]
    assert [display_width(text) for text in ("名前", RED, "e\u0301té", "👩\u200d👧")] == [
        4,
        3,
        3,
        2,
    ]


def test_the_last_column_is_wrapped_between_words_under_itself() -> None:
    rows = [["a", "ok", "one two three four five six seven"], ["bb", "ok", "short"]]
    assert text_table(rows, width=30).splitlines() == [
        "a   ok  one two three four",
        "        five six seven",
        "bb  ok  short",
    ]
    assert len(text_table(rows).splitlines()) == 2
    text = "aa " * 40 + "bb"
    assert max(map(len, text_table([["key", text]], width=50).splitlines())) in (49, 50)


def test_markdown_is_aligned_in_its_source() -> None:
    rows = [["名前", "1,234", "1.50"], ["b", "", "10.0"], ["1e5", "0.50", "007"]]
    assert markdown_table(["cell", "n", "2.0"], rows, "lrr").splitlines() == [
        "| cell |     n |  2.0 |",
        "| ---- | ----: | ---: |",
        "| 名前 | 1,234 | 1.50 |",
        "| b    |       | 10.0 |",
        "| 1e5  |  0.50 |  007 |",
    ]


@pytest.mark.parametrize("flags", [[], ["-I", "-S"]])
def test_plain_tables_need_no_package_and_import_none(flags: list[str]) -> None:
    """-I -S: no site-packages, as where nothing is installed yet."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from cookbook.base.tables import text_table\n"
        "print(text_table([['a', 'b c'], ['\\x1b[2maaa\\x1b[0m', 'c']], width=80))\n"
        "print({'rich'} & set(sys.modules) or 'none')\n"
        "text_table([['é', 'b']])\n"
    )
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a    b c\n\x1b[2maaa\x1b[0m  c\nnone\n"
