"""Find why an attempt ended: torchrun's `error.json`, else the console line that says most."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.observe.console import COLOURS, RANK
from cookbook.run.attempts import Cause

_MAX_CHARACTERS = 240
# The first that fits counts. "Connection closed" shows a dead rank, whatever killed that one.
_CAUSES: tuple[tuple[Cause, str], ...] = (
    (Cause.BAD_NODES, r"^preflight: "),
    (Cause.HANG, r"^hang\b|Watchdog caught collective operation timeout|Timed out waiting [0-9]+"),
    (
        Cause.LOST_NODE,
        r"DUE TO NODE FAILURE|NODE_FAIL|[Nn]ode failure on|Communication connection failure"
        r"|[Uu]nable to confirm allocation|Zero Bytes were transmitted or received"
        r"|Requested nodes are busy|node is DOWN|Node\S* not responding",
    ),
    (Cause.DISK_FULL, r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed"),
    (
        Cause.OUT_OF_MEMORY,
        r"OutOfMemoryError|out of memory|std::bad_alloc|MemoryError|oom[_-]kill|OUT_OF_MEMORY"
        r"|OOM Killed",
    ),
    (
        Cause.WRONG_OPTION,
        r"Unrecognized options:|error: (?:argument|unrecognized|the following)"
        r"|^cookbook\.supervise: |^cookbook refuses|\(while the job was built\)$",
    ),
    (Cause.MISSING_MODULE, r"ModuleNotFoundError|No module named|ImportError: "),
    (
        Cause.MISSING_FILE,
        r"FileNotFoundError|NotADirectoryError|No such file or directory| is not there\b"
        r"|(?:Local|Remote)?EntryNotFoundError|RepositoryNotFoundError|DatasetNotFoundError",
    ),
    (
        Cause.DEAD_RANK,
        r"exitcode: -[0-9]+|Signal [0-9]+ \(\w+\) received|SignalException|SIGKILL"
        r"|Connection (?:closed|reset)|Broken pipe|remote process exited|DistBackendError"
        r"|DistNetworkError|Rendezvous\w*Error|Socket Timeout|recvValue|NCCL error"
        r"|CUDA error|uncorrectable ECC|unspecified launch failure"
        # A signal ended the script, or the step below it, before anything was printed.
        r"|^ended by SIG|^exit status (?:129|1[3-9][0-9])$",
    ),
)
_REMEDIES = {
    Cause.OUT_OF_MEMORY: "lower training.local_batch_size or recompute more; "
    "`submit.py check` predicts what fits",
    Cause.MISSING_MODULE: "install it into the job's environment (./setup.sh)",
    Cause.MISSING_FILE: "put the file there",
    Cause.WRONG_OPTION: "correct it",
    Cause.BAD_NODES: "have the nodes repaired",
    Cause.DISK_FULL: "free some space, or lower checkpoint.keep_latest_k",
    Cause.NAN_LOSS: "lower the learning rate, or look at the texts of that step",
    Cause.ERROR: "read its log",
}
# Errors that follow from another rank's failure; JobError is the supervisor's, of a cell.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|Connection (?:closed|reset)|Broken pipe|DistBackendError"
    r"|DistNetworkError|RendezvousConnectionError|RendezvousClosedError|Socket Timeout|recvValue"
    r"|remote process exited|KeyboardInterrupt|^cookbook\.base\.errors\.JobError"
)
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting [0-9]+ ?ms for"
)
# Errors of the Trainer's `__init__` that the same options meet again.
_BUILD_ERROR = re.compile(r"^(?:AssertionError|ValueError|NotImplementedError)\b")
_REFUSAL = re.compile(r"(?:^| - ERROR - )cookbook refuses: (\S.*?)\s*(?:\[rank[0-9]+\]:|$)")
# How much a line tells: of the highest weight the first counts, of a script's lines the last.
_REFUSED, _MEMORY, _RAISED, _EXCEPTION, _EXIT, _SCRIPT, _FOLLOWS = 100, 70, 65, 60, 20, 15, 10
_ROOT_BONUS = 3
_LINES: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION)"), 90),
    (re.compile(r"oom[_-]kill"), 80),
    (re.compile(r"Watchdog caught collective operation timeout"), 50),
    (re.compile(r"Unrecognized options:|error: (?:argument|unrecognized|the following)"), 45),
    (re.compile(r"^srun: error: (?!.*(?:Exited with exit code|\btasks? [0-9]))"), 30),
    # train.sh, or bash about it (under sbatch slurm_script), and the supervisor's checks.
    (re.compile(r"^(?:\S*/)?[\w.+-]+(?:\.sh|: line [0-9]+): |^cookbook\.supervise: "), _SCRIPT),
    (re.compile(r"failed \(exitcode: -?[0-9]+\) local_rank: [0-9]+"), 8),
    (re.compile(r"^slurmstepd: error: .*CANCELLED AT"), 6),
    (re.compile(r"^srun: error: "), 5),
)
_PREFIXES = re.compile(r"^(?:\[(?:rank|default)[0-9]+\]: ?)+")
_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
_CHAINED = re.compile(r"^(?:During handling of the above|The above exception was the direct cause)")
_SUMMARY = re.compile(r"^\s*(time|rank|exitcode|traceback)\s+: (\S+)(?: \((\w+)|.*\((SIG\w+)\))?")
_SUMMARY_EXCEPTION = re.compile(r"^  (?:\w+\.)*[A-Z]\w*(?:: .*)?$")
# glog's `[E1120 18:40:01.123 ProcessGroupNCCL.cpp:683] ` and torchrun's own log header.
_LOG_HEADER = re.compile(r"^(?:\[[EWF][0-9]{4} [^\]]*\] |[EWF][0-9]{4} [^\]]*\] )")


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        reason: printable text of one line and at most 240 characters.
    """

    cause: Cause
    reason: str


