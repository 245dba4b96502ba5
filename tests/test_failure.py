"""Why an attempt failed: the exception of a rank, else the line of its logs that tells most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cookbook.observe.failure import cause_of, find_cause, find_reason
from cookbook.run.attempts import Cause

LOGS = Path(__file__).parent / "logs"


def test_the_reason_is_the_root_causes() -> None:
    reason = find_reason(LOGS / "out_of_memory.log")
    assert reason is not None
    assert reason.startswith("rank 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allo")
    assert len(reason) <= 240


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
GLOO += "Timed out waiting 5000ms for recv operation to complete"
NCCL = "[rank{0}]:[E1120 18:40:01.123456789 ProcessGroupNCCL.cpp:688] [Rank {0}] Watchdog caught "
NCCL += "collective operation timeout: WorkNCCL(SeqNum=4711, OpType=ALLTOALL_BASE)"


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (
            "[rank{0}]: Traceback (most recent call last):\n[rank{0}]: RuntimeError: " + GLOO,
            f"RuntimeError: {GLOO}",
        ),
        (NCCL, "Watchdog caught collective operation timeout"),
    ],
)
@pytest.mark.parametrize(
    ("world", "hung", "expected"),
    [
        (4, {2}, "hang: no word from rank 2; rank "),
        (2, {0}, "hang: no word from rank 0; rank 1: "),
        (16, {3, 11}, "hang: no word from rank 3, 11; rank "),
        # Most were ended before they came to speak: who hung is not to be known.
        (16, set(range(1, 16)), "hang, seen by rank 0: "),
    ],
)
def test_a_hang_is_not_blamed_on_the_rank_that_reports_it(
    tmp_path: Path, form: str, shown: str, world: int, hung: set[int], expected: str
) -> None:
    victims = [rank for rank in range(world) if rank not in hung]
    for rank in range(world):
        # Eight ranks a node; which node has which ranks does not follow from torchrun's folders.
        folder = tmp_path / f"ranks/4711_0_{'ab'[rank // 8]}/attempt_0/{rank % 8}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("step: 1\n")
        said = form.format(rank) if rank in victims else "a warning\n"
        (folder / "stderr.log").write_text(said + "\n")
    first = f"  rank : {victims[0]} (local_rank: {victims[0] % 8})"
    summary = ["Root Cause (first observed failure):", first]
    shows_0 = f"[rank0]:{form.format(0)}\n" if 0 in victims else ""
    (tmp_path / "train.log").write_text(shows_0 + "\n".join(summary) + "\n  exitcode : 1\n====\n")
    reason = find_reason(tmp_path)
    assert reason is not None and reason.startswith(expected) and shown[:40] in reason


def test_a_good_log_gives_no_reason(tmp_path: Path) -> None:
    assert find_reason(LOGS / "tp1_16b_colour.log") is None
    assert find_reason(tmp_path) is None


def reason_of(tmp_path: Path, *lines: str) -> str | None:
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    return find_reason(tmp_path / "train.log")


def test_the_end_of_a_chain_counts(tmp_path: Path) -> None:
    chain = [
        "Traceback (most recent call last):",
        "KeyError: 'x'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        "RuntimeError: no C++ compiler",
    ]
    assert reason_of(tmp_path, *chain) == "RuntimeError: no C++ compiler"


def test_a_failed_checkpoint_hides_no_missing_module(tmp_path: Path) -> None:
    ranks = [f"Traceback (most recent call last): (RANK {rank})" for rank in range(2)]
    missing = "ModuleNotFoundError: No module named 'safetensors'"
    lines = [
        *("Traceback (most recent call last):", '  File "x.py", line 1, in save'),
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException "
        "ranks:dict_keys([0, 1])",
        *(ranks[0], '  File "y.py", line 2, in write', missing),
        *(ranks[1], '  File "y.py", line 2, in write', missing),
    ]
    assert reason_of(tmp_path, *lines) == missing
    assert cause_of(missing) is Cause.MISSING_MODULE


@pytest.mark.parametrize(
    "line",
    [
        "train.sh: EP_BACKEND 'deep' is none of standard, deepep",
        "/var/spool/slurmd/job7/slurm_script: line 40: torchrun: command not found",
        "train-my.16b.sh: COOKBOOK_ROOT: found '/x', which is not the cookbook's folder",
        "train_671b.sh: no virtual environment; run setup.sh",
        "slurmstepd: error: *** JOB 7 ON worker-0 CANCELLED AT 2026-11-20 DUE TO TIME LIMIT ***",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0",
        "srun: error: Node failure on worker-3",
    ],
)
def test_reasons_from_outside_python(tmp_path: Path, line: str) -> None:
    exited = "srun: error: worker-0: task 0: Exited with exit code 1"
    assert reason_of(tmp_path, "starting", line, exited) == line


def test_an_exit_code_where_nothing_tells_more(tmp_path: Path) -> None:
    summary = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-20_18:31:4{}\n"
        "  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: 5)\n  error_file: <N/A>\n"
        "  traceback : Signal {} received by PID 5\n===="
    )
    told_to_stop = summary.format(1, 8, 0, -15, "15 (SIGTERM)")
    killed = summary.format(3, 5, 5, -9, "9 (SIGKILL)")
    reason = reason_of(tmp_path, told_to_stop, killed)
    assert reason == "rank 5: exitcode: -9 (Signal 9 (SIGKILL) received)"


def test_the_log_of_a_rank_that_the_console_did_not_show(tmp_path: Path) -> None:
    stderr = tmp_path / "ranks" / "7_0_x" / "attempt_0" / "5" / "stderr.log"
    stderr.parent.mkdir(parents=True)
    stderr.write_text("[rank5]: Traceback (most recent call last):\n[rank5]: OSError: disk full\n")
    summary = "Root Cause (first observed failure):\n  rank      : 5 (local_rank: 5)\n"
    assert reason_of(tmp_path, summary + "  exitcode  : 1 (pid: 5)\n====") == (
        "rank 5: OSError: disk full"
    )
    assert find_reason(tmp_path) == "rank 5: OSError: disk full"


TITAN = "[titan] 2026-11-20 18:29:22,279 - root"
REFUSAL = "asked for precision mine, but what is active is mxfp8"


def test_the_reason_of_a_refusal_in_training_is_what_the_cookbook_said(tmp_path: Path) -> None:
    assert find_reason(LOGS / "refused.log") == REFUSAL
    # The job's own log goes on with the supervisor's error.
    log = (LOGS / "refused.log").read_text() + JOB_ERROR
    assert reason_of(tmp_path, log) == REFUSAL


JOB_ERROR = """Traceback (most recent call last):
  File "cookbook/supervise/supervisor.py", line 58, in __call__
    raise JobError(f"failed: {', '.join(failed)}")
