"""Read YAML files into dataclasses.

Scalars follow YAML 1.2, not 1.1: `1e-4` is a number; `12:00:00` and `on` are strings. A field
without a default is required. A field with `metadata={"key": name}` is read from the key `name`.
Errors name file, line, key and allowed values.
"""

import contextlib
import dataclasses
import functools
import os
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cookbook.base.errors import InputError, described, quotes_remedy, unknown_name

Keys = tuple[str, ...]
_TAG = "tag:yaml.org,2002:"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


for _kind, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9_]*)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?",
}.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), None)


@dataclass(frozen=True)
class YamlFile:
    """A YAML mapping read from `path`."""

    path: Path
    content: Mapping[str, Any]
    lines: Mapping[Keys, int] = field(repr=False)  # line of each key, by its key path
    texts: Mapping[Keys, str] = field(repr=False)  # numbers as typed (`3.10`, not 3.1), by key path

    def place(self, *keys: str) -> str:
        """Return where the key at path `keys` is: `recipes/debug.yaml:12: training.steps`."""
        known = keys
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        at = f"{shown_path(self.path)}:{line}" if line else shown_path(self.path)
        return f"{at}: {'.'.join(keys)}" if keys else at

    def within(self, *keys: str) -> "YamlFile":
        """Return the mapping at the path `keys` as a file of its own, at the same lines."""
        below: Any = self.content
        for key in keys:
            below = below[key]
        cut = len(keys)
        lines, texts = (
            {path[cut:]: one for path, one in known.items() if path[:cut] == keys}
            for known in (self.lines, self.texts)
        )
        return YamlFile(self.path, below, lines, texts)  # type: ignore[arg-type]


def shown_path(path: Path) -> str:
    """Return the path, relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def read_yaml(path: Path) -> YamlFile:
    """Read the mapping in `path`; raise InputError if it is malformed or repeats a key."""
    shown = shown_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(shown, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(shown, f"is not UTF-8 text: {error}") from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> YamlFile:
    """Like `read_yaml`, for a text that stands in `path`."""
    shown, lines, texts = shown_path(path), dict[Keys, int](), dict[Keys, str]()
    make = yaml.constructor.SafeConstructor().construct_object

    def value(node: Any, keys: Keys) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [value(item, (*keys, str(i))) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            if node.tag in (f"{_TAG}int", f"{_TAG}float"):
                texts[keys] = node.value
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                return make(node)
            raise yaml.MarkedYAMLError(None, None, "value does not fit its tag", node.start_mark)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str) or key == "<<":
                remedy = "write out what << stands for" if key == "<<" else ""
                raise InputError(f"{shown}:{line}", "keys must be plain names", remedy)
            below = (*keys, key)
            if key in mapping:
                place = f"{shown}:{line}: {'.'.join(below)}"
                raise InputError(place, f"is given twice, first on line {lines[below]}")
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
        before = "".join(text.splitlines()[mark.line :][:1])[: mark.column + 1] if mark else ""
        is_tab = before.isspace() and "\t" in before
        remedy = "indent with spaces, not tabs" if is_tab else "check indentation and quotes"
        raise InputError(at, f"YAML syntax: {problem}", remedy) from None
    if not isinstance(content, dict):
        found = f"found {described(content)} at the top, allowed: a mapping of keys"
        raise InputError(shown, found)
    return YamlFile(path, content, lines, texts)


class Block(str):
    """A text that `dump_yaml` writes line by line, below its key."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {}
# A text that either YAML 1.1 or 1.2 would take for something else is quoted.
for _resolvers in (yaml.SafeDumper.yaml_implicit_resolvers, _Loader.yaml_implicit_resolvers):
    for _first, _found in _resolvers.items():
        _Dumper.yaml_implicit_resolvers.setdefault(_first, []).extend(_found)


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if isinstance(text, Block) else None if text.isprintable() else '"'
    return dumper.represent_scalar(f"{_TAG}str", str(text), style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    is_flat = not any(isinstance(item, list | dict) for item in items)
    return dumper.represent_sequence(f"{_TAG}seq", items, flow_style=is_flat)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent)
