"""The list of faults can be put in, and the runner tells found from not found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from tests import mutants
from tests.mutants import Checkout, Mutant, is_found, read_list

LISTED = read_list()


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant.what)
def test_a_listed_fault_can_be_put_in(mutant: Mutant) -> None:
    """Whoever changes the code that a fault is in changes the list too."""
    assert mutant.problem() is None
    for word in mutant.tests.partition(" -k ")[0].split():
        file, *names = word.partition("[")[0].split("::")
        assert (ROOT / file).is_file(), word
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in text or f"class {name}:" in text for name in names), word


def test_no_fault_is_listed_twice() -> None:
    assert len({(one.file, one.was, one.now) for one in LISTED}) == len(LISTED)
    assert len({one.what for one in LISTED}) == len(LISTED)
    assert any(one.ci for one in LISTED)


def _computing() -> list[str]:
    """Every module of the cookbook that defines a function, and set-up."""
    modules = []
    for path in sorted((ROOT / "cookbook").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes):
            modules.append(str(path.relative_to(ROOT)))
    return [*modules, "setup.sh"]


def test_every_module_has_a_fault() -> None:
    """What computes, decides or reports has a fault in the list that its tests must see."""
    modules = _computing()
    assert len(modules) > 100
    tried = {one.file for one in LISTED if one.tests}
    assert [name for name in modules if name not in tried] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adding.py").write_text("def add(a, b):\n    return a + b  # both\n")
    (tmp_path / "test_adding.py").write_text(
        "from adding import add\n\n\ndef test_zero():\n    assert add(2, 0) == 2\n\n\n"
        "def test_sum():\n    assert add(2, 3) == 5\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return tmp_path


@pytest.mark.parametrize(
    ("now", "tests", "expected"),
    [
        ("a - b", "test_adding.py", (True, "found")),
        # Only a test that adds nothing looks.
        ("a - b", "test_adding.py -k zero", (False, "NOT FOUND")),
        # An import that fails, and tests that are not there, say nothing of the tests.
        ("(", "test_adding.py", (False, "pytest ended with status 2")),
        ("a - b", "test_adding.py -k nothing", (False, "pytest ended with status 5")),
    ],
)
def test_a_fault_is_found_by_its_tests_alone(
    now: str, tests: str, expected: tuple[bool, str], folder: Path
) -> None:
    before = (folder / "adding.py").read_text()
    checkout = Checkout(folder, ["pytest"])
    try:
        fault = Mutant("wrong sign", "adding.py", "a + b", now, tests)
        # Neither the fault nor its absence stays behind, in compiled modules for example.
        for _ in range(2):
            assert is_found(checkout, fault) == expected
            assert (folder / "adding.py").read_text() == before
            assert checkout.run_tests("test_adding.py") == 0
    finally:
        checkout.close()


def test_what_fails_without_a_fault_is_shown(folder: Path) -> None:
    checkout = Checkout(folder, ["pytest"])
    try:
        assert mutants.why_not_clean(checkout, "test_adding.py") == ""
        # A word of -k that names no test.
        assert "status 5" in mutants.why_not_clean(checkout, "test_adding.py -k nothing")
        (folder / "adding.py").write_text("def add(a, b):\n    return a - b\n")
        said = mutants.why_not_clean(checkout, "test_adding.py")
        assert said.startswith("test_adding.py\npytest ended with status 1:\n")
        assert "assert -1 == 5" in said
    finally:
        checkout.close()


def test_without_a_fault_the_tests_of_a_file_run_together() -> None:
    assert mutants.together(
        [
            *("tests/a.py", "tests/a.py::test_one", "tests/a.py -k two"),
            *("tests/b.py::test_one", 'tests/b.py -k "one or two"', "tests/b.py -k 'not one'"),
            *("tests/b.py::test_two[x]", "tests/a.py tests/c.py -k one", "tests/d.py tests/e.py"),
        ]
    ) == [
        *("tests/a.py", "tests/d.py", "tests/e.py"),
        "tests/b.py::test_one tests/b.py::test_two[x]",
        *("tests/b.py -k '(one or two) or (not one)'", "tests/c.py -k '(one)'"),
    ]


def test_what_takes_too_long_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "SECONDS", 3)
    checkout = Checkout(folder, ["pytest"])
    try:
        endless = Mutant("endless", "adding.py", "return a", "while True: a", "test_adding.py")
        assert is_found(checkout, endless) == (True, "ran out of time")
        assert checkout.run_tests("test_adding.py") == 0
    finally:
        checkout.close()


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (Mutant("w", "gone.py", "a", "b", "t"), "there is no gone.py"),
        (Mutant("w", "adding.py", "a", "c", "t"), "must stand once"),
        (Mutant("w", "adding.py", "a + b", 0, "t"), "must be texts"),  # type: ignore[arg-type]
        (Mutant("w", "adding.py", "a + b", "a + b", "t"), "nothing is changed"),
        (Mutant("w", "adding.py", "a + b", "a - b"), "either `tests` or `equivalent`"),
    ],
)
def test_a_fault_that_cannot_be_put_in_is_told(mutant: Mutant, said: str, folder: Path) -> None:
    assert said in (mutant.problem(folder) or "")


def test_a_choice_that_holds_no_fault_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        mutants.main(["--only", "no such fault"])
    assert "no fault of the list holds 'no such fault'" in capsys.readouterr().err
