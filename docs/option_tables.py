"""Tables of the keys and options that YAML files may hold."""

import ast
import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from cookbook.base import yamlfile
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table
from cookbook.config.cluster import Cluster
from cookbook.config.dialect.classes import class_of, default_only
from cookbook.config.recipe import Recipe
from cookbook.config.stack import Option, load_stack

_OWN = ROOT / "cookbook/titan/tt_0_2_2/job_config.py"
_ALLOWED = {
    yamlfile.Text: "text",
    yamlfile.Texts: "list",
    yamlfile.Flag: "true, false",
    yamlfile.Count: "1 or more",
    yamlfile.Natural: "0 or more",
    yamlfile.Number: "above 0",
    yamlfile.Numbers: "mapping",
    yamlfile.Words: "mapping",
}


def recipe_keys() -> str:
    return _keys(Recipe, ("name", "settings", "path"))


def cluster_keys() -> str:
    return _keys(Cluster, ("name", "settings", "path", "content"))


def _keys(cls: Any, given: tuple[str, ...]) -> str:
    hints = typing.get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        if field.name in given:
            continue
        kinds = (hints[field.name], *typing.get_args(hints[field.name]))
        allowed = next((_ALLOWED[kind] for kind in kinds if kind in _ALLOWED), "mapping")
        if typing.get_origin(hints[field.name]) is typing.Literal:
            allowed = ", ".join(typing.get_args(hints[field.name]))
        has_default = field.default is not dataclasses.MISSING
        shown = _word(field.default) if has_default else "required"
        if field.default_factory is not dataclasses.MISSING:
            shown = ""
        rows.append([f"`{field.metadata.get('key', field.name)}`", allowed, shown])
    return markdown_table(["key", "allowed", "default"], rows, "lll")


def titan_options() -> str:
    """Return TorchTitan's own options."""
    own = dict(_own())
    rows = [_row(option) for name, option in load_stack().options.items() if name not in own]
    return markdown_table(["option", "allowed", "default", "class"], rows, "llll")


def own_options() -> str:
    """Return the options that the cookbook adds, each with its meaning."""
    options = load_stack().options
    rows = [[*_row(options[name]), meaning] for name, meaning in _own()]
    return markdown_table(["option", "allowed", "default", "class", "meaning"], rows, "lllll")


def _row(option: Option) -> list[str]:
    allowed = ", ".join(option.choices) or {"lists": "list of lists"}.get(option.kind, option.kind)
    default, why = _word(option.default), default_only(option.name)
    judged = (class_of(option.name) or "") + (f": {why[0]}" if why else "")
    return [f"`{option.name}`", allowed, default, judged]


def _word(value: Any) -> str:
    if value in (None, "", [], ()):
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _own() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each option of the cookbook's `JobConfig`."""
    tree = ast.parse(_OWN.read_text(encoding="utf-8"))
    classes = {one.name: one.body for one in tree.body if isinstance(one, ast.ClassDef)}

    def walk(name: str, prefix: str) -> Iterator[tuple[str, str]]:
        for field, text in zip_longest(classes[name], classes[name][1:]):
            if not isinstance(field, ast.AnnAssign):
                continue
            path, kind = f"{prefix}{ast.unparse(field.target)}", ast.unparse(field.annotation)
            if kind in classes:
                yield from walk(kind, f"{path}.")
            else:
                assert isinstance(text, ast.Expr), f"{path} has no docstring"
                yield path, re.sub(r"\s+", " ", ast.literal_eval(text.value)).strip()

    yield from walk("JobConfig", "")
