"""`run` and `sweep`: which cells are checked before they queue, submitted, and waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cookbook.check import check
from cookbook.check.check import Built
from cookbook.cli import run
from cookbook.cli.main import main
from cookbook.config import validate
from cookbook.config.cell import HINT, WARNING, Cell, Finding
from cookbook.launch import submit as executor
from cookbook.run.record import read_record
from cookbook.run.run import Run

SWEEP = ["sweep", "smoke", "--nodes", "1", "--cluster"]
FAILURE = {"error": "no such thing", "rank": 0, "place": "torchtitan/a.py:1", "kind": "ValueError"}
NAMES = [f"debug-{p}-{e}" for p in ("bf16", "mxfp8") for e in ("standard", "deepep")]
# A cell passes where nothing could be tried.
PASSED = Built(unavailable="no torch here")


class Machine:
    """What would build cells, train them and wait; it only notes what it is asked."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.submitted: list[str] = []
        self.waited_for: list[Run] = []
        self.failing: set[str] = set()

    def build(self, cells: Sequence[Cell]) -> list[Built]:
        self.built += [cell.name for cell in cells]
        return [Built(failure=FAILURE) if one.name in self.failing else PASSED for one in cells]

    def submit(self, run: Run, cells: Sequence[Cell], one_allocation: bool) -> list[str]:
        self.submitted += [cell.name for cell in cells if not cell.refused]
        return [str(number) for number, _ in enumerate(self.submitted, 7)]

    def wait(self, run: Run) -> int:
        self.waited_for.append(run)
        return 1


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    monkeypatch.setattr(check, "build_cells", machine.build)
    monkeypatch.setattr(executor, "submit_run", machine.submit)
    monkeypatch.setattr(run, "wait_for", machine.wait)
    monkeypatch.setattr(validate, "missing_here", lambda *_: [])
    return machine


def test_what_builds_is_submitted(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.failing = {NAMES[1]}
    # The status is that of the wait.
    assert main([*SWEEP, "soperator-b200"]) == 1
    said = capsys.readouterr()
    assert machine.built == NAMES
    assert "checking 4 cell(s) before 32 GPUs are asked for (--no-check skips this)" in said.err
    assert machine.submitted == [NAMES[0], *NAMES[2:]]
    (run,) = machine.waited_for
    assert [cell.name for cell in run.cells] == NAMES
    refused = {cell.name: read_record(cell.record).refused for cell in run.cells}
    assert "no such thing" in (refused.pop(NAMES[1]) or "")
    assert set(refused.values()) == {None}


def test_an_unchecked_cell_is_submitted_unless_the_rules_refuse_it(machine: Machine) -> None:
    machine.failing = set(NAMES)
    assert main([*SWEEP, "soperator-b200", "--no-check", "--detach"]) == 0
    assert (machine.built, machine.submitted) == ([], NAMES)
    machine.submitted.clear()
    assert main(["sweep", "smoke", "--cluster", "local", "--no-check", "--detach"]) == 0
    # DeepEP needs GPUs.
    assert machine.submitted == NAMES[::2]


def test_nothing_is_built_for_a_plan_or_for_this_machine(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SWEEP, "soperator-b200", "--dry-run"]) == 0
    assert (machine.submitted, list(tmp_path.iterdir())) == ([], [])
    capsys.readouterr()
    assert main(["sweep", "smoke", "--cluster", "local", "--detach"]) == 0
    said = capsys.readouterr()
    assert (machine.built, machine.submitted) == ([], NAMES[::2])
    assert "checking" not in said.err and "submitted as process 7, 8" in said.out
    # What is emulated is announced.
    (line,) = [one for one in said.out.splitlines() if NAMES[2] in one]
    assert line.endswith("MXFP8 emulated (numerics only)")


def test_where_all_are_refused_nothing_is_made(machine: Machine, tmp_path: Path) -> None:
    machine.failing = set(NAMES)
    assert main([*SWEEP, "soperator-b200"]) == 1
    assert (machine.submitted, machine.waited_for, list(tmp_path.iterdir())) == ([], [], [])


def test_a_warning_of_several_cells_is_said_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding(WARNING, "a", "", "is doubtful"), Finding(HINT, "b", "", "could be faster")]
    monkeypatch.setattr(check, "ADVICE", [lambda cell: found])
    assert main([*SWEEP, "soperator-b200", "--dry-run"]) == 0
    assert capsys.readouterr().err == "warning: is doubtful\n"


def test_one_wrong_cell_fails_a_check(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "smoke", "--nodes", "1", "--cluster", "soperator-b200", "--json"]
    assert main(words) == 0
    assert machine.built == NAMES
    machine.failing = {NAMES[3]}
    assert main(words) == 1
    machine.built.clear()
    assert main([*words, "--rules-only"]) == 0
    assert machine.built == []
