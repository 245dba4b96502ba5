"""Tables for a terminal and in Markdown."""

from __future__ import annotations

from cookbook.base.tables import markdown_table, text_table


def test_columns_are_aligned_and_nothing_trails() -> None:
    rows = [["cell", "steps", "state"], ["671b-mxfp8", "1,500", ""], ["16b", "7", "failed"]]
    assert text_table(rows, align="lr", indent=2) == (
        "  cell        steps  state\n  671b-mxfp8  1,500\n  16b             7  failed"
    )
    assert text_table([["a", "1"], ["b", "10"]], align="rr") == "a   1\nb  10"
    assert text_table([]) == ""


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
    rows = [["name", "1,234", "1.50"], ["b", "", "10.0"], ["1e5", "0.50", "007"]]
    assert markdown_table(["cell", "n", "2.0"], rows, "lrr").splitlines() == [
        "| cell |     n |  2.0 |",
        "| ---- | ----: | ---: |",
        "| name | 1,234 | 1.50 |",
        "| b    |       | 10.0 |",
        "| 1e5  |  0.50 |  007 |",
    ]
