"""One TorchTitan option: what values it takes, and the words of a command line that set it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.yamlfile import control_character, described


@dataclass(frozen=True)
class Option:
    """One TorchTitan option, e.g. `training.steps`, as the stack's JobConfig declares it."""

    name: str
    kind: str
    default: Any
    optional: bool = False
    choices: tuple[str, ...] = ()

    def check(self, place: str, value: Any) -> Any:
        """`value` as TorchTitan would hold it; another type or choice is an input error."""
        if value is None and self.optional:
            return None
        if self.kind == "choice":
            if value not in self.choices:
                raise unknown_name(place, "value", str(value), self.choices)
            return value
        if self.kind == "list" and isinstance(value, str):
            value = value.split(",") if value else []
        if self.kind == "float" and _KINDS["int"][0](value):
            value = float(value) if abs(value) < 1e300 else math.inf
        holds, allowed = _KINDS[self.kind]
        if not holds(value):
            quotes = self.kind == "str" and isinstance(value, bool | int | float)
            remedy = "put it in quotes" if quotes else ""
            raise InputError(place, f"found {described(value)}, allowed: {allowed}", remedy)
        if self.optional and value == "None":
            raise InputError(place, "found the text 'None', which TorchTitan reads as nothing")
        if self.kind == "list" and not value and self.default:
            # TorchTitan reads an empty word as a list of one empty name.
            raise InputError(place, "found an empty list, which TorchTitan cannot be given here")
        for items in {"list": [value], "lists": value}.get(self.kind, ()):
            if any("," in item or item == "" for item in items):
                raise InputError(
                    place,
                    f"found {items!r}: items may hold no comma and not be empty",
                    "split the item",
                )
            # The words of a list of lists stand by themselves, where they would be options.
            if self.kind == "lists" and (not items or items[0].startswith("-")):
                raise InputError(
                    place, f"found {items!r}: a list may not be empty or begin with '-'"
                )
        return value

    def parse(self, place: str, text: str) -> Any:
        """The value that `text` from a command line stands for."""
        value: Any = text
        if self.optional and text in ("None", "null"):
            return None
        try:
            # Python reads the digits of every script as numbers.
            if self.kind == "int" and text.isascii():
                value = int(text)
            elif self.kind == "float" and text.isascii():
                value = float(text)
            elif self.kind == "bool" and text.lower() in ("true", "false"):
                value = text.lower() == "true"
            elif self.kind == "lists":
                value = json.loads(text)
        except (ValueError, RecursionError):
            pass
        return self.check(place, value)

    def arguments(self, value: Any) -> list[str]:
        """The argv words that set this option to a checked `value`."""
        section, _, key = self.name.rpartition(".")
        if self.kind == "bool":
            return [f"--{section}.{key}" if value else f"--{section}.no_{key}"]
        if self.kind == "lists" and value is not None:
            return [f"--{self.name}", *(",".join(items) for items in value)]
        if self.kind == "list" and not value:
            return []
        return [f"--{self.name}={','.join(value) if self.kind == 'list' else value}"]


def _is_text(value: Any) -> bool:
    """Whether `value` is a text that can be a word of a command line."""
    return isinstance(value, str) and not control_character(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, float) and math.isfinite(value), "a number"),
    "str": (_is_text, "a text in UTF-8 without control characters"),
    "list": (_is_texts, "a list of texts"),
    "lists": (
        lambda value: isinstance(value, list) and all(_is_texts(item) for item in value),
        "a list of lists of texts",
    ),
}
