"""Why an attempt failed: a rank's exception, the most telling line, or the rank that stopped."""

import json
from pathlib import Path

import pytest

from cookbook.observe.failure import cause_of, describe_stacks, find_cause, find_reason
from cookbook.run.folder import Attempt
from cookbook.run.status import Cause

LOGS = Path(__file__).parent / "logs"
TITAN = "[titan] 2026-11-20 18:29:22,279 - root"
REFUSAL = "asked for precision mine, but what is active is mxfp8"
TRACEBACK = "Traceback (most recent call last):"
MISSING = "ModuleNotFoundError: No module named 'safetensors'"
FAILED = "E1120 18:40:01.123 4117 api.py:984] failed (exitcode: {}) local_rank: {} (pid: 5)"
EXITED = "srun: error: worker-0: task 0: Exited with exit code 1"
CANCELLED = "slurmstepd: error: *** JOB 7 ON worker-0 CANCELLED AT 2026-11-20 DUE TO TIME LIMIT ***"


def reason_of(tmp_path: Path, *lines: str) -> str | None:
    (tmp_path / "train.log").write_text("\n".join(lines))
    return find_reason(tmp_path / "train.log")


def test_the_reasons_of_real_logs() -> None:
    reason = find_reason(LOGS / "out_of_memory.log") or ""
    assert reason.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert len(reason) <= 240
    assert find_reason(LOGS / "h200_stall.log") is None
    assert find_reason(LOGS / "none") is None


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
GLOO += "Timed out waiting 5000ms for recv operation to complete"
NCCL = "[rank{0}]:[E1120 18:40:01.123456789 ProcessGroupNCCL.cpp:688] [Rank {0}] Watchdog caught "
NCCL += "collective operation timeout: WorkNCCL(SeqNum=4711, OpType=ALLTOALL_BASE)"


@pytest.mark.parametrize(
    "form", [f"[rank{{0}}]: {TRACEBACK}\n[rank{{0}}]: RuntimeError: {GLOO}", NCCL]
)
@pytest.mark.parametrize(
    ("world", "hung", "expected"),
    [
        (4, {2}, "hang: no word from rank 2; rank "),
        (16, {3, 11}, "hang: no word from rank 3, 11; rank "),
        # Most were ended before they could print: who hung is unknown.
        (16, set(range(1, 16)), "hang, seen by rank 0: "),
    ],
)
def test_a_hang_is_not_blamed_on_the_rank_that_reports_it(
    tmp_path: Path, form: str, world: int, hung: set[int], expected: str
) -> None:
    victims = [rank for rank in range(world) if rank not in hung]
    for rank in range(world):
        # Eight ranks a node; which node has which ranks does not follow from torchrun's folders.
        folder = tmp_path / f"ranks/4711_0_{'ab'[rank // 8]}/attempt_0/{rank % 8}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("step: 1\n")
        text = form.format(rank) if rank in victims else "a warning"
        (folder / "stderr.log").write_text(f"{text}\n")
    (tmp_path / "train.log").write_text(f"[rank0]:{form.format(0)}\n" if 0 in victims else "")
    cause, reason = find_cause(tmp_path, 1)
    assert cause is Cause.HANG and reason.startswith(expected)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        # The last exception of a chain ended the process; errors of other ranks follow from one.
        (
            [
                *(f"[rank8]:{TRACEBACK}", "[rank8]:RuntimeError: Connection closed by peer"),
                *(f"[rank0]:[rank0]: {TRACEBACK}", "[rank0]:[rank0]: KeyError: 'x'", ""),
                "[rank0]:During handling of the above exception, another exception occurred:",
                *(f"[rank0]:{TRACEBACK}", '[rank0]:  File "x"', "[rank0]:OSError: no such disk"),
                *(f"[rank16]:{TRACEBACK}", "[rank16]:ValueError: something later", EXITED),
            ],
            "rank 0: OSError: no such disk",
        ),
        # torchrun ends the other ranks of a node.
        (
            [FAILED.format(-15, 0), FAILED.format(-9, 5), EXITED],
            "failed (exitcode: -9) local_rank: 5 (pid: 5)",
        ),
        # A progress bar stands before it.
        (
            [f"\rGenerating: 9 examples\r{TRACEBACK}\r", "  x\r", "OSError: disk full\r"],
            "OSError: disk full",
        ),
    ],
)
def test_the_reason_on_a_console(tmp_path: Path, lines: list[str], reason: str) -> None:
    assert reason_of(tmp_path, *lines) == reason