cookbook.base.errors.JobError: failed: debug-mine-standard
"""


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        f"{TITAN} - ERROR - ",
        f"[rank0]:{TITAN} - ERROR - ",
        f"[rank0]:[rank0]: {TITAN} - ERROR - ",
        f"[rank0]:\x1b[31m{TITAN} - ERROR - ",
        f"[rank0]:Generating: 0 examples [00:00][rank0]:{TITAN} - ERROR - ",
    ],
)
@pytest.mark.parametrize("tail", ["", f"[rank8]:{TITAN} - INFO - x", " \x1b[39m\r"])
def test_a_refusal_wins_over_all_that_follows_from_it(
    tmp_path: Path, prefix: str, tail: str
) -> None:
    assert reason_of(
        tmp_path,
        "[rank8]:Traceback (most recent call last):",
        "[rank8]:torch.OutOfMemoryError: CUDA out of memory",
        f"{prefix}cookbook refuses: {REFUSAL}{tail}",
        "[rank16]:RuntimeError: nobody is left",
        "slurmstepd: error: *** JOB 7 ON worker-0 CANCELLED AT 2026-11-20 DUE TO TIME LIMIT ***",
    ) == (REFUSAL)


def test_a_reason_that_a_progress_bar_stands_before(tmp_path: Path) -> None:
    bar = "".join(f"\rGenerating: {count} examples" for count in range(9999))
    lines = f"{bar}\rTraceback (most recent call last):\r\n  x\r\nOSError: disk full\r\n"
    (tmp_path / "train.log").write_bytes(lines.encode())
    assert find_reason(tmp_path) == "OSError: disk full"


def raised(
    attempt: Path, rank: int, time: int, message: str, stack: str = "", node: int = 0
) -> None:
    """What torchrun's `@record` writes for a rank that raised."""
    path = attempt / f"ranks/{node}_x/attempt_0/{rank}/error.json"
    path.parent.mkdir(parents=True)
    extra = {"py_callstack": stack, "timestamp": str(time)}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def test_the_earliest_exception_is_the_cause(tmp_path: Path) -> None:
    raised(tmp_path, 0, 1001, "RuntimeError: [gloo] Connection closed by peer")
    raised(tmp_path, 1, 1003, "ValueError: later")
    raised(tmp_path, 2, 1002, "ValueError: expert 3\ngot no tokens")
    (tmp_path / "train.log").write_text(
        "[rank0]:Traceback (most recent call last):\n[rank0]:KeyError: 'on the console'\n"
        "srun: error: worker-0: task 0: Exited with exit code 1\n"
    )
    found = find_cause(tmp_path, 1)
    assert found is not None
    assert (found.cause, found.reason) == (
        Cause.ERROR,
        "rank 2: ValueError: expert 3 got no tokens",
    )
    # A kill leaves no error.json, and may be why the others fail.
    with (tmp_path / "train.log").open("a") as log:
        log.write("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n")
    found = find_cause(tmp_path, 1)
    assert found is not None and found.cause is Cause.OUT_OF_MEMORY


