"""Names of files: which may be given, how one is found, and how a record names it for later."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cookbook.base.errors import InputError
from cookbook.base.paths import RECIPES, ROOT
from cookbook.config.recipe import check_name, find_file, reference, word_of


@pytest.mark.parametrize("name", ["", "a" * 61, "-a", ".a", "a b", "a/b", "a\n", "ä"])
def test_a_name_that_cells_cannot_have(name: str) -> None:
    with pytest.raises(
        InputError, match=r"^here: found .*, allowed: letters, digits, .* at most 60"
    ):
        check_name("here", name)


def test_a_reference_finds_the_same_file_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = RECIPES / "precision" / "mxfp8.yaml"
    monkeypatch.chdir(tmp_path)
    # One's own file, with the name of one that the cookbook has.
    own = Path("mxfp8.yaml")
    own.touch()
    names = [reference("precision", path) for path in (known, own)]
    assert names == ["mxfp8", str(tmp_path / "mxfp8.yaml")]
    monkeypatch.chdir(ROOT)
    assert [find_file("precision", name) for name in names] == [known, tmp_path / "mxfp8.yaml"]
    # A precision is no recipe.
    assert reference("", known) == str(known)


TEXT = st.text("ab+-_/ .ä", min_size=1, max_size=3)
VALUES = (
    TEXT,
    st.lists(TEXT, max_size=3),
    st.lists(st.lists(TEXT, min_size=1, max_size=2), max_size=3),
    st.lists(st.sampled_from(["layers.1", "layers.10", "norm"]), max_size=30),
)


@given(st.one_of(*(st.tuples(values, values) for values in VALUES)))
@example((["a+b"], ["a", "b"]))
@example(([["a"], ["b"]], [["a", "b"]]))
@example((["layers.1"] * 20, ["layers.1"] * 21))
def test_two_values_have_two_words_that_files_and_jobs_may_have(pair: tuple[Any, Any]) -> None:
    one, other = pair
    for value in pair:
        assert re.fullmatch(r"[A-Za-z0-9_.+]{0,49}", word_of(value)), value
    assert (word_of(one) == word_of(other)) is (json.dumps(one) == json.dumps(other))