@pytest.mark.parametrize(
    "line",
    [
        "train.sh: EP_BACKEND 'deep' is none of standard, deepep",
        "/var/spool/slurmd/job7/slurm_script: line 40: torchrun: command not found",
        CANCELLED,
        "srun: error: Node failure on worker-3",
    ],
)
def test_reasons_from_outside_python(tmp_path: Path, line: str) -> None:
    assert reason_of(tmp_path, "starting", line, EXITED) == line


@pytest.mark.parametrize(
    ("line", "code", "cause"),
    [
        ("srun: error: h200: task 0: Killed", 137, Cause.DEAD_RANK),
        ("srun: error: w-[0-1]: tasks 0-1: Bus error (core dumped)", 135, Cause.DEAD_RANK),
        ("srun: error: h200: task 0: Exited with exit code 2", 2, Cause.WRONG_OPTION),
        ("slurmstepd: error: execve(): torchrun: No such file or directory", 2, Cause.MISSING_FILE),
    ],
)
def test_torchrun_itself_ends(tmp_path: Path, line: str, code: int, cause: Cause) -> None:
    others = [CANCELLED.replace("JOB 7", "STEP 7.0").replace(" DUE TO TIME LIMIT", ""), EXITED]
    (tmp_path / "train.log").write_text("\n".join([line, *others]))
    assert find_cause(tmp_path, code) == (cause, line)


def test_the_log_of_a_rank_that_the_console_did_not_show(tmp_path: Path) -> None:
    stderr = tmp_path / "ranks" / "7_0_x" / "attempt_0" / "5" / "stderr.log"
    stderr.parent.mkdir(parents=True)
    stderr.write_text(f"[rank5]: {TRACEBACK}\n[rank5]: OSError: disk full\n")
    (tmp_path / "train.log").write_text(FAILED.format(1, 5))
    assert find_reason(tmp_path) == "rank 5: OSError: disk full"


@pytest.mark.parametrize(
    "prefix", ["", f"{TITAN} - ERROR - ", f"[rank0]:[rank0]: {TITAN} - ERROR - "]
)
@pytest.mark.parametrize("tail", ["", f"[rank8]:{TITAN} - INFO - x", " \x1b[39m\r"])
def test_a_refusal_wins_over_its_consequences(tmp_path: Path, prefix: str, tail: str) -> None:
    reason_of(
        tmp_path,
        f"[rank8]:{TRACEBACK}",
        "[rank8]:torch.OutOfMemoryError: CUDA out of memory",
        f"{prefix}cookbook refuses: {REFUSAL}{tail}",
        CANCELLED,
    )
    assert find_cause(tmp_path, 1) == (Cause.WRONG_OPTION, REFUSAL)


def raised(
    attempt: Path, rank: int, time: int, message: str, stack: str = "", node: int = 0
) -> None:
    path = attempt / f"ranks/{node}_x/attempt_0/{rank}/error.json"
    path.parent.mkdir(parents=True)
    extra = {"py_callstack": stack, "timestamp": str(time)}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def test_the_earliest_exception_is_the_cause(tmp_path: Path) -> None:
    raised(tmp_path, 0, 1001, "RuntimeError: [gloo] Connection closed by peer")
    raised(tmp_path, 1, 1003, "ValueError: later")
    raised(tmp_path, 2, 1002, "ValueError: expert 3\ngot no tokens")
    console = f"[rank0]:{TRACEBACK}\n[rank0]:KeyError: 'on the console'\n{EXITED}\n"
    (tmp_path / "train.log").write_text(console)
    reason = "rank 2: ValueError: expert 3 got no tokens"
    assert find_cause(tmp_path, 1) == (Cause.ERROR, reason)
    # A kill leaves no error.json, and may be why the others fail.
    (tmp_path / "train.log").write_text(f"{console}slurmstepd: error: Detected 1 oom_kill event")
    assert find_cause(tmp_path, 1)[0] is Cause.OUT_OF_MEMORY


