"""What kind of failure the reason of an attempt is, and what a person can do about it."""

from __future__ import annotations

import re

from cookbook.observe.hang import TIMED_OUT
from cookbook.run.history import Cause

# The first that fits counts. A peer that was lost tells of a dead rank, whatever killed that one.
_CAUSES: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    (Cause.BAD_NODES, re.compile("^preflight: ")),
    (Cause.HANG, re.compile(rf"^hang\b|{TIMED_OUT.pattern}")),
    (
        Cause.LOST_NODE,
        re.compile(
            r"DUE TO NODE FAILURE|NODE_FAIL|[Nn]ode failure on|Communication connection failure"
            r"|[Uu]nable to confirm allocation|Zero Bytes were transmitted or received"
            r"|Requested nodes are busy|node is DOWN|Node\S* not responding"
        ),
    ),
    (
        Cause.DISK_FULL,
        re.compile(r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed"),
    ),
    (
        Cause.OUT_OF_MEMORY,
        re.compile(
            r"OutOfMemoryError|out of memory|std::bad_alloc|MemoryError|oom[_-]kill"
            r"|OUT_OF_MEMORY|OOM Killed"
        ),
    ),
    (
        Cause.WRONG_OPTION,
        re.compile(
            r"Unrecognized options:|error: (?:argument|unrecognized|the following)"
            r"|^cookbook\.supervise: |^cookbook refuses"
        ),
    ),
    (
        Cause.MISSING_FILE,
        re.compile(
            r"FileNotFoundError|NotADirectoryError|No such file or directory"
            r"|(?:Local|Remote)?EntryNotFoundError|RepositoryNotFoundError|DatasetNotFoundError"
            r"| is not there\b"
        ),
    ),
    (
        Cause.DEAD_RANK,
        re.compile(
            r"exitcode: -[0-9]+|Signal [0-9]+ \(\w+\) received|SignalException|SIGKILL"
            r"|Connection (?:closed|reset)|Broken pipe|remote process exited|DistBackendError"
            r"|DistNetworkError|Rendezvous\w*Error|Socket Timeout|recvValue|NCCL error"
            r"|CUDA error|uncorrectable ECC|unspecified launch failure"
            # Without a word: a signal ended the script, or the step below it.
            r"|^ended by SIG|^exit status (?:129|1[3-9][0-9])$"
        ),
    ),
)
_REMEDIES = {
    Cause.OUT_OF_MEMORY: "lower training.local_batch_size or recompute more; "
    "`submit.py check` predicts what fits",
    Cause.MISSING_FILE: "put the file there",
    Cause.WRONG_OPTION: "correct it",
    Cause.BAD_NODES: "have the nodes repaired",
    Cause.DISK_FULL: "free some space, or lower checkpoint.keep_latest_k",
    Cause.NAN_LOSS: "lower the learning rate, or look at the texts of that step",
    Cause.ERROR: "read its log",
}


def cause_of(reason: str) -> Cause:
    """The kind of failure that `reason`, the most telling line of an attempt's logs, tells of."""
    return next((cause for cause, pattern in _CAUSES if pattern.search(reason)), Cause.ERROR)


def remedy_for(cause: Cause) -> str | None:
    """What a person can do before the run goes on; None where nothing is to be said."""
    return _REMEDIES.get(cause)
