"""Read a YAML file as a mapping that knows the line of each key and the text of each number.

Scalars are those of YAML 1.2: `1e-4` is a number, `12:00:00` and `on` are texts (1.1 differs).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError, described

Keys = tuple[str, ...]
_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9_]*)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?",
}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


for _kind, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), None)


@dataclass(frozen=True)
class YamlFile:
    """A mapping read from `path`.

    Attributes:
        lines: the line of each key, by its keys from the top.
        texts: each number and bool as it was typed (`3.10` is the number 3.1).
    """

    path: Path
    content: Mapping[str, Any]
    lines: Mapping[Keys, int] = field(repr=False)
    texts: Mapping[Keys, str] = field(repr=False)

    def place(self, *keys: str) -> str:
        """Return `recipes/debug.yaml:12: training.steps`, for the head of a message."""
        known = keys
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        at = f"{shown_path(self.path)}:{line}" if line else shown_path(self.path)
        return f"{at}: {'.'.join(keys)}" if keys else at


def shown_path(path: Path) -> str:
    """Return the path relative to the working directory where it is below it, else whole."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def read_yaml(path: Path) -> YamlFile:
    """Read the mapping in `path`; syntax errors, duplicate keys, other types are input errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(shown_path(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(shown_path(path), f"is not UTF-8 text: {error}") from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> YamlFile:
    """Parse `text` as the content of `path`; an empty file is an empty mapping."""
    lines: dict[Keys, int] = {}
    texts: dict[Keys, str] = {}
    make = yaml.constructor.SafeConstructor().construct_object
    shown = shown_path(path)

    def value(node: Any, keys: Keys) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [value(item, (*keys, str(i))) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            if node.tag in (f"{_TAG}int", f"{_TAG}float", f"{_TAG}bool"):
                texts[keys] = node.value
            return make(node)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str) or key == "<<":
                raise InputError(f"{shown}:{line}", "keys must be plain names")
            below = (*keys, key)
            if key in mapping:
                place = f"{shown}:{line}: {'.'.join(below)}"
                raise InputError(place, f"stands twice, first in line {lines[below]}")
            lines[below] = line
            mapping[key] = value(value_node, below)
        return mapping

    try:
        node = yaml.compose(text, Loader=_Loader)
        content = value(node, ()) if node else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark else shown
        parts = [getattr(error, name, None) for name in ("context", "problem")]
        problem = ", ".join(filter(None, parts)) or " ".join(str(error).split())
        raise InputError(at, f"YAML syntax: {problem}", "check indentation and quotes") from None
    if not isinstance(content, dict):
        found = f"found {described(content)} at the top, allowed: a mapping of keys"
        raise InputError(shown, found)
    return YamlFile(path, content, lines, texts)
