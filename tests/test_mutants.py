"""The list of faults is valid, and its runner tells found from not found."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import Checkout, Mutant, read_list


def test_the_listed_faults_can_be_put_in() -> None:
    listed = read_list()
    assert len(listed) >= 80
    assert [why for one in listed if (why := one.problem())] == []
    assert len({(one.file, one.was, one.now) for one in listed}) == len(listed)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    (tmp_path / "adding.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_adding.py").write_text(
        "from adding import add\n\n\ndef test_zero():\n    assert add(2, 0) == 2\n\n\n"
        "def test_sum():\n    assert add(2, 3) == 5\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    checkout = Checkout(tmp_path, ["pytest"], seconds=10)
    yield checkout
    checkout.close()


def test_a_fault_is_found_by_its_tests_alone(checkout: Checkout) -> None:
    """Neither a fault nor its absence stays behind, for example in compiled modules."""
    wrong = "def add(a, b):\n    return a - b\n"
    endless = "def add(a, b):\n    while True:\n        pass\n"
    for content, word, said, by in (
        (wrong, "zero or sum", "found", ["test_adding.py::test_sum"]),
        (wrong, "zero", "NOT FOUND", []),
        ("(", "sum", "pytest ended with status 2", []),
        (wrong, "nothing", "pytest ended with status 5", []),
        (endless, "sum", "found by timeout", []),
    ):
        found = checkout.try_fault("adding.py", content, "test_adding.py", "-k", word)
        assert found == (said, by), checkout.output()
        assert checkout.run_tests("test_adding.py") == (0, [])


def test_an_invalid_fault_is_reported(checkout: Checkout) -> None:
    for mutant, said in (
        (Mutant("w", "gone.py", "a", "b", "t"), "there is no gone.py"),
        (Mutant("w", "adding.py", "a", "c", "t"), "must occur once"),
        (Mutant("w", "adding.py", "a + b", "a + b", "t"), "needs a change and tests"),
        (Mutant("w", "adding.py", "a + b", "a - b", "test_no.py"), "there is no test_no.py"),
    ):
        assert said in (mutant.problem(checkout.folder) or "")
