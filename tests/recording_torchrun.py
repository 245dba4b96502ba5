"""Makes a `torchrun` that writes down how it was started.

The environment tells it where: TORCHRUN_RECORDS, the folder of records.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

RECORDED = ("SLURM", "SRUN_", "MASTER_", "NCCL_", "NVSHMEM_", "UCX_", "COOKBOOK_", "CUDA_")
# What shapes a training process beside that: its libraries, its threads, its virtual environment.
ALSO_RECORDED = ("WANDB_", "TORCH", "PYTORCH_", "OMP_", "HF_", "PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class TorchrunRecord:
    """One start of torchrun: on which node, in which attempt of which job, with what."""

    job_id: str
    attempt: int
    node: str
    cwd: str
    argv: list[str]
    environment: dict[str, str]

    def option(self, name: str) -> str:
        """The value of torchrun's option `--name=value`."""
        (found,) = [word.partition("=")[2] for word in self.argv if word.startswith(f"{name}=")]
        return found


def install_recording_torchrun(folder: Path) -> Path:
    """Put the recording `torchrun` into `folder`, for a test to place first on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "torchrun"
    # -I and -S: what it records must not change how it starts, and 32 of them start at once.
    program.write_text(
        f"#!{sys.executable} -IS\n"
        f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r}, run_name='__main__')\n"
    )
    program.chmod(0o755)
    return program


def read_records(folder: Path) -> list[TorchrunRecord]:
    """Every start so far, by job, attempt and node; a second start on a node is a second record."""
    records = [TorchrunRecord(**json.loads(path.read_text())) for path in folder.glob("*.json")]

    def key(one: TorchrunRecord) -> tuple[int, int, int]:
        return int(one.job_id), one.attempt, int(one.node.rpartition("-")[2])

    return sorted(records, key=key)


def _record() -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(RECORDED + ALSO_RECORDED)
    }
    record = TorchrunRecord(
        job_id=os.environ.get("SLURM_JOB_ID", "0"),
        attempt=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        node=os.environ.get("SLURMD_NODENAME", "local-0"),
        cwd=str(Path.cwd()),
        argv=sys.argv[1:],
        environment=environment,
    )
    folder = Path(os.environ["TORCHRUN_RECORDS"])
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{record.job_id}.{record.attempt}.{record.node}.{time.time_ns()}"
    # Written whole, since the test may read while other nodes still write.
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(asdict(record), indent=1))
    temporary.rename(folder / f"{name}.json")


if __name__ == "__main__":
    _record()
