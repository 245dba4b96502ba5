"""Locate this Python's packages on disk: importing them would load the GPU driver."""

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.config.pins import read_pins

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
# Import names that differ from the package name by more than case and hyphens.
_IMPORT_NAMES = {"PyYAML": "yaml", "nvidia-ml-py": "pynvml"}


def explain_missing(error: ModuleNotFoundError) -> Exception:
    """Return an InputError that recommends setup.sh if the missing module is a pinned package.

    Otherwise the cookbook has a bug: return `error` unchanged, to show its traceback.
    """
    names = [pin.name for pin in read_pins()]
    if error.name not in {_IMPORT_NAMES.get(x, x.lower().replace("-", "_")) for x in names}:
        return error
    found = f"{error.name} is not installed"
    venv = os.environ.get("VENV")
    if venv and not Path(venv, "bin/python").exists():
        found += f", and VENV={venv} holds no Python"
    set_up = f"run: bash {shlex.quote(str(ROOT / 'setup.sh'))}"
    return InputError(sys.executable, found, f"{set_up}, with VENV unset" if venv else set_up)


def package_folder(name: str, path: Sequence[str] = sys.path) -> Path | None:
    """Return the folder of the package `name`, such as `a.b`; None if it is not on `path`."""
    folders = (Path(entry, *name.split(".")) for entry in path)
    return next(filter(Path.is_dir, folders), None)


def find_distribution(name: str, path: Sequence[str] = sys.path) -> Distribution | None:
    """Return pip's metadata for the package `name`; None if it is not installed."""
    return next(iter(distributions(name=name, path=list(path))), None)
