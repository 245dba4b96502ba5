"""Gives a test's process GPUs that NVML lists; `nvml_stand_in/pynvml.py` answers for them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.nvml_stand_in import pynvml

# First on a Python's path, it takes the place of nvidia-ml-py.
FOLDER = Path(pynvml.__file__).parent
B200 = {"name": "NVIDIA B200", "capability": [10, 0], "mib": 183359, "driver": "580.95.05"}


def write_gpus(file: Path, gpus: Sequence[dict[str, Any]] = (), **machine: Any) -> None:
    """Write what STAND_IN_GPUS names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"gpus": list(gpus), **machine}), encoding="utf-8")


def stand_in_gpus(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    gpus: Sequence[dict[str, Any]] = (),
    **machine: Any,
) -> None:
    """Have this process see `gpus`."""
    write_gpus(folder / "gpus.json", **({"gpus": gpus} | machine))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("STAND_IN_GPUS", str(folder / "gpus.json"))
