"""The list of faults can be put in, and the runner tells found from not found."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from tests import mutants
from tests.mutants import Checkout, Ended, Mutant, read_list, try_fault

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
        ("a - b", "test_adding.py", (True, "found", ("test_adding.py::test_sum",))),
        # Only a test that adds nothing looks.
        ("a - b", "test_adding.py -k zero", (False, "NOT FOUND", ())),
        # An import that fails, and tests that are not there, say nothing of the tests.
        ("(", "test_adding.py", (False, "pytest ended with status 2", ())),
        ("a - b", "test_adding.py -k nothing", (False, "pytest ended with status 5", ())),
    ],
)
def test_a_fault_is_found_by_its_tests_alone(
    now: str, tests: str, expected: tuple[bool, str, tuple[str, ...]], folder: Path
) -> None:
    before = (folder / "adding.py").read_text()
    checkout = Checkout(folder, ["pytest"])
    try:
        fault = Mutant("wrong sign", "adding.py", "a + b", now, tests)
        # Neither the fault nor its absence stays behind, in compiled modules for example.
        for _ in range(2):
            tried = try_fault(checkout, fault)
            assert (tried.is_found, tried.said, tried.by) == expected
            assert (folder / "adding.py").read_text() == before
            assert checkout.run_tests("test_adding.py") == Ended(0, [])
    finally:
        checkout.close()


def test_what_fails_without_a_fault_is_shown(folder: Path) -> None:
    checkout = Checkout(folder, ["pytest"])
    try:
        assert mutants.why_not_clean(checkout, ["test_adding.py"]) == ""
        # A word of -k that names no test.
        assert "status 5" in mutants.why_not_clean(checkout, ["test_adding.py", "-k", "nothing"])
        (folder / "adding.py").write_text("def add(a, b):\n    return a - b\n")
        said = mutants.why_not_clean(checkout, ["test_adding.py"])
        assert said.startswith("test_adding.py\npytest ended with status 1:\n")
        assert "assert -1 == 5" in said
    finally:
        checkout.close()


@pytest.mark.parametrize(
    ("tests", "status", "words"),
    [
        ("test_adding.py", 0, ["1 of 1 faults found in "]),
        ("test_adding.py -k zero", 1, ["NOT FOUND ", "0 of 1 faults found in "]),
        # It fails whatever is added.
        ("test_broken.py", 1, ["these fail without a fault:", "test_broken.py::test_no\n"]),
    ],
)
def test_each_fault_is_tried_and_who_saw_it_runs_again_without_it(
    tests: str,
    status: int,
    words: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "test_broken.py").write_text("def test_no():\n    assert False\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    monkeypatch.setattr(mutants, "ROOT", folder)
    monkeypatch.setattr(mutants, "IMPORTED", ("pytest",))
    fault = Mutant("wrong sign", "adding.py", "a + b", "a - b", tests)
    monkeypatch.setattr(mutants, "read_list", lambda: [fault])
    assert mutants.main([]) == status
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


def test_tests_that_saw_faults_run_together_file_by_file() -> None:
    assert mutants.together(
        [
            *(("tests/b.py::test_two[x y]",), ("tests/a.py::test_one",)),
            *(("tests/b.py::test_one",), ("tests/b.py::test_two[x y]",)),
            # Of a fault that ran out of time nobody knows which test saw it.
            ("tests/b.py", "-k", "one or two"),
        ]
    ) == [
        ("tests/a.py::test_one",),
        ("tests/b.py::test_one", "tests/b.py::test_two[x y]"),
        ("tests/b.py", "-k", "one or two"),
    ]


def test_ranks_are_forked_from_what_is_imported(folder: Path) -> None:
    """They need not import torch anew."""
    (folder / "test_ranks.py").write_text(
        "import multiprocessing\nimport sys\n\n\ndef tell(queue):\n"
        "    queue.put(['colorsys' in sys.modules, 'adding' in sys.modules])\n\n\n"
        "def test_both():\n    import adding\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    queue = context.Queue()\n    context.Process(target=tell, args=(queue,)).start()\n"
        "    assert queue.get(timeout=60) == [True, False]\n"
    )
    checkout = Checkout(folder, ["pytest", "colorsys"])
    try:
        for _ in range(2):
            assert checkout.run_tests("test_ranks.py") == Ended(0, []), checkout.output()
    finally:
        checkout.close()


def test_what_takes_too_long_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "SECONDS", 3)
    checkout = Checkout(folder, ["pytest"])
    try:
        endless = Mutant("endless", "adding.py", "return a", "while True: a", "test_adding.py")
        tried = try_fault(checkout, endless)
        assert (tried.is_found, tried.said, tried.by) == (
            *(True, "ran out of time"),
            ("test_adding.py",),
        )
        assert checkout.run_tests("test_adding.py").status == 0
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
