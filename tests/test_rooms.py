"""The rooms of the house: imports run downwards only, files stay small and open with a sentence."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from cookbook.config.stack import load_stack

STACK = load_stack()
PACKAGE = ROOT / "cookbook"
# From the top floor down. A room may import what lies below it and itself; of the rooms on one
# floor, none imports another.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("launch",),
    ("supervise", "plan"),
    ("check", "results", "profile", "doctor"),
    ("predict", "install"),
    ("config", "observe"),
    ("run", "titan"),
    ("base",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TITAN_FLOORS = (STACK.hooks.rpartition(".")[2], "self_check", "common")
MOST_LINES = 450
# These rooms read facts, and name an option in no other way, not even in a message.
READS_FACTS = ("config", "predict", "plan", "check", "doctor", "results")
# How often other rooms still spell an option's name, which may only shrink.
SPELT = {"base": 5, "run": 8}
NAME = re.compile(
    rf"(?<![\w.])({'|'.join(sorted(map(re.escape, STACK.options), reverse=True))})(?!\w)"
)


def modules() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 50
    return found


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that `path` imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if name.startswith("cookbook."))
            assert not node.level, f"{path}: relative import"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("cookbook."))


def module_of(name: str) -> str:
    """The module that `name` (which may end with a class or a function) is in."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:length])
    raise AssertionError(f"no module for {name}")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_run_downwards(path: Path) -> None:
    own = name_of(path)
    _, room, inner, *_ = [*own.split("."), "", ""]
    for name in imported(path):
        _, other, other_inner, *_ = [*name.split("."), ""]
        said = f"{own} imports {name}, which is not below it"
        if other != room:
            assert FLOOR_OF[other] > FLOOR_OF[room], said
        elif room == "titan" and inner and other_inner != inner:
            assert TITAN_FLOORS.index(other_inner) > TITAN_FLOORS.index(inner), said


def test_every_room_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert rooms == set(FLOOR_OF)


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        name_of(path): {module_of(name) for name in imported(path)} - {name_of(path)}
        for path in modules()
    }
    # What imports nothing that is left goes, until nothing is left.
    while ready := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in ready:
            del graph[name]
    assert not graph, f"these import one another: {sorted(graph)}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_is_small_and_opens_with_a_sentence(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    if path.name == "__init__.py" and not text:
        return
    doc = ast.get_docstring(ast.parse(text))
    assert doc, "says what it does"
    first = doc.split("\n\n")[0].rstrip()
    assert first.endswith((".", ":")), first


def test_options_are_spelt_in_the_dialect_alone() -> None:
    spelt, named = Counter[str](), list[str]()
    for path in modules():
        room, inner, *_ = [*path.relative_to(PACKAGE).parts, ""]
        if room == "titan" or inner == "dialect":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                spelt[room] += node.value in STACK.options
                is_said = room in READS_FACTS and id(node) not in documented
                if is_said and NAME.search(node.value):
                    named.append(f"{path}:{node.lineno}: {node.value}")
    assert not named
    assert +spelt == SPELT