@dataclass(frozen=True)
class RankError:
    """What a rank raised, as torchrun's `error.json` has it."""

    local_rank: int
    message: str
    stack: str
    timestamp: float

    @property
    def line(self) -> str:
        """The exception in one line, with a note where the same options meet it again."""
        text = " ".join(self.message.split())
        if _BUILD_ERROR.match(text) and "in __init__" in self.stack and "train.py" in self.stack:
            return f"{text[: _MAX_CHARACTERS - 50]} (while the job was built)"
        return text


@dataclass(slots=True)
class _Finding:
    weight: int
    rank: str | None
    text: str


def find_cause(attempt: Path, exit_code: int | None = None) -> Failure | None:
    """Return why an attempt failed; None where neither its files nor `exit_code` tell.

    Args:
        attempt: its folder, or the log of a job that ended before it made one.
        exit_code: of the script, negative for a signal.
    """
    reason, is_refusal = _find_reason(attempt)
    if exit_code and reason is None:
        ended = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else None
        reason = ended or f"exit status {exit_code}"
    if reason is None:
        return None
    # 2: the script's own refusal; torchrun ends with 1.
    is_wrong = is_refusal or exit_code == 2
    return Failure(Cause.WRONG_OPTION if is_wrong else cause_of(reason), reason)


def find_reason(attempt: Path) -> str | None:
    """Return the line that says most about why an attempt failed."""
    return _find_reason(attempt)[0]


def cause_of(reason: str) -> Cause:
    """Return the kind of failure that a reason describes."""
    return next((cause for cause, form in _CAUSES if re.search(form, reason)), Cause.ERROR)


def remedy_for(cause: Cause) -> str | None:
    """Return what a person can do before the run goes on; None where nothing helps."""
    return _REMEDIES.get(cause)


def is_consequence(error: str) -> bool:
    """Whether an error follows from another rank's failure."""
    return _CONSEQUENCE.search(error) is not None


def read_errors(attempt: Path) -> list[RankError]:
    """Return what every rank raised, the earliest first."""
    errors = []
    for path in attempt.glob("ranks/*/attempt_*/*/error.json"):
        try:
            message: Any = json.loads(path.read_bytes())["message"]
            more = message["extraInfo"]
            stack, time = str(more["py_callstack"]), float(more["timestamp"])
            errors.append(RankError(int(path.parent.name), str(message["message"]), stack, time))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(errors, key=lambda error: error.timestamp)


def _find_reason(attempt: Path) -> tuple[str | None, bool]:
    """Return the most telling line, and whether the training process itself refused the job."""
    log = attempt / "train.log" if attempt.is_dir() else attempt
    folder = log.parent
    findings, root = _read_console(log)
    # With several nodes a local rank is no global one.
    is_one_node = len(list((folder / "ranks").glob("*"))) == 1
    for error in read_errors(folder):
        rank = str(error.local_rank) if is_one_node else None
        if refusal := _REFUSAL.search(error.line):
            findings.append(_Finding(_REFUSED, None, refusal[1]))
        else:
            findings.append(_Finding(_weight(error.line, _RAISED), rank, error.line))
    if all(finding.weight <= _EXIT for finding in findings):
        # torchrun shows one rank of a node; an abort leaves no error.json.
        for own in sorted((folder / "ranks").glob("*/attempt_*/*/std*.log")):
            findings += _read_console(own)[0]
    if "exitcode" in root:
        how = f" ({root['traceback']})" if "traceback" in root else ""
        findings.append(_Finding(_EXIT, root.get("rank"), f"exitcode: {root['exitcode']}{how}"))
    if not findings:
        return None, False
    for finding in findings:
        if finding.rank is not None and finding.rank == root.get("rank"):
            finding.weight += _ROOT_BONUS
    _, best = max(
        enumerate(findings),
        key=lambda item: (item[1].weight, item[0] if item[1].weight == _SCRIPT else -item[0]),
    )
    text = f"rank {best.rank}: {best.text}" if best.rank is not None else best.text
    if _TIMED_OUT.search(text):
        # The rank that reports a time-out waited for another one.
        silent = ", ".join(map(str, _silent_ranks(folder)))
        text = f"hang: no word from rank {silent}; {text}" if silent else f"hang, seen by {text}"
    return _plain(text), best.weight >= _REFUSED


