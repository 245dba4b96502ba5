"""Makes the training stack seem to be installed where the driver is tested without it."""

import importlib.util
from pathlib import Path


def stack_packages(folder: Path) -> str:
    """A folder for PYTHONPATH: an empty torchao where this Python has none, else nothing.

    A job is refused where a package is missing that its precision needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("torchao") is None:
        (folder / "torchao").mkdir(exist_ok=True)
        (folder / "torchao/__init__.py").touch()
    return str(folder)