def test_of_several_nodes_a_local_rank_is_not_named(tmp_path: Path) -> None:
    for node in range(2):
        raised(tmp_path, 0, 1000 - node, f"ValueError: node {node}", node=node)
    assert find_reason(tmp_path) == "ValueError: node 1"


@pytest.mark.parametrize(
    ("message", "stack", "cause"),
    [
        (
            "CheckpointFailedError: save failed on rank 0, 1: ModuleNotFoundError: No module named "
            "'safetensors'",
            "",
            Cause.MISSING_MODULE,
        ),
        ("AssertionError", "torchtitan/train.py, line 327, in __init__", Cause.WRONG_OPTION),
        ("AssertionError: x", "torchtitan/train.py, line 600, in train_step", Cause.ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory.", "in __init__", Cause.OUT_OF_MEMORY),
        ("FileNotFoundError: [Errno 2] No such file: 'x'", "", Cause.MISSING_FILE),
    ],
)
def test_the_cause_of_an_exception(tmp_path: Path, message: str, stack: str, cause: Cause) -> None:
    raised(tmp_path, 0, 1000, message, stack)
    found = find_cause(tmp_path, 1)
    assert found is not None and found.cause is cause


@pytest.mark.parametrize(
    ("code", "cause", "reason"),
    [
        (-9, Cause.DEAD_RANK, "ended by SIGKILL"),
        (137, Cause.DEAD_RANK, "exit status 137"),
        (1, Cause.ERROR, "exit status 1"),
        (2, Cause.WRONG_OPTION, "exit status 2"),
    ],
)
def test_an_exit_status_where_nothing_is_printed(
    tmp_path: Path, code: int, cause: Cause, reason: str
) -> None:
    found = find_cause(tmp_path, code)
    assert found is not None and (found.cause, found.reason) == (cause, reason)
    assert find_cause(tmp_path, 0) is None


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
        ("hang: no word from rank 3; rank 0: Watchdog caught collective", Cause.HANG),
        ("rank 2: RuntimeError: Timed out waiting 300000ms for recv", Cause.HANG),
        ("rank 0: OSError: [Errno 28] No space left on device", Cause.DISK_FULL),
        ("rank 0: RuntimeError: PytorchStreamWriter failed writing file 1", Cause.DISK_FULL),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=2.0", Cause.OUT_OF_MEMORY),
        ("model.hf_assets_path: tokenizer.json is not there", Cause.MISSING_FILE),
        ("Unrecognized options: --training.step", Cause.WRONG_OPTION),
        ("preflight: not enough healthy nodes", Cause.BAD_NODES),
        ("rank 0: ValueError: needs more than 0", Cause.ERROR),
    ],
)
def test_the_cause_that_a_reason_describes(reason: str, cause: Cause) -> None:
    assert cause_of(reason) is cause