def _read_console(log: Path) -> tuple[list[_Finding], dict[str, str]]:
    """Return the lines that may be the reason, and the first failure of torchrun's summaries."""
    findings: list[_Finding] = []
    roots: list[dict[str, str]] = []
    is_summary = False
    open_, chained, unfinished = set[str | None](), set[str | None](), set[str | None]()
    last: dict[str | None, _Finding] = {}
    for raw in _plain_lines(log):
        prefixed = RANK.match(raw)
        rank, line = prefixed[1] if prefixed else None, _PREFIXES.sub("", raw)
        if refusal := _REFUSAL.search(line):
            findings.append(_Finding(_REFUSED, None, refusal[1]))
        elif line.startswith("Root Cause (first observed failure)"):
            is_summary = True
            roots.append({})
        elif is_summary:
            is_summary = not line.startswith("====")
            if found := _SUMMARY.match(line):
                roots[-1].setdefault(found[1], found[2])
                if found[1] == "traceback" and found[4]:
                    roots[-1]["traceback"] = line.split(" : ")[1].split(" by PID")[0]
            elif _SUMMARY_EXCEPTION.match(line):
                weight = _weight(line, _EXCEPTION)
                findings.append(_Finding(weight, roots[-1].get("rank"), line.strip()))
        elif line.startswith("Traceback (most recent call last)"):
            open_.add(rank)
        elif rank in open_:
            if not line[:1].isspace() and _EXCEPTION_LINE.match(line):
                open_.discard(rank)
                finding = _Finding(_weight(line, _EXCEPTION), rank, line)
                # The last exception of a chain ended the process; out of memory tells more.
                if rank in chained and rank in last and last[rank].weight <= finding.weight:
                    findings.remove(last[rank])
                last[rank] = finding
                findings.append(finding)
                chained.discard(rank)
                if line.endswith(":"):
                    unfinished.add(rank)
        elif rank in unfinished:
            # `BackendCompilerFailed: backend='inductor' raised:` needs its next line.
            unfinished.discard(rank)
            last[rank].text += f" {line.strip()}"
            last[rank].weight = _weight(last[rank].text, _EXCEPTION)
        elif _CHAINED.match(line):
            chained.add(rank)
        elif telling := next((weight for form, weight in _LINES if form.search(line)), None):
            findings.append(_Finding(telling, rank, _LOG_HEADER.sub("", line).strip(" │|\t")))
    # Each node's torchrun writes a summary; nodes that were stopped from outside come last.
    key = lambda root: (root.get("exitcode") == "-15", root.get("time", ""))  # noqa: E731
    return findings, min(roots, key=key, default={})


def _weight(exception: str, raised: int) -> int:
    if cause_of(exception) is Cause.OUT_OF_MEMORY:
        return _MEMORY
    return _FOLLOWS if is_consequence(exception) else raised


def _plain_lines(log: Path) -> Iterator[str]:
    """Yield the lines of a log that may tell, without colours; a progress bar ends with `\\r`."""
    try:
        with log.open("rb") as file:
            for line in file:
                if b"step:" in line and b"loss:" in line and b"\r" not in line:
                    continue
                text = line[-4096:] if b"\r" in line else line[:4096]
                for part in text.decode("utf-8", "replace").rstrip().split("\r"):
                    yield COLOURS.sub("", part).rstrip()
    except OSError:
        return


def _plain(text: str) -> str:
    """Return `text` as one line for a terminal or Markdown, cut with `...`."""
    text = "".join(one for one in COLOURS.sub("", text) if one.isprintable() or one.isspace())
    text = " ".join(text.split())
    if len(text) <= _MAX_CHARACTERS:
        return text
    return text[: _MAX_CHARACTERS - 3].rstrip() + "..."


def _silent_ranks(attempt: Path) -> list[int]:
    """Return the ranks that printed no error while the others timed out; empty if unclear."""
    starts = [sorted(node.glob("attempt_*"))[-1:] for node in (attempt / "ranks").glob("*")]
    folders = [rank for start in starts for one in start for rank in one.glob("[0-9]*")]
    spoke = set()
    for folder in folders:
        text = "".join(log.read_text("utf-8", "replace") for log in sorted(folder.glob("std*.log")))
        # torch puts the rank before each line of a traceback, and NCCL into its own.
        found = re.search(r"^.*(?:Watchdog caught|Traceback \(most recent call last\))", text, re.M)
        if found is None:
            continue
        number = re.search(r"\[rank([0-9]{1,7})\]|\bRank ([0-9]{1,7})\]", text[found.start() :])
        if number is None:
            return []
        spoke.add(int(number[1] or number[2]))
    silent = sorted(set(range(len(folders))) - spoke)
    # More are rather ranks that were ended before they could print.
    return silent if len(silent) <= min(8, len(spoke)) else []
