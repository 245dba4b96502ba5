"""Fill dataclasses from YAML mappings by pydantic; errors name file, line, key and allowed values.

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
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cookbook.base.errors import InputError, described, unknown_name
from cookbook.base.yamlfile import YamlFile

T = typing.TypeVar("T")
Text = Annotated[str, Field(strict=True, min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, gt=0)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Texts = tuple[Text, ...]
Numbers = dict[str, Annotated[float, Field(strict=True)]]
# A mapping whose values somebody else checks.
Unchecked = dict[str, Any]
# Names with a word each, for a shell: a number stands as it was typed, `3.10` and not 3.1.
Words = dict[str, str | bool]

# The allowed values, by the type of pydantic's error.
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
        if hints[fields[key]] == Words and isinstance(value, dict):
            value = {
                name: item if isinstance(item, bool) else file.texts.get((*within, key, name), item)
                for name, item in value.items()
            }
        values[fields[key]] = value
    try:
        filled: T = _adapter(cls).validate_python(values)  # type: ignore[arg-type]
        return filled
    except ValidationError as error:
        keys = {name: key for key, name in fields.items()}
        raise _input_error(cls, file, within, keys, error) from None


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    cls.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return TypeAdapter(cls)


def _input_error(
    cls: Any, file: YamlFile, within: tuple[str, ...], keys: dict[str, str], found_by: Any
) -> InputError:
    """Return the first of pydantic's errors in our words; unknown keys before missing ones."""
    errors = found_by.errors(include_url=False)
    error = min(errors, key=lambda one: one["type"] != "unexpected_keyword_argument")
    kind = error["type"]
    # The branches of a union (`str`, `bool`) end the path, and are no keys.
    first, *rest = [str(key) for key in error["loc"] if key not in ("str", "bool")]
    place, found = file.place(*within, keys.get(first, first), *rest), error["input"]
    if kind == "missing":
        return InputError(place, "is missing", "add it")
    if kind == "unexpected_keyword_argument":
        for name in filter(lambda key: isinstance(key, str), error["loc"][:-1]):
            hint = typing.get_type_hints(cls)[name]
            cls = next(filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))
        known = [field.name for field in dataclasses.fields(cls)]
        return unknown_name(place, "key", rest[-1], known)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return unknown_name(place, "value", str(found), choices)
    allowed = _ALLOWED.get(kind, "a mapping").format(**error.get("ctx", {}))
    if kind == "dataclass_type":
        hint = typing.get_type_hints(cls)[first]
        inner = next(filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))
        allowed += f" of {', '.join(field.name for field in dataclasses.fields(inner))}"
    is_unquoted = allowed == "a text" and not isinstance(found, dict | list | str | None)
    remedy = "put it in quotes" if is_unquoted else ""
    return InputError(place, f"found {described(found)}, allowed: {allowed}", remedy)


def mapping_at(file: YamlFile, *keys: str) -> dict[str, Any]:
    """Return the mapping at `keys`; empty where there is nothing."""
    found: Any = file.content
    for depth, key in enumerate(keys, 1):
        found = found.get(key)
        if found is None:
            return {}
        if not isinstance(found, dict):
            place = file.place(*keys[:depth])
            raise InputError(place, f"found {described(found)}, allowed: a mapping")
    return dict(found)
