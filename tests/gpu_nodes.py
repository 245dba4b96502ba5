"""Gives the nodes of the test cluster GPUs that nvidia-smi lists, and faults of single nodes.

An `nvidia-smi` first on PATH answers from files: those of all nodes, or a node's own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.recording_torchrun import install_recording_torchrun

_UUIDS = [f"GPU-{number}" for number in range(8)]
# What each of the queries answers on a node where all is well, by the name of its file.
WELL = {
    "gpus": "".join(f"NVIDIA B200, 10.0, 183359, 580.95.05, {uuid}\n" for uuid in _UUIDS),
    "states": "".join(f"{uuid}, {number}, 4, 0\n" for number, uuid in enumerate(_UUIDS)),
    "rows": "".join(f"{uuid}, No, No\n" for uuid in _UUIDS),
    "processes": "",
    "links": "".join(
        f"GPU {number}: NVIDIA B200 (UUID: {uuid})\n" + "\t Link 0: 50 GB/s\n\t Link 1: 50 GB/s\n"
        for number, uuid in enumerate(_UUIDS)
    ),
}
_NVIDIA_SMI = """\
#!/bin/sh
case "$*" in
  *query-gpu=name*) name=gpus ;;
  *query-gpu=uuid*) name=states ;;
  *remapped*) name=rows ;;
  *compute-apps*) name=processes ;;
  nvlink*) name=links ;;
esac
own="{folder}/$SLURMD_NODENAME"
[ ! -e "$own/hangs" ] || exec sleep 1000
[ -e "$own/$name" ] || own="{folder}/all"
cat "$own/$name"
"""
# A node's own file is read by the shell before each Python of that node.
_PYTHON = """\
#!/bin/sh
own="{folder}/$SLURMD_NODENAME/python"
[ ! -e "$own" ] || . "$own"
exec {python} "$@"
"""


@dataclass(frozen=True)
class GpuNodes:
    """The files that the stand-ins answer from."""

    folder: Path

    @classmethod
    def install(cls, folder: Path, binaries: Path) -> GpuNodes:
        """Put the stand-ins into `binaries`, beside a torchrun that only writes down its start."""
        install_recording_torchrun(binaries)
        nodes = cls(folder)
        for name, text in WELL.items():
            nodes.answer("all", name, text)
        programs = {"nvidia-smi": _NVIDIA_SMI, "python": _PYTHON}
        for name, text in programs.items():
            program = binaries / name
            program.write_text(text.format(folder=folder, python=sys.executable))
            program.chmod(0o755)
        return nodes

    def answer(self, node: str, name: str, text: str) -> None:
        """Have `node` answer the query called `name` with `text`."""
        (self.folder / node).mkdir(parents=True, exist_ok=True)
        (self.folder / node / name).write_text(text)

    def ecc_error(self, node: str) -> None:
        """An uncorrectable error in the memory of GPU 3."""
        self.answer(node, "states", WELL["states"].replace("GPU-3, 3, 4, 0", "GPU-3, 3, 4, 2"))

    def lose_gpu(self, node: str) -> None:
        """One GPU is gone."""
        self.answer(node, "gpus", "".join(WELL["gpus"].splitlines(keepends=True)[:7]))

    def hang(self, node: str) -> None:
        """nvidia-smi does not answer."""
        self.answer(node, "hangs", "")

    def before_python(self, node: str, text: str) -> None:
        """Shell commands before each Python of that node."""
        self.answer(node, "python", text)
