"""Jobs of train_16b.sh on a Slurm cluster whose nodes have stand-ins for GPUs, and what is left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.run.excluded import read_excluded
from tests.gpu_nodes import GpuNodes
from tests.recording_torchrun import TorchrunRecord, read_records
from tests.slurm_cluster import SlurmCluster

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
