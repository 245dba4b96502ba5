"""Which line of a failed attempt's logs is named as its reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cookbook.base.command import run_command
from cookbook.observe.failure import find_reason
from cookbook.observe.text import plain_text
from cookbook.supervise.__main__ import main as job

LOGS = Path(__file__).parent / "logs"


def test_the_reason_is_the_root_causes() -> None:
    reason = find_reason(LOGS / "out_of_memory.log")
    assert reason is not None
    assert reason.startswith("rank 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allo")
    assert len(reason) <= 240


def test_the_reason_of_a_hang() -> None:
    reason = find_reason(LOGS / "nccl_timeout.log")
    assert reason is not None
    assert "Watchdog caught collective operation timeout" in reason
    assert "ALLTOALL_BASE" in reason


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


def test_the_first_error_wins_over_what_it_caused(tmp_path: Path) -> None:
    traceback = "Traceback (most recent call last):"
    assert reason_of(
        tmp_path,
        f"[rank8]:[rank8]: {traceback}",
        "[rank8]:[rank8]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [10.0.0.1]:1",
        f"[rank0]:[rank0]: {traceback}",
        f"[rank16]:[rank16]: {traceback}",
        '[rank0]:[rank0]:   File "train.py", line 1, in <module>',
        "[rank0]:[rank0]: AssertionError: expert 3 got no tokens",
        "[rank16]:[rank16]: ValueError: something later",
    ) == ("rank 0: AssertionError: expert 3 got no tokens")


def test_of_two_errors_the_one_of_the_rank_that_failed_first_counts(tmp_path: Path) -> None:
    tracebacks = [
        *("[rank0]:Traceback (most recent call last):", "[rank0]:ValueError: rank 5 sent nothing"),
        *("[rank5]:Traceback (most recent call last):", "[rank5]:AssertionError: 3 experts of 4"),
    ]
    first = "  rank      : {0} (local_rank: {0})\n  exitcode  : 1 (pid: 5)\n===="
    summary = "Root Cause (first observed failure):\n" + first
    reason = reason_of(tmp_path, *tracebacks, summary.format(5))
    assert reason == "rank 5: AssertionError: 3 experts of 4"
    # What torchrun's own observer names decides, and not the number of a rank.
    assert reason_of(tmp_path, *tracebacks[2:], *tracebacks[:2], summary.format(0)) == (
        "rank 0: ValueError: rank 5 sent nothing"
    )


def test_the_end_of_a_chain_counts(tmp_path: Path) -> None:
    chain = [
        "Traceback (most recent call last):",
        "KeyError: 'x'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
        "RuntimeError: no C++ compiler",
    ]
    assert reason_of(tmp_path, *chain) == (
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: "
        "RuntimeError: no C++ compiler"
    )


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


def test_a_refusal_of_a_rank_that_the_console_did_not_show(tmp_path: Path) -> None:
    stdout = tmp_path / "ranks" / "7_0_x" / "attempt_0" / "5" / "stdout.log"
    stdout.parent.mkdir(parents=True)
    stdout.write_text(f"{TITAN} - ERROR - cookbook refuses: {REFUSAL}\n")
    summary = "Root Cause (first observed failure):\n  rank      : 5 (local_rank: 5)\n"
    assert reason_of(tmp_path, summary + "  exitcode  : 1 (pid: 5)\n====") == REFUSAL


MODEL = ["--model.name=deepseek_v3", "--model.flavor=debugmodel"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--", "--", "--training.step=3"], "training.step"),
        (["--", "--", "--training.steps=abc"], "training.steps"),
        (["--", "--", "3"], "'3'"),
        (["--", *MODEL, "--", "--parallelism.expert_parallel_degree=3"], "expert_parallel_degree"),
        (["--nodes=x", "--"], "--nodes"),
        (["--precision=mxfp8", "--ep-backend=deepep", "--", *MODEL], "mxfp8 needs a GPU"),
        (["--precision=mxpf8", "--"], "mxpf8"),
    ],
)
def test_the_checks_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], names: str
) -> None:
    named = ["cell=x", "recipe=debug", "precision=bf16", "ep-backend=standard", "cluster=local"]
    own = [f"--{word}" for word in [*named, "nodes=1"]]
    begin = ["begin", str(tmp_path / "x"), *own, *words]
    with pytest.raises(SystemExit) as end:
        sys.exit(run_command("cookbook.supervise", lambda: job(begin)))
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert names in said
    assert not (tmp_path / "x").exists()
    log = ["submitit INFO (2026-11-21) - Starting with JobEnvironment(job_id=7)", said, JOB_ERROR]
    assert reason_of(tmp_path, *log) == plain_text(said.splitlines()[-1], 240)


def test_what_looks_like_such_a_check_later_on_is_none(tmp_path: Path) -> None:
    warning = "torch.distributed.run: something is odd"
    launched = "cookbook: cell x, attempt 0, commit a8a43de"
    cancelled = "slurmstepd: error: *** JOB 7 ON worker-0 CANCELLED AT 2026-11-20 ***"
    assert reason_of(tmp_path, launched, warning, cancelled) == cancelled
    assert reason_of(tmp_path, "[rank0]:starts", warning, cancelled) == cancelled


def test_the_last_line_counts_without_its_newline(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("x\nslurmstepd: error: Detected 1 oom_kill event")
    assert find_reason(tmp_path) == "slurmstepd: error: Detected 1 oom_kill event"


def test_a_reason_that_a_progress_bar_stands_before(tmp_path: Path) -> None:
    bar = "".join(f"\rGenerating: {count} examples" for count in range(9999))
    lines = f"{bar}\rTraceback (most recent call last):\r\n  x\r\nOSError: disk full\r\n"
    (tmp_path / "train.log").write_bytes(lines.encode())
    assert find_reason(tmp_path) == "OSError: disk full"


def test_digits_of_other_scripts_are_no_ranks(tmp_path: Path) -> None:
    summary = "Root Cause (first observed failure):\n  rank      : ٣ (local_rank: ٣)\n"
    assert reason_of(tmp_path, summary + "  exitcode  : 1 (pid: 5)\n====") == "exitcode: 1"
    assert reason_of(tmp_path, summary + "  exitcode  : ٣ (pid: 5)\n====") is None
    error = "[rank٣]:slurmstepd: error: Detected 1 oom_kill event"
    assert reason_of(tmp_path, error) == error
