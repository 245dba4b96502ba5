"""Reads a command line with the pinned TorchTitan's ConfigManager."""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch


def parse(words: Sequence[str]) -> Mapping[str, Any]:
    """Every option of the JobConfig that TorchTitan reads from `words`, by dotted name."""
    return _parse(tuple(words))


@functools.cache
def _parse(words: tuple[str, ...]) -> Mapping[str, Any]:
    # TorchTitan warns of every tokenizer that is not on this machine.
    logging.getLogger().setLevel(logging.ERROR)
    from torchtitan.config import ConfigManager
    from tyro import _docstrings

    try:
        # Help texts, read from sources, take four fifths of the time and change no value.
        with patch.object(_docstrings, "get_field_docstring", lambda *_, **__: None):
            config = ConfigManager().parse_args(list(words))
    except SystemExit as error:
        raise AssertionError(f"TorchTitan refuses {words}") from error
    return dict(_flat(config, ""))


def _flat(section: Any, prefix: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            options += _flat(value, f"{name}.")
        else:
            options.append((name, value))
    return options


def typed(options: Mapping[str, Any]) -> dict[str, str]:
    """Values as texts that tell 1 from 1.0 and from true, for comparisons."""
    return {name: json.dumps(value) for name, value in options.items()}
