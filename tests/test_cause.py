"""Which kind of failure a reason tells of."""

from __future__ import annotations

from pathlib import Path

import pytest

from cookbook.observe.cause import cause_of
from cookbook.observe.failure import find_reason
from cookbook.run.history import Cause

LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("rank 1: exitcode: -9 (Signal 9 (SIGKILL) received)", Cause.DEAD_RANK),
        ("rank 0: RuntimeError: [...] Connection closed by peer [127.0.0.2]:3", Cause.DEAD_RANK),
        (
            "rank 9: RuntimeError: NCCL error in: x.cpp:1, unhandled system error",
            Cause.DEAD_RANK,
        ),
        ("rank 9: RuntimeError: CUDA error: uncorrectable ECC error", Cause.DEAD_RANK),
        ("exit status 137", Cause.DEAD_RANK),
        ("ended by SIGKILL", Cause.DEAD_RANK),
        ("slurmstepd: *** STEP 2.0 ON w CANCELLED DUE TO NODE FAILURE", Cause.LOST_NODE),
        ("srun: error: Node failure on worker-1", Cause.LOST_NODE),
        (
            "srun: error: Task launch for StepId=2.1 failed on node worker-1: "
            "Communication connection failure",
            Cause.LOST_NODE,
        ),
        ("hang: no word from rank 3; rank 0: Watchdog caught collective", Cause.HANG),
        ("rank 2: RuntimeError: Timed out waiting 300000ms for recv", Cause.HANG),
        ("rank 0: OSError: [Errno 28] No space left on device", Cause.DISK_FULL),
        (
            "rank 0: RuntimeError: PytorchStreamWriter failed writing file data/1",
            Cause.DISK_FULL,
        ),
        ("rank 3: torch.OutOfMemoryError: CUDA out of memory. Tried", Cause.OUT_OF_MEMORY),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=2.0", Cause.OUT_OF_MEMORY),
        (
            "rank 0: FileNotFoundError: [Errno 2] No such file or directory: 'x'",
            Cause.MISSING_FILE,
        ),
        ("model.hf_assets_path: tokenizer.json is not there", Cause.MISSING_FILE),
        ("Unrecognized options: --training.step", Cause.WRONG_OPTION),
        ("rank 0: ValueError: needs more than 0", Cause.ERROR),
        ("exit status 1", Cause.ERROR),
        # Whatever srun made of it.
        ("rank 0: torch.distributed.checkpoint.api.CheckpointException", Cause.ERROR),
    ],
)
def test_the_cause_is_told_by_the_reason(reason: str, cause: Cause) -> None:
    assert cause_of(reason) is cause


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("out_of_memory.log", Cause.OUT_OF_MEMORY),
        ("nccl_timeout.log", Cause.HANG),
    ],
)
def test_the_cause_of_a_whole_log(log: str, cause: Cause) -> None:
    assert cause_of(find_reason(LOGS / log) or "") is cause
