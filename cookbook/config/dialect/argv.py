"""TorchTitan's command line: write options as its flags, and read such flags."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.dialect.names import PACKAGE, Names
from cookbook.config.options import Options, Setting, Settings
from cookbook.config.stack import Option, Stack


def arguments(option: Option, value: Any) -> list[str]:
    """Return the argv words that set `option` to a checked `value`."""
    section, _, key = option.name.rpartition(".")
    if option.kind == "bool":
        return [f"--{section}.{key}" if value else f"--{section}.no_{key}"]
    if option.kind == "list" and not value:
        return []
    return [f"--{option.name}={option.as_text(value)}"]


def launch_options(description: str) -> dict[str, Any]:
    """Return the options that make TorchTitan load the cookbook's options and hooks."""
    return {
        Names.config_module: f"{PACKAGE}.job_config",
        Names.custom_import: PACKAGE,
        Names.description: description,
    }


def argv_of(stack: Stack, settings: Settings) -> list[str]:
    words = (arguments(stack.options[name], one.value) for name, one in settings.items())
    return [*itertools.chain(*words)]


def parse_argv(words: Sequence[str], place: str, stack: Stack) -> Options:
    """Parse `--section.key=value` and `--section.key value`; the last value of an option wins."""
    settings, left = dict[str, Setting](), list(words)
    while left:
        word = left.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            remedy = "TorchTitan's begin with --section.key, sbatch's go before the script"
            if (own := re.sub("=.*", "", word)) in ("--precision", "--ep-backend"):
                remedy = f"write {own[2:].replace('-', '_').upper()}=NAME before sbatch"
            raise InputError(place, f"found {word!r}", remedy)
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        section, _, key = name.rpartition(".")
        positive = f"{section}.{key.removeprefix('no_')}"
        is_negative = name not in stack.options and positive in stack.options
        option = stack.option(place, positive if is_negative else name)
        at = f"{place}: {option.name}"
        value: Any
        if option.kind == "bool":
            if equals:
                no = f"--{section}.no_{key}"
                raise InputError(at, f"takes no value, found {text!r}", f"write --{name} or {no}")
            value = not is_negative
        else:
            if not equals and not left:
                raise InputError(at, "has no value", f"write --{name}=VALUE")
            value = option.parse(at, text if equals else left.pop(0))
        settings[option.name] = Setting(value, at)
    return Options(stack, settings)