_Dumper.add_representer(Block, _represent)


def dump_yaml(content: Any) -> str:
    """Return `content` as YAML that `read_yaml` reads back unchanged."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


T = typing.TypeVar("T")
Text = Annotated[str, Field(strict=True, min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, gt=0)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Texts = tuple[Text, ...]
Numbers = dict[str, Annotated[float, Field(strict=True)]]
# Environment variables or sbatch options. `fill` keeps numbers as a YAML file spells them: `3.10`
# stays `3.10`.
Words = dict[str, str | Flag]

_ALLOWED = {
    "string_type": "a text",
    "string_too_short": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number, {ge:g} or more",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}


def fill(
    cls: type[T],
    file: YamlFile,
    within: tuple[str, ...] = (),
    beside: Collection[str] = (),
    **given: Any,
) -> T:
    """Return an instance of `cls` with fields from `given` and from a mapping in the YAML file.

    `within`: the path of keys that leads to the mapping.
    `beside`: keys that the caller reads itself, so that they are no error here. They may be dotted
    in the file: `a` also allows `a.b`.
    """
    fields = {
        field.metadata.get("key", field.name): field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in given
    }
    hints = typing.get_type_hints(cls, include_extras=True)
    values = dict(given)
    for key, value in mapping_at(file, *within).items():
        if key not in fields and key.partition(".")[0] not in beside:
            raise unknown_name(file.place(*within, key), "key", key, (*fields, *beside))
        if key not in fields or value is None:
            continue
        if hints[fields[key]] == Words and isinstance(value, dict):
            texts = {name: file.texts.get((*within, key, name)) for name in value}
            value = {name: texts[name] or item for name, item in value.items()}
        values[fields[key]] = value
    try:
        filled: T = _adapter(cls).validate_python(values)  # type: ignore[arg-type]
        return filled
    except ValidationError as error:
        keys = {name: key for key, name in fields.items()}
        raise _input_error(cls, file, within, keys, error) from None


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    cls.__pydantic_config__ = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, coerce_numbers_to_str=True
    )
    return TypeAdapter(cls)


def _input_error(
    cls: Any, file: YamlFile, within: tuple[str, ...], keys: dict[str, str], found_by: Any
) -> InputError:
    errors = found_by.errors(include_url=False)
    # Report an unknown key first: it may be a misspelled required key.
    error = min(errors, key=lambda one: one["type"] != "unexpected_keyword_argument")
    kind = error["type"]
    # In a union, pydantic adds the type that it tried (`str`, `bool`) to the path of keys: drop it.
    first, *rest = [str(key) for key in error["loc"] if key not in ("str", "bool")]
    place, found = file.place(*within, keys.get(first, first), *rest), error["input"]
    if kind == "missing":
        return InputError(place, "is missing", "add it")
    if kind == "unexpected_keyword_argument":
        for name in filter(lambda key: isinstance(key, str), error["loc"][:-1]):
            cls = _dataclass_at(cls, name)
        return unknown_name(place, "key", rest[-1], [one.name for one in dataclasses.fields(cls)])
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return unknown_name(place, "value", str(found), choices)
    allowed = _ALLOWED.get(kind, "a mapping").format(**error.get("ctx", {}))
    if kind == "dataclass_type":
        inner = dataclasses.fields(_dataclass_at(cls, first))
        allowed += f" of {', '.join(field.name for field in inner)}"
    remedy = quotes_remedy(found, allowed)
    return InputError(place, f"found {described(found)}, allowed: {allowed}", remedy)


def _dataclass_at(cls: Any, name: str) -> Any:
    hint = typing.get_type_hints(cls)[name]
    return next(filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))


def mapping_at(file: YamlFile, *keys: str) -> dict[str, Any]:
    """Return the mapping at the path `keys`; empty if it is missing."""
    found: Any = file.content
    for depth, key in enumerate(keys, 1):
        found = found.get(key)
        if found is None:
            return {}
        if not isinstance(found, dict):
            place = file.place(*keys[:depth])
            raise InputError(place, f"found {described(found)}, allowed: a mapping")
    return dict(found)
