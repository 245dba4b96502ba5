"""Every `assert` and `raise` of TorchTitan around its models is kept out of the jobs, or judged."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.config.options import command_line_settings
from cookbook.config.validate import judge
from cookbook.supervise import resume_point
from tests.check_cells import cell_of

TABLE = yaml.safe_load((ROOT / "tests/torchtitan_raises.yaml").read_text(encoding="utf-8"))
ENTRIES = [(file, *entry) for file, entries in TABLE.items() for entry in entries]


def statements(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the qualified function and the text of each `assert` and `raise` below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert | ast.Raise):
            yield ".".join(inside), " ".join(ast.unparse(child).split())
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from statements(child, (*inside, child.name) if named else inside)  # type: ignore[attr-defined]


@pytest.mark.titan
def test_each_assert_and_raise_has_an_entry_and_each_entry_one() -> None:
    spec = find_spec("torchtitan")
    assert spec and spec.submodule_search_locations
    root, unused = Path(spec.submodule_search_locations[0]), [*ENTRIES]
    for path in (
        p for part in ("components", "hf_datasets", "tools") for p in root.glob(f"{part}/**/*.py")
    ):
        name = str(path.relative_to(root))
        for function, text in statements(ast.parse(path.read_text(encoding="utf-8"))):
            of = [e for e in ENTRIES if fnmatchcase(name, e[0]) and fnmatchcase(function, e[1])]
            of = [entry for entry in of if entry[2] in text]
            assert of, f"{name}: {function}: {text}"
            unused = [entry for entry in unused if entry not in of]
    assert not unused


@pytest.mark.parametrize("why", sorted({why for *_, why in ENTRIES}))
def test_the_reason_holds(why: str) -> None:
    kind, _, words = why.partition(" ")
    if kind == "set":
        try:
            options = {
                name: one.value for name, one in command_line_settings(words.split()).items()
            }
            refused = [
                one.option for one in judge(cell_of("debug", options, cluster="local")).errors
            ]
        except InputError as error:
            refused = [error.place.removeprefix("--set ")]
        assert {*refused} & {word.partition("=")[0] for word in words.split()}
    elif kind == "resume:":
        assert hasattr(resume_point, words)
    else:
        assert kind in ("build:", "rehearse:", "never:")
