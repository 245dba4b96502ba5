"""`plan` as a command: what it hands to the search, and how it ends with what comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cookbook.cli import plan
from cookbook.cli.main import main
from cookbook.config.cell import Cell
from cookbook.plan.search import TOO_LARGE, Candidate, Found
from cookbook.predict.documents import Documents
from tests.test_plan_edges import candidate

EP, TP = (f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor"))
BATCH = "training.local_batch_size"
ONE_NODE = ["plan", "deepseek_v3_16b", "--cluster", "h200-node", "--set", f"{EP}=8"]


class Search:
    """Stands in for the search: notes what it is given, finds what it is told."""

    def __init__(self) -> None:
        self.cells: Sequence[Cell] = ()
        self.documents: Documents | None = None
        self.found = Found()

    def __call__(
        self, cells: Sequence[Cell], documents: Documents, on_progress: Callable[[Found], None]
    ) -> Found:
        self.cells, self.documents = cells, documents
        if not self.found.candidates:
            self.found.candidates = [self.made(100, cells[0]), self.made(90, cells[1])]
        return self.found

    @staticmethod
    def made(speed: float, cell: Cell, **terms: Any) -> Candidate:
        return candidate(speed, 50.0, cell=cell, **terms)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    search = Search()
    monkeypatch.setattr(plan, "search", search)
    return search


def test_what_is_held_and_varied_reaches_the_search(
    search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--vary", f"{TP}=1,2", "--set", f"{BATCH}=2", "--documents", "300:200"]
    assert main([*ONE_NODE, *words, "--precision", "mxfp8", "--ep-backend", "deepep"]) == 0
    assert {cell.pair for cell in search.cells} == {"mxfp8+deepep"}
    # The recipe stands beside what was found, with what is held.
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recipe")]
    assert re.search(r" EP 8 +2 .* mxfp8\+deepep ", row)
    held = {(cell.options[EP], cell.options[BATCH], cell.nodes) for cell in search.cells}
    assert held == {(8, 2, 1)}
    assert {cell.options[TP] for cell in search.cells} == {1, 2}
    named = search.documents
    assert named is not None and (named.mean_tokens, named.median_tokens) == (300, 200)
    # Without words the recipe's own, and other EP backends than its own.
    assert main(ONE_NODE) == 0
    assert len({cell.pair for cell in search.cells}) > 1
    assert search.documents is not None and search.documents != named


def test_a_search_that_was_interrupted_has_not_done_its_work(
    search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    search.found.interrupted = True
    assert main(ONE_NODE) == 1
    # What was found until then is printed.
    assert "tokens/s/GPU" in capsys.readouterr().out


def test_a_walk_goes_to_the_last_layout_and_no_further(
    search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ONE_NODE, "--explain", "1,2"]) == 0
    capsys.readouterr()
    assert main([*ONE_NODE, "--explain", "1,3"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "--explain: found 3, allowed: 0 (the recipe) to 2" in said.err
    # Its EP 32 is more than the node has.
    words = ["plan", "deepseek_v3_16b", "--cluster", "h200-node"]
    assert main([*words, "--explain", "0,1"]) == 2
    assert "the recipe's own layout cannot run here; as 1,2" in capsys.readouterr().err


def test_where_nothing_fits_nothing_is_written(search: Search, tmp_path: Path) -> None:
    search.found.candidates = [candidate(1, 500.0, TOO_LARGE)]
    target = tmp_path / "won.yaml"
    assert main([*ONE_NODE, "-o", str(target)]) == 1
    assert not target.exists()


def test_a_name_that_cannot_be_written_is_told_before_the_search(
    search: Search, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ONE_NODE, "-o", str(tmp_path / "won.txt")]) == 2
    assert "is not the name of a YAML file" in capsys.readouterr().err
    assert search.cells == ()


def test_the_best_may_be_none_but_not_fewer(
    search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ONE_NODE, "--best", "0"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert not [line for line in rows if re.match(r" *1 ", line)]
    assert main([*ONE_NODE, "--best", "-1"]) == 2
    assert capsys.readouterr().err == "submit.py: --best: found -1, allowed: 0 and up\n"


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        (EP, "8,0", "found 0, allowed: 1 and up"),
        ("parallelism.data_parallel_shard_degree", "-1,-2", "found -2, allowed: -1 or 1 and up"),
        (
            "activation_checkpoint.selective_ac_option",
            "2,0",
            "found '0', allowed: op, or n from 1 up to recompute every n-th layer; "
            "set activation_checkpoint.mode=full to recompute every layer",
        ),
    ],
)
def test_values_that_no_job_has_are_refused_before_the_search(
    option: str, values: str, message: str, search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "deepseek_v3_16b", "--cluster", "h200-node"]
    assert main([*words, "--vary", f"{option}={values}"]) == 2
    assert capsys.readouterr().err == f"submit.py: --vary {option}: {message}\n"
    assert search.cells == ()


def test_a_value_that_no_layout_has_is_told_with_its_reason(
    search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    context = "parallelism.context_parallel_degree"
    words = [*ONE_NODE, "--vary", f"{TP}=1,3", "--vary"]
    assert main([*words, f"{context}=1,2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    unknown = "context parallelism: its time is not modelled; set it to 1"
    assert lines == [
        f"left out: {TP}=3: 3 does not divide 8 ranks; try 2",
        f"left out: {context}=2: {unknown}",
    ]
    assert main([*words, f"{context}=1,2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"][1] == f"{context}=2: {unknown}"
    # Where that is all that was asked for, it is the error.
    assert main([*ONE_NODE, "--vary", f"{context}=2"]) == 2
    assert f"no layout that the rules allow; {context}=2: {unknown}" in capsys.readouterr().err
