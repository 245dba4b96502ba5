"""TorchTitan's options as YAML files hold them: sections beside a file's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import YamlFile
from cookbook.config.options import Setting, Settings
from cookbook.config.stack import load_stack


def sections() -> frozenset[str]:
    """The names of TorchTitan's sections: keys that may stand at the top of a file."""
    return load_stack().sections


def read_sections(file: YamlFile) -> Settings:
    """The options of all sections at the top of `file`."""
    found = {
        key: value for key, value in file.content.items() if key.partition(".")[0] in sections()
    }
    return read_options(file, found)


def read_options(
    file: YamlFile, mapping: Mapping[str, Any], within: tuple[str, ...] = (), prefix: str = ""
) -> Settings:
    """Options by dotted name; `a: {b: 1}` and `a.b: 1` mean the same.

    Args:
        within: the keys of `mapping` in the file.
        prefix: what stands before every name, with its dot.
    """
    settings: dict[str, Setting] = {}
    _read(file, mapping, within, prefix, settings)
    return settings


def _read(
    file: YamlFile,
    mapping: Mapping[str, Any],
    keys: tuple[str, ...],
    prefix: str,
    settings: dict[str, Setting],
) -> None:
    stack = load_stack()
    for key, value in mapping.items():
        name, below = f"{prefix}{key}", (*keys, key)
        place = file.place(*below)
        if isinstance(value, dict) and name not in stack.options:
            if not any(option.startswith(f"{name}.") for option in stack.options):
                stack.setting(place, name)
            _read(file, value, below, f"{name}.", settings)
            continue
        option = stack.setting(place, name)
        if name in settings:
            raise InputError(place, f"{name} stands twice, first at {settings[name].place}")
        settings[name] = Setting(option.check(place, value), place)
