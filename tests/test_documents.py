"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from tests.cells import walked
from tests.submit import submit

DOCUMENTS = walked(
    [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *sorted(ROOT.glob("docs/**/*.md")),
    ]
)
_PATH = re.compile(
    r"`((?:cookbook|recipes|tests|bench|templates|docs)/[\w./-]+|setup\.sh|requirements\.txt)`"
    # A script that is gone is named with the commit that has it.
    r"(?! \(at [0-9a-f]{7}\))"
)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in _PATH.findall(text):
        assert (ROOT / name).exists(), name
    for name in _LINK.findall(text):
        assert (path.parent / name).exists(), name


def commands() -> list[list[str]]:
    """The `python submit.py` lines of the README, as words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?:^(?:    \$ )?|`)python submit\.py ([^#`\n]+)", text, re.M)
    return walked([line.split() for line in lines])


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_verb_of_the_readme_exists(words: list[str], tmp_path: Path) -> None:
    answer = submit(words[0], "--help", runs=tmp_path)
    assert answer.status == 0
    for option in (word for word in words[1:] if word.startswith("--")):
        if words[0] != "check-line":
            assert option in answer.stdout, option


def test_contributing_lists_every_benchmark_and_no_other() -> None:
    listed = re.findall(r"-m bench\.(\w+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    programs = {path.stem: path.read_text() for path in ROOT.glob("bench/*.py")}
    # What a benchmark gives its ranks to run.
    of_ranks = set(re.findall(r'(?:module ?= ?|\[)"bench\.(\w+)"', "".join(programs.values())))
    started = [name for name, text in programs.items() if "__main__" in text]
    assert sorted(set(listed)) == sorted(set(started) - of_ranks)
