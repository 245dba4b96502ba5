"""Read a YAML file as a mapping that knows the line of each key and the text of each number.

Scalars are those of YAML 1.2: `1e-4` is a number, `12:00:00` and `on` are texts (1.1 differs).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError, control_character, described

Keys = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", lambda text: int(text.replace("_", ""))),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        lambda text: float(text.replace("_", "")),
    ),
}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


for _kind, (_pattern, _) in _SCALARS.items():
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
        """`recipes/debug.yaml:12: training.steps`, for the head of a message."""
        known = keys
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        at = f"{shown_path(self.path)}:{line}" if line else shown_path(self.path)
        return f"{at}: {'.'.join(keys)}" if keys else at


def shown_path(path: Path) -> str:
    """The path as a user would type it: relative to the working directory where it is below it."""
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
    """`read_yaml` for text that is already there; an empty file is an empty mapping."""
    walk = _Walk(path, {}, {})
    try:
        node = yaml.compose(text, Loader=_Loader)
        content = walk.value(node, ()) if node else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{shown_path(path)}:{mark.line + 1}:{mark.column + 1}" if mark else shown_path(path)
        problem = ", ".join(text for text in (error.context, error.problem) if text)
        raise InputError(at, f"YAML syntax: {problem}", "check indentation and quotes") from None
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise InputError(shown_path(path), f"YAML syntax: {problem}") from None
    if not isinstance(content, dict):
        found = f"found {described(content)} at the top, allowed: a mapping of keys"
        raise InputError(shown_path(path), found)
    return YamlFile(path, content, walk.lines, walk.texts)


@dataclass(frozen=True)
class _Walk:
    """Turns composed nodes into values, noting the line of each key."""

    path: Path
    lines: dict[Keys, int]
    texts: dict[Keys, str]

    def value(self, node: Any, keys: Keys) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*keys, str(i))) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, keys)
        text: str = node.value
        if found := control_character(text):
            raise InputError(self._at(node), f"the character {found} is not allowed")
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return text
        if kind not in _SCALARS:
            raise InputError(
                self._at(node), f"YAML tag {node.tag!r} is not allowed", "write the plain value"
            )
        if kind != "null":
            self.texts[keys] = text
        pattern, read = _SCALARS[kind]
        try:
            # A tag may call anything a number.
            if re.fullmatch(pattern, text):
                return read(text)
        except ValueError:
            # More digits than Python reads.
            pass
        raise InputError(self._at(node), f"found {text[:40]!r}, which is no {kind}")

    def _mapping(self, node: Any, keys: Keys) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str) or key == "<<" or control_character(key):
                raise InputError(self._at(key_node), "keys must be plain names")
            below = (*keys, key)
            if key in mapping:
                place = f"{self._at(key_node)}: {'.'.join(below)}"
                raise InputError(place, f"stands twice, first in line {self.lines[below]}")
            self.lines[below] = key_node.start_mark.line + 1
            mapping[key] = self.value(value_node, below)
        return mapping

    def _at(self, node: Any) -> str:
        return f"{shown_path(self.path)}:{node.start_mark.line + 1}"
