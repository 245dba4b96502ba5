"""TorchTitan's command line: options to words, and words to options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.options import Options, Setting, Settings
from cookbook.config.stack import Stack


def argv_of(stack: Stack, settings: Settings) -> list[str]:
    """The words that set `settings`, in their order."""
    return [
        word
        for name, setting in settings.items()
        for word in stack.options[name].arguments(setting.value)
    ]


def parse_argv(words: Sequence[str], place: str, stack: Stack) -> Options:
    """The options that TorchTitan arguments set, checked; of an option named twice, the last.

    Args:
        words: as they stand on a command line, `--section.key=value` or `--section.key value`.
        place: what an error names as the place of the words.
    """
    values: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            raise InputError(
                place, f"found {word!r}", "TorchTitan options start with --section.key"
            )
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        section, _, key = name.rpartition(".")
        positive = f"{section}.{key.removeprefix('no_')}"
        is_negative = name not in stack.options and positive in stack.options
        option = stack.option(place, positive if is_negative else name)
        at = f"{place}: {option.name}"
        if option.kind == "bool":
            if equals:
                no = f"--{section}.no_{key}"
                raise InputError(at, f"takes no value, found {text!r}", f"write --{name} or {no}")
            values[option.name] = not is_negative
        elif option.kind == "lists" and not equals:
            items = []
            while index < len(words) and not words[index].startswith("--"):
                items.append(words[index].split(","))
                index += 1
            values[option.name] = option.check(at, items)
        else:
            if not equals:
                if index == len(words):
                    raise InputError(at, "has no value")
                text = words[index]
                index += 1
            values[option.name] = option.parse(at, text)
    return Options(stack, _placed(values, place))


def _placed(values: Mapping[str, Any], place: str) -> Settings:
    return {name: Setting(value, f"{place}: {name}") for name, value in values.items()}
