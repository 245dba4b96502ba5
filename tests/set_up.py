"""Runs the setup.sh of a copy of this checkout without a network.

The packages of the environment that runs the tests stand in for the index: the Python that setup.sh
is given adds them to each environment that it makes, so that pip finds every pin in place. Wheels
with little more than a name stand in for FlashAttention-4's packages, which few test machines have.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.install.attention import flash_attention_pins
from tests.checkout import copy_checkout
from tests.programs import write_program
from tests.stand_in_gpus import FOLDER, write_gpus
from tests.waiting import HANG_S


@dataclass
class Checkout:
    """A copy of the checkout and the environment that its setup.sh runs in."""

    folder: Path
    python: Path
    environment: dict[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "HF_", "PYTHON", "CUDA", "TORCH_", "NVSHMEM"))
        }
        kept |= {"PIP_NO_INDEX": "1", "PYTHON": str(self.python), "TERM": "dumb"}
        if shutil.which("uv"):  # a real uv would download all packages, for it ignores `.pth` files
            self.has_uv(status=1)
        kept["PATH"] = f"{self.programs}:{kept['PATH']}"
        # The tests look for lines; pytest-xdist gives its workers a narrow terminal.
        kept["COLUMNS"] = "120"
        return kept | self.environment

    @property
    def programs(self) -> Path:
        return self.folder.parent / "programs"

    def has_uv(self, status: int) -> None:
        """Have a `uv` on PATH that adds its arguments to `programs/uv.log` and exits."""
        self.programs.mkdir(exist_ok=True)
        program = f'#!/bin/sh\necho "$@" >>"{self.programs}/uv.log"\nexit {status}\n'
        write_program(self.programs / "uv", program)

    def has_gpus(self, *gpus: dict[str, Any]) -> None:
        """Have the machine's driver list these GPUs; without a call there is no driver."""
        file = self.folder.parent / "gpus.json"
        write_gpus(file, gpus)
        self.environment["STAND_IN_GPUS"] = str(file)

    def setup(self, *options: str) -> subprocess.CompletedProcess[str]:
        running = self.start(*options)
        output, _ = running.communicate(timeout=HANG_S)
        return subprocess.CompletedProcess(running.args, running.returncode, output)

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.folder / "setup.sh"), *options],
            cwd="/",
            env=self.variables(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def exists(self, path: str) -> bool:
        return (self.folder / path).exists()


# The files by which FlashAttention-4's packages are recognized.
WHEEL_FILES = {
    "flash-attn-4": ["flash_attn/cute/__init__.py"],
}


def write_wheel(
    folder: Path, name: str, version: str, files: Iterable[str] = (), text: str = ""
) -> None:
    """A wheel of a package that holds nothing but its version, and `files` with a text."""
    package = name.replace("-", "_")
    about = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}.py", f"VERSION = {version!r}\n")
        for file in files:
            executable = zipfile.ZipInfo(file)
            executable.external_attr = 0o100755 << 16
            wheel.writestr(executable, text)
        of_python = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        named = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        for file, said in {"METADATA": named, "WHEEL": of_python, "RECORD": ""}.items():
            wheel.writestr(f"{about}/{file}", said)


PYTHON = """#!/bin/sh
# Stands in for the index: environments made with it see the packages of the tests' own, pip too.
if [ "$1 $2" = "-m venv" ]; then
  "{real}" -m venv --without-pip "$3" || exit
  for folder in "$3"/lib/python*/site-packages; do
    printf '%s\\n' "{nvml}" "{packages}" >"$folder/stand-in.pth"
  done
  if [ -n "$HANG" ]; then
    echo $$ >"$HANG"
    exec sleep 600
  fi
else
  exec "{real}" "$@"
fi
"""


def copy_for_setup(tmp_path: Path) -> Checkout:
    """A copy of the checkout, and a Python that its setup.sh makes environments with."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for pin in flash_attention_pins():
        write_wheel(wheels, pin.name, pin.value, WHEEL_FILES.get(pin.name, ()))
    python = tmp_path / "python"
    packages = sysconfig.get_path("purelib")
    write_program(python, PYTHON.format(real=sys.executable, packages=packages, nvml=FOLDER))
    folder = copy_checkout(tmp_path / "check out")
    return Checkout(folder, python, {"PIP_FIND_LINKS": str(wheels)})
