"""TorchTitan's options as YAML files hold them: sections beside a file's own keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.schema import Words
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
            raise InputError(place, f"{name} stands twice, first at {settings[name].origin}")
        settings[name] = Setting(option.check(place, value), place)


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]")
# Bash does not let anyone set most of these; the scripts need the others for themselves
# (tests/test_environment.py holds the list to the templates).
_OF_BASH = frozenset(
    {"UID", "EUID", "PPID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO", "BASH_ENV", "ENV", "IFS"}
)
_OF_SCRIPTS = frozenset(
    {"AGAIN", "ANSWER", "ASKED", "ATTEMPT", "ATTEMPT_ARGS", "CELL", "CELL_DIR", "CHOSEN_ARGS"}
    | {"EP_BACKEND", "HEAD_ADDRESS", "HEAD_NODE", "INTERRUPTED", "JOB", "LOG_RANK", "NUM_NODES"}
    | {"PATH", "PRECISION", "PYTHONPATH", "PYTHONUNBUFFERED", "RDZV_ENDPOINT", "RECIPE", "RESOLVED"}
    | {"RESTARTS", "SHOWN_RANKS", "STATUS", "TOLD", "TRAINING", "WITHOUT_STEP"}
    | {"SRUN", "SUBMITTED", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "TORCHRUN", "TRAIN_ARGS"}
    | {"TRAIN_NODES", "VENV", "WANDB_RUN_NAME"}
)
RESERVED = _OF_BASH | _OF_SCRIPTS
_RESERVED_PREFIXES = ("SLURM_", "COOKBOOK_", "SUBMITIT_")


def check_environment(file: YamlFile, key: str, words: Words) -> None:
    """Refuse variables that a job cannot export, and values that would not mean what they say."""
    check_variables(file, key, words)
    for name, word in words.items():
        if isinstance(word, str) and _EXPANSION.search(word):
            raise InputError(
                file.place(key, name),
                f"found {word!r}, and values are exported as they stand: nothing is expanded",
                "write the full value, or export it in a file that the cluster's `source` names",
            )


def check_variables(file: YamlFile, key: str, names: Iterable[object]) -> None:
    """Refuse what is not a variable's name, or is the name of a variable of the scripts."""
    for name in names:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise InputError(file.place(key), f"{name!r} is not the name of a variable")
        if name in RESERVED or name.startswith(_RESERVED_PREFIXES):
            raise InputError(
                file.place(key, name), "is a variable of bash or of the scripts", "leave it out"
            )


def exported(words: Words) -> dict[str, str]:
    """The texts that a shell exports; YAML's true is 1."""
    return {
        name: str(int(word)) if isinstance(word, bool) else word for name, word in words.items()
    }
