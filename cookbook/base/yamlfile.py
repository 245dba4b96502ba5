"""In: the path of a YAML file. Out: its content, checked key by key, with the line of every key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from cookbook.base.errors import InputError, unknown_name

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _CoreLoader(_Base):  # type: ignore[misc]
    """YAML 1.2's scalars: `1e-4` is a number, `12:00:00` and `on` are text (1.1 says otherwise)."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in [
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
    ),
]:
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(_pattern),
        [character if character != "\0" else "" for character in _first],
    )


_OF_CONTAINERS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


@dataclass(frozen=True)
class YamlFile:
    """A mapping read from `path`; `lines` holds the line of each key, by its keys from the top."""

    path: Path
    content: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(repr=False)

    def place(self, *keys: str) -> str:
        """`recipes/debug.yaml:12: training.steps`, for the head of a message."""
        line = self.lines.get(keys)
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
    """`read_yaml` for text that is already there."""
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
        lines: dict[tuple[str, ...], int] = {}
        content = {} if node is None else _construct(node, (), lines, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{shown_path(path)}:{mark.line + 1}:{mark.column + 1}" if mark else shown_path(path)
        problem = ", ".join(text for text in (error.context, error.problem) if text)
        raise InputError(at, f"YAML syntax: {problem}", "check indentation and quotes") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InputError(shown_path(path), f"YAML syntax: {problem}") from None
    except RecursionError:
        raise InputError(
            shown_path(path), "an alias holds itself, or nesting is too deep"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            shown_path(path), f"found {described(content)} at the top, allowed: a mapping of keys"
        )
    return YamlFile(path, content, lines)


def _construct(
    node: yaml.Node, keys: tuple[str, ...], lines: dict[tuple[str, ...], int], path: Path
) -> Any:
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _OF_CONTAINERS:
        place = f"{shown_path(path)}:{node.start_mark.line + 1}"
        raise InputError(place, f"YAML tag {node.tag!r} is not allowed here")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, keys, {}, path) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(node, path)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key == "<<":
            raise InputError(f"{shown_path(path)}:{line}", "keys must be plain names")
        below = (*keys, key)
        if key in mapping:
            first = lines[below]
            raise InputError(
                f"{shown_path(path)}:{line}: {'.'.join(below)}",
                f"stands twice, first in line {first}",
            )
        lines[below] = line
        mapping[key] = _construct(value_node, below, lines, path)
    return mapping


def _scalar(node: yaml.Node, path: Path) -> Any:
    text, tag = node.value, node.tag.rpartition(":")[2]
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    line = node.start_mark.line + 1
    if tag in ("int", "float"):
        try:
            return (int if tag == "int" else float)(text.replace("_", ""))
        except ValueError:
            # An explicit tag (`!!int four`), or more digits than Python reads.
            raise InputError(
                f"{shown_path(path)}:{line}", f"found {text[:40]!r}, allowed: a number"
            ) from None
    if tag == "str":
        return text
    raise InputError(f"{shown_path(path)}:{line}", f"YAML tag {node.tag!r} is not allowed here")


@dataclass(frozen=True)
class Key:
    """What one key of a YAML mapping may hold: `kind` names a check in `_CHECKS`."""

    kind: str = "str"
    required: bool = False
    default: Any = None
    choices: tuple[str, ...] = ()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str) and value != "", "a text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: _is_int(value) and value > 0, "a whole number above 0"),
    "number": (
        lambda value: (_is_int(value) or isinstance(value, float)) and value > 0,
        "a number",
    ),
    "texts": (
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        "a list of texts",
    ),
    "mapping": (lambda value: isinstance(value, dict), "a mapping"),
    "mappings": (
        lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value),
        "a list of mappings",
    ),
    "scalars": (
        lambda value: (
            isinstance(value, dict)
            and not any(isinstance(item, dict | list) or item is None for item in value.values())
        ),
        "a mapping of names to texts or numbers",
    ),
    "numbers": (
        lambda value: (
            isinstance(value, dict)
            and all(_is_int(item) or isinstance(item, float) for item in value.values())
        ),
        "a mapping of names to numbers",
    ),
    "any": (lambda value: True, "anything"),
}


def read_keys(
    file: YamlFile, schema: Mapping[str, Key], within: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The mapping at `within`, checked against `schema`, with the defaults of the absent keys."""
    mapping: Any = file.content
    for key in within:
        mapping = mapping[key]
    for key in mapping:
        if key not in schema:
            raise unknown_name(file.place(*within, key), "key", key, schema)
    return {
        name: check_value(file.place(*within, name), mapping.get(name), key)
        for name, key in schema.items()
    }


def check_value(place: str, value: Any, key: Key) -> Any:
    """`value` where `key` allows it, `key.default` where it is null."""
    if value is None:
        if key.required:
            raise InputError(place, "is missing", f"set it to {_CHECKS[key.kind][1]}")
        return key.default
    if key.choices:
        if value not in key.choices:
            raise unknown_name(place, "value", str(value), key.choices)
        return value
    holds, allowed = _CHECKS[key.kind]
    if not holds(value):
        remedy = "put it in quotes" if key.kind == "str" and not isinstance(value, str) else ""
        raise InputError(place, f"found {described(value)}, allowed: {allowed}", remedy)
    return value


def described(value: Any) -> str:
    """`value` as a message names it, with its YAML type: `the text 'four'`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)
