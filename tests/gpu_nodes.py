"""Gives the nodes of the test cluster GPUs that NVML lists, and faults of single nodes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.run.excluded import read_excluded
from tests.programs import write_program
from tests.recording_torchrun import TorchrunRecord, install_recording_torchrun, read_records
from tests.slurm_cluster import SlurmCluster
from tests.stand_in_gpus import B200, FOLDER, write_gpus

# A node's own file is read by the shell before each Python of that node.
_PYTHON = """\
#!/bin/sh
own="{folder}/$SLURMD_NODENAME"
[ ! -e "$own/python" ] || . "$own/python"
[ -e "$own/gpus.json" ] || own="{folder}/all"
export STAND_IN_GPUS="$own/gpus.json" PYTHONPATH="{nvml}:$PYTHONPATH"
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
        write_gpus(folder / "all/gpus.json", [B200] * 8)
        program = binaries / "python"
        write_program(program, _PYTHON.format(folder=folder, nvml=FOLDER, python=sys.executable))
        return nodes

    def ecc_error(self, node: str) -> None:
        """Give GPU 3 an uncorrectable error in its memory."""
        gpus = [B200 | {"ecc": 2 if number == 3 else 0} for number in range(8)]
        write_gpus(self.folder / node / "gpus.json", gpus)

    def repair(self, node: str) -> None:
        """Give the node the GPUs that all have."""
        (self.folder / node / "gpus.json").unlink()

    def lose_gpu(self, node: str) -> None:
        """Take one GPU away."""
        write_gpus(self.folder / node / "gpus.json", [B200] * 7)

    def hang(self, node: str) -> None:
        """Have the driver give no answer."""
        write_gpus(self.folder / node / "gpus.json", hangs=True)

    def before_python(self, node: str, text: str) -> None:
        """Run shell commands before each Python of that node."""
        (self.folder / node).mkdir(parents=True, exist_ok=True)
        (self.folder / node / "python").write_text(text)


EP_8 = "--parallelism.expert_parallel_degree=8"


@dataclass
class Jobs:
    """Submits train_16b.sh to nodes whose GPUs are stand-ins."""

    cluster: SlurmCluster
    checkout: Path
    folder: Path
    gpus: GpuNodes

    @property
    def environment(self) -> dict[str, str]:
        return {
            "VENV": str(self.folder / "venv"),
            "COOKBOOK_RUNS": str(self.folder / "runs"),
            "TORCHRUN_RECORDS": str(self.folder / "records"),
            # The nodes' GPUs can be listed, and nothing can be computed on them.
            "COOKBOOK_PREFLIGHT": "nodes",
        }

    def submit(self, *options: str, script: Path | None = None, **changes: str) -> str:
        return self.cluster.submit(
            script or self.checkout / "train_16b.sh",
            EP_8,
            options=options,
            cwd=self.folder,
            env={**self.environment, **changes},
        )

    def log(self, job: str) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob(f"*-{job}.log"))

    def records(self) -> list[TorchrunRecord]:
        return read_records(self.folder / "records")

    def trained_on(self) -> list[tuple[int, str]]:
        """Restart and node of each torchrun."""
        return [(record.attempt, record.node) for record in self.records()]

    def left_out(self) -> dict[str, str]:
        return {one.node: one.reason for one in read_excluded(self.folder / "runs")}

    def status(self) -> dict[str, Any]:
        (path,) = self.folder.glob("runs/*/*/status.json")
        content: dict[str, Any] = json.loads(path.read_text())
        return content