def test_of_several_nodes_a_local_rank_is_not_named(tmp_path: Path) -> None:
    for node in range(2):
        raised(tmp_path, 0, 1000 - node, f"ValueError: node {node}", node=node)
    assert find_reason(tmp_path) == "ValueError: node 1"


@pytest.mark.parametrize(
    ("message", "stack", "cause"),
    [
        (f"CheckpointFailedError: save failed on rank 0, 1: {MISSING}", "", Cause.MISSING_MODULE),
        ("AssertionError", "torchtitan/train.py, line 327, in __init__", Cause.WRONG_OPTION),
        ("AssertionError: x", "torchtitan/train.py, line 600, in train_step", Cause.ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory.", "in __init__", Cause.OUT_OF_MEMORY),
        ("FileNotFoundError: [Errno 2] No such file: 'x'", "", Cause.MISSING_FILE),
    ],
)
def test_the_cause_of_an_exception(tmp_path: Path, message: str, stack: str, cause: Cause) -> None:
    raised(tmp_path, 0, 1000, message, stack)
    assert find_cause(tmp_path, 1)[0] is cause


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("rank 1: exitcode: -9 (Signal 9 (SIGKILL) received)", Cause.DEAD_RANK),
        ("rank 0: RuntimeError: [...] Connection closed by peer [127.0.0.2]:3", Cause.DEAD_RANK),
        ("rank 9: RuntimeError: NCCL error in: x.cpp:1, unhandled error", Cause.DEAD_RANK),
        ("rank 9: RuntimeError: CUDA error: uncorrectable ECC error", Cause.DEAD_RANK),
        ("slurmstepd: *** STEP 2.0 ON w CANCELLED DUE TO NODE FAILURE", Cause.LOST_NODE),
        ("srun: error: Node failure on worker-1", Cause.LOST_NODE),
        ("srun: error: Task launch failed: Communication connection failure", Cause.LOST_NODE),
        ("rank 2: RuntimeError: Timed out waiting 300000ms for recv", Cause.HANG),
        ("rank 0: OSError: [Errno 28] No space left on device", Cause.DISK_FULL),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=2.0", Cause.OUT_OF_MEMORY),
        ("model.hf_assets_path: tokenizer.json is not there", Cause.MISSING_FILE),
        ("Unrecognized options: --training.step", Cause.WRONG_OPTION),
        ("preflight: not enough healthy nodes", Cause.BAD_NODES),
    ],
)
def test_the_cause_that_a_reason_describes(reason: str, cause: Cause) -> None:
    assert cause_of(reason) is cause


_HEAD = "Timeout (0:00:12)!\n"
_OTHER_THREAD = """Thread 0x00007f1 (most recent call first):
  File "/venv/torch/utils/data/worker.py", line 3 in get
"""
_MAIN = "Thread 0x00007f2 (most recent call first):\n"
WAITING = f"""{_HEAD}{_OTHER_THREAD}{_MAIN}  File "/venv/torch/distributed/c10d.py", line 9 in wait
  File "/venv/torchtitan/train.py", line 500 in train_step
"""
READING = f"""{_HEAD}{_OTHER_THREAD}{_MAIN}  File "/venv/datasets/iterable.py", line 40 in read
  File "/venv/torchtitan/train.py", line 400 in batch_generator
"""


OTHERS = "the other 3 in wait < train_step (train.py:500)"


@pytest.mark.parametrize(
    ("stacks", "said"),
    [
        ([WAITING, "", WAITING, WAITING], f"rank 1 silent (stopped or gone); {OTHERS}"),
        ([WAITING, READING, WAITING, WAITING], f"rank 1 in read (iterable.py:40); {OTHERS}"),
        (["", _HEAD], None),
    ],
)
def test_a_rank_that_stands_elsewhere_is_named(
    tmp_path: Path, stacks: list[str], said: str | None
) -> None:
    attempt = Attempt(tmp_path, 0)
    attempt.stacks.mkdir()
    for rank, text in enumerate(stacks):
        (attempt.stacks / f"rank-{rank}.txt").write_text(text)
    assert describe_stacks(attempt, len(stacks)) == said
