"""Reads a YAML file as a mapping that knows the line of each key and the text of each value.

Scalars are those of YAML 1.2: `1e-4` is a number, `12:00:00` and `on` are texts (1.1 differs).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError

Keys = tuple[str, ...]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A recipe has a few hundred values, three levels deep. More is a mistake, or an attempt to fill
# the memory: aliases of aliases multiply.
_MAX_VALUES = 10_000
_MAX_DEPTH = 20

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
# No shell, log or table can show these; lone surrogates are bytes that were no UTF-8.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


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
        # What an alias stands for has no lines of its own.
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
    """`read_yaml` for text that is already there."""
    reader = _Reader(path)
    try:
        content = reader.read(yaml.parse(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{shown_path(path)}:{mark.line + 1}:{mark.column + 1}" if mark else shown_path(path)
        problem = ", ".join(text for text in (error.context, error.problem) if text)
        raise InputError(at, f"YAML syntax: {problem}", "check indentation and quotes") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InputError(shown_path(path), f"YAML syntax: {problem}") from None
    if not isinstance(content, dict):
        raise InputError(
            shown_path(path), f"found {described(content)} at the top, allowed: a mapping of keys"
        )
    return YamlFile(path, content, reader.lines, reader.texts)


class _Reader:
    """Makes values of the parser's events.

    PyYAML's own composer calls itself for each level of nesting, in C, and crashes the process
    where there are too many.
    """

    def __init__(self, path: Path) -> None:
        self.lines: dict[Keys, int] = {}
        self.texts: dict[Keys, str] = {}
        self._path = path
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._count = 0

    def read(self, events: Iterator[Any]) -> Any:
        """The one document's value; an empty file is an empty mapping."""
        content: Any = {}
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise InputError(self._at(event), "a second document starts", "keep one")
            elif not isinstance(
                event, yaml.StreamStartEvent | yaml.StreamEndEvent | yaml.DocumentEndEvent
            ):
                content = self._value(event, events, (), 0)
        return content

    def _value(self, event: Any, events: Iterator[Any], keys: Keys, depth: int) -> Any:
        before = self._count
        self._grow(event, 1)
        if depth > _MAX_DEPTH:
            raise InputError(self._at(event), f"nested more than {_MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise InputError(
                    self._at(event), f"alias *{event.anchor} has no complete value above it"
                )
            value, size = self._anchors[event.anchor]
            self._grow(event, size)
            return value
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise InputError(
                self._at(event), f"YAML tag {tag!r} is not allowed", "write the plain value"
            )
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, keys)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(events), yaml.SequenceEndEvent):
                value.append(self._value(item, events, (*keys, str(len(value))), depth + 1))
        else:
            value = self._mapping(events, keys, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._count - before)
        return value

    def _mapping(self, events: Iterator[Any], keys: Keys, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = event.value if isinstance(event, yaml.ScalarEvent) else None
            if key is None or key == "<<" or event.tag is not None or control_character(key):
                raise InputError(self._at(event), "keys must be plain names")
            below = (*keys, key)
            if key in mapping:
                raise InputError(
                    f"{self._at(event)}: {'.'.join(below)}",
                    f"stands twice, first in line {self.lines[below]}",
                )
            self.lines[below] = event.start_mark.line + 1
            mapping[key] = self._value(next(events), events, below, depth + 1)
        return mapping

    def _scalar(self, event: Any, keys: Keys) -> Any:
        text: str = event.value
        if found := control_character(text):
            raise InputError(self._at(event), f"the character {found} is not allowed")
        if not event.implicit[0]:
            return text
        if _NULL.fullmatch(text):
            return None
        self.texts[keys] = text
        if _BOOL.fullmatch(text):
            return text.lower() == "true"
        try:
            if _INT.fullmatch(text):
                return int(text.replace("_", ""))
            if _FLOAT.fullmatch(text):
                return float(text.replace("_", ""))
        except ValueError:
            # More digits than Python reads.
            raise InputError(
                self._at(event), f"found {text[:40]!r}..., allowed: a number of fewer digits"
            ) from None
        return text

    def _grow(self, event: Any, count: int) -> None:
        self._count += count
        if self._count > _MAX_VALUES:
            raise InputError(self._at(event), f"more than {_MAX_VALUES:,} values, aliases included")

    def _at(self, event: Any) -> str:
        return f"{shown_path(self._path)}:{event.start_mark.line + 1}"


def control_character(text: str) -> str:
    """The first character that no text here may hold, as `U+0007`; empty for none."""
    found = _CONTROL.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def described(value: Any) -> str:
    """`value` as a message names it, with its YAML type: `the text 'four'`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 80 else f"the text {value[:77]!r}..."
    if isinstance(value, int | float):
        return f"the number {value}"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)
