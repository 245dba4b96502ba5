"""Fill dataclasses from YAML mappings; errors name file, line, key and what is allowed.

    @dataclass(frozen=True)
    class Container:
        image: Text
        mounts: Texts = ()

    container = fill(Container, file, ("container",))

A field without a default is required. `field(metadata={"key": name})` is filled by another key.
A field that `fill` is given is no key of the file.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from cookbook.base.errors import InputError, described, unknown_name
from cookbook.base.yamlfile import YamlFile

T = typing.TypeVar("T")
_Holds = Callable[[Any], bool]


def _check(allowed: str, holds: _Holds) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("allowed", "{allowed}", {"allowed": allowed})
        return value

    return check


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _is_word(value: Any) -> bool:
    return value is not None and not isinstance(value, dict | list)


def _are(holds: _Holds, *containers: type) -> _Holds:
    """Whether a value is a list, or a mapping, whose items all hold."""

    def are(value: Any) -> bool:
        if not isinstance(value, containers):
            return False
        items: Any = value.values() if isinstance(value, dict) else value
        return all(map(holds, items))

    return are


class _Mapping(dict[str, Any]):
    allowed = "a mapping"
    holds: _Holds = staticmethod(lambda value: isinstance(value, dict))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        def check(value: Any) -> Any:
            return cls(_check(cls.allowed, cls.holds)(value))

        return core_schema.no_info_plain_validator_function(check)


class Words(_Mapping):
    """Names with a word each, for a shell: a number stands as it was typed, `3.10` and not 3.1."""

    allowed = "a mapping of names to texts or numbers"
    holds = staticmethod(_are(_is_word, dict))


class Unchecked(_Mapping):
    """A mapping whose values somebody else checks."""


Text = Annotated[str, BeforeValidator(_check("a text", _is_text))]
Flag = Annotated[bool, BeforeValidator(_check("true or false", lambda v: isinstance(v, bool)))]
Count = Annotated[
    int, BeforeValidator(_check("a whole number above 0", lambda v: _is_whole(v) and v > 0))
]
Natural = Annotated[
    int, BeforeValidator(_check("a whole number, 0 or more", lambda v: _is_whole(v) and v >= 0))
]
Number = Annotated[
    float, BeforeValidator(_check("a number above 0", lambda v: _is_number(v) and v > 0))
]
Texts = Annotated[
    tuple[str, ...], BeforeValidator(_check("a list of texts", _are(_is_text, list, tuple)))
]
Mappings = Annotated[
    tuple[Unchecked, ...],
    BeforeValidator(_check("a list of mappings", _are(_Mapping.holds, list, tuple))),
]
Numbers = Annotated[
    dict[str, float],
    BeforeValidator(_check("a mapping of names to numbers", _are(_is_number, dict))),
]


def fill(
    cls: type[T],
    file: YamlFile,
    within: tuple[str, ...] = (),
    beside: Collection[str] = (),
    **given: Any,
) -> T:
    """Make a `cls` of the mapping at `within` of `file`.

    Args:
        beside: further keys that may stand there (`a` allows `a.b` too); somebody else reads them.
        given: fields whose values are known already, and which are no keys.
    """
    fields = {
        field.metadata.get("key", field.name): field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in given
    }
    hints = typing.get_type_hints(cls)
    values = dict(given)
    for key, value in mapping_at(file, *within).items():
        if key not in fields and key.partition(".")[0] not in beside:
            raise unknown_name(file.place(*within, key), "key", key, (*fields, *beside))
        if key not in fields or value is None:
            continue
        values[fields[key]] = value
        if hints[fields[key]] is Words and isinstance(value, dict):
            values[fields[key]] = {
                name: item if isinstance(item, bool) else file.texts.get((*within, key, name), item)
                for name, item in value.items()
            }
    try:
        filled: T = _adapter(cls).validate_python(values)  # type: ignore[arg-type]
        return filled
    except ValidationError as error:
        keys = {name: key for key, name in fields.items()}
        raise _input_error(cls, file, within, keys, error) from None


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    cls.__pydantic_config__ = config
    return TypeAdapter(cls)


def _input_error(
    cls: Any, file: YamlFile, within: tuple[str, ...], keys: dict[str, str], found_by: Any
) -> InputError:
    """Return the first of pydantic's errors in our words; unknown keys before missing ones."""
    errors = found_by.errors(include_url=False)
    error = min(errors, key=lambda one: one["type"] != "unexpected_keyword_argument")
    first, *rest = map(str, error["loc"])
    place, found = file.place(*within, keys.get(first, first), *rest), error["input"]
    match error["type"]:
        case "unexpected_keyword_argument":
            for name in error["loc"][:-1]:
                hint = typing.get_type_hints(cls)[name]
                cls = next(filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))
            known = [field.name for field in dataclasses.fields(cls)]
            return unknown_name(place, "key", rest[-1], known)
        case "missing":
            return InputError(place, "is missing", "add it")
        case "literal_error":
            choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
            return unknown_name(place, "value", str(found), choices)
    allowed = error.get("ctx", {}).get("allowed", "a mapping")
    remedy = "put it in quotes" if allowed == "a text" and _is_word(found) else ""
    return InputError(place, f"found {described(found)}, allowed: {allowed}", remedy)


def mapping_at(file: YamlFile, *keys: str) -> dict[str, Any]:
    """The mapping at `keys`; empty where there is nothing."""
    found: Any = file.content
    for depth, key in enumerate(keys, 1):
        found = found.get(key)
        if found is None:
            return {}
        if not isinstance(found, dict):
            place = file.place(*keys[:depth])
            raise InputError(place, f"found {described(found)}, allowed: a mapping")
    return dict(found)
