"""Fills a dataclass from a YAML mapping: its fields are the keys, their types what is allowed.

    @dataclass(frozen=True)
    class Container:
        image: str
        mounts: tuple[str, ...] = ()

    container = fill(Container, file, ("container",))

A field without a default is required. A field whose value `fill` is given is no key.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.yamlfile import YamlFile, described


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=_Dataclass)


class Words(dict[str, str | bool]):
    """Names with a word each, for a shell: a number stands as it was typed, `3.10` and not 3.1."""


class Unchecked(dict[str, Any]):
    """A mapping whose values somebody else checks."""


@dataclass(frozen=True)
class _Key:
    """What one key may hold."""

    name: str
    holds: Callable[[Any], bool]
    allowed: str
    required: bool
    choices: tuple[str, ...] = ()
    nested: type | None = None
    convert: Callable[[Any], Any] = lambda value: value


def key_named(name: str, **options: Any) -> Any:
    """A dataclass field that the YAML key `name` fills."""
    return dataclasses.field(metadata={"key": name}, **options)


def from_zero(default: int | None) -> Any:
    """A dataclass field for a whole number that may be 0."""
    return dataclasses.field(default=default, metadata={"from_zero": True})


def fill(
    cls: type[T],
    file: YamlFile,
    within: tuple[str, ...] = (),
    beside: Collection[str] = (),
    **given: Any,
) -> T:
    """The mapping at `within` of `file` as a `cls`.

    Args:
        beside: further keys that may stand there (`a` allows `a.b` too); somebody else reads them.
        given: fields whose values are known already, and which are no keys.
    """
    mapping = mapping_at(file, *within)
    schema = _schema(cls, frozenset(given))
    known = [key.name for key in schema.values()]
    for key in mapping:
        if key not in known and key.partition(".")[0] not in beside:
            raise unknown_name(file.place(*within, key), "key", key, (*known, *beside))
    values = dict(given)
    for name, allowed in schema.items():
        place, value = file.place(*within, allowed.name), mapping.get(allowed.name)
        if value is not None:
            values[name] = _checked(file, (*within, allowed.name), value, allowed)
        elif allowed.required:
            raise InputError(place, "is missing", f"set it to {allowed.allowed}")
    return cls(**values)


def mapping_at(file: YamlFile, *keys: str) -> dict[str, Any]:
    """What stands at `keys`; empty where nothing does."""
    found: Any = file.content
    for depth, key in enumerate(keys, 1):
        found = found.get(key)
        if found is None:
            return {}
        if not isinstance(found, dict):
            place = file.place(*keys[:depth])
            raise InputError(place, f"found {described(found)}, allowed: a mapping")
    return dict(found)


def _checked(file: YamlFile, keys: tuple[str, ...], value: Any, key: _Key) -> Any:
    place = file.place(*keys)
    if key.nested is not None:
        nested: Any = key.nested
        return fill(nested, file, keys)
    if key.choices:
        if value not in key.choices:
            raise unknown_name(place, "value", str(value), key.choices)
        return value
    if not key.holds(value):
        remedy = "put it in quotes" if key.allowed == "a text" and not _is_container(value) else ""
        raise InputError(place, f"found {described(value)}, allowed: {key.allowed}", remedy)
    if key.convert is Words:
        return Words(
            (name, item if isinstance(item, bool) else file.texts.get((*keys, name), item))
            for name, item in value.items()
        )
    return key.convert(value)


@functools.cache
def _schema(cls: type, given: frozenset[str]) -> dict[str, _Key]:
    """What each field of `cls` takes, by the field's name, but for those that are given."""
    hints = typing.get_type_hints(cls)
    schema = {}
    for field in dataclasses.fields(cls):
        if field.name in given:
            continue
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        name = field.metadata.get("key", field.name)
        if field.metadata.get("from_zero"):
            schema[field.name] = _Key(name, _is_natural, "a whole number, 0 or more", required)
        else:
            schema[field.name] = _key(name, hints[field.name], required)
    return schema


def _key(name: str, hint: Any, required: bool) -> _Key:
    members = [member for member in _members(hint) if member is not type(None)]
    kind = members[0]
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        return _Key(name, bool, f"one of {', '.join(choices)}", required, choices=choices)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _Key(name, _is_mapping, "a mapping", required, nested=kind)
    holds, allowed, convert = _KINDS[kind]
    return _Key(name, holds, allowed, required, convert=convert)


def _members(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_natural(value: Any) -> bool:
    return _is_int(value) and bool(value >= 0)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list)


_Holds = Callable[[Any], bool]


def _all(holds: _Holds, container: type) -> _Holds:
    """Whether a value is a list, or a mapping, whose items all hold."""

    def all_hold(value: Any) -> bool:
        if not isinstance(value, container):
            return False
        items: Any = value.values() if isinstance(value, dict) else value
        return all(map(holds, items))

    return all_hold


def _is_word(value: Any) -> bool:
    return value is not None and not _is_container(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


# By the field's type: what holds, how a message calls it, and how the value is kept.
_KINDS: dict[Any, tuple[_Holds, str, Callable[[Any], Any]]] = {
    str: (_is_text, "a text", str),
    bool: (lambda value: isinstance(value, bool), "true or false", bool),
    # Every count in our files is of something that there must be, but for those `from_zero`.
    int: (lambda value: _is_int(value) and value > 0, "a whole number above 0", int),
    float: (lambda value: _is_number(value) and value > 0, "a number above 0", float),
    tuple[str, ...]: (_all(_is_text, list), "a list of texts", tuple),
    tuple[Unchecked, ...]: (_all(_is_mapping, list), "a list of mappings", tuple),
    Words: (_all(_is_word, dict), "a mapping of names to texts or numbers", Words),
    Unchecked: (_is_mapping, "a mapping", Unchecked),
    dict[str, float]: (_all(_is_number, dict), "a mapping of names to numbers", dict),
}
