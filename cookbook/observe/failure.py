"""Find why an attempt failed, from the files and the console lines that it left.

torchrun writes an `error.json` for every rank that raised an exception. If a rank is killed, or if
Slurm ends the training, only console lines tell why. A rank that makes no progress for a long time
writes its stack to `stacks/rank-<r>.txt`.
"""

import contextlib
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cookbook.observe.metrics import COLOURS, RANK, lines_of
from cookbook.run.folder import Attempt
from cookbook.run.status import Cause

_MAX_CHARACTERS = 240
# The first matching pattern gives the cause. DEAD_RANK comes last: "Connection closed" says
# that a rank is dead, but not why.
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
        # srun prints this if a signal killed a task; the task may be torchrun itself.
        r"|^srun: error: \S+: tasks? [0-9,-]+: "
        r"(?:Killed|Terminated|Aborted|Segmentation fault|Bus error)"
        # What `find_cause` returns as the reason if it knows only that a signal ended the script.
        r"|^ended by SIG|^exit status (?:129|1[3-9][0-9])$",
    ),
)
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|Connection (?:closed|reset)|Broken pipe|DistBackendError"
    r"|DistNetworkError|RendezvousConnectionError|RendezvousClosedError|Socket Timeout|recvValue"
    r"|remote process exited|KeyboardInterrupt|CheckpointException ranks:"
)
# Errors in the Trainer's `__init__`, which recur with the same options.
_BUILD_ERROR = re.compile(r"^(?:AssertionError|ValueError|NotImplementedError)\b")
_REFUSAL = re.compile(r"(?:^| - ERROR - )cookbook refuses: (\S.*?)\s*(?:\[rank[0-9]+\]:|$)")
# Kinds of findings, the most telling first; _RAISED is an exception in an `error.json`.
_REFUSED, _SLURM, _MEMORY, _RAISED, _EXCEPTION, _LINE, _EXIT, _SCRIPT, _FOLLOWS, _REST = range(10)
_LINES = (
    (_SLURM, re.compile(r"DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION)|oom[_-]kill")),
    (_LINE, re.compile(r"Watchdog caught|Unrecognized options:|error: (?:argument|unrecognized)")),
    (_LINE, re.compile(r"^srun: error: (?!.*(?:Exited with exit code|\btasks? [0-9]))")),
    (_LINE, re.compile(r"^slurmstepd\S*: error: execve\(\): ")),
    (_SCRIPT, re.compile(r"^(?:\S*/)?[\w.+-]+(?:\.sh|: line [0-9]+): |^cookbook\.supervise: ")),
    # Exit code -15 marks ranks that torchrun itself ended.
    (_EXIT, re.compile(r"failed \(exitcode: (?!-15)-?[0-9]+\) local_rank")),
    (_REST, re.compile(r"failed \(exitcode: -15\) local_rank|^slurmstepd: .*CANCELLED AT")),
    (_REST, re.compile(r"^srun: error: ")),
)
_PREFIXES = re.compile(r"^(?:\[(?:rank|default)[0-9]+\]: ?)+")
_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
# In torchrun's summary, the exception of the rank that failed first.
_SUMMARY_LINE = re.compile(r"^  (?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?$")
# Headers of glog (`[E1120 18:40:01.123 ProcessGroupNCCL.cpp:683] `) and of torchrun's log.
_LOG_HEADER = re.compile(r"^(?:\[[EWF][0-9]{4} [^\]]*\] |[EWF][0-9]{4} [^\]]*\] )")


class _Clue(NamedTuple):
    sort: int
    rank: str | None
    text: str


def find_cause(attempt: Path, exit_code: int) -> tuple[Cause, str]:
    """Return a failure's cause and the log line that shows it, or the exit code if none does."""
    reason, is_refusal = _find_reason(attempt)
    if reason is None:
        ended = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else None
        reason = ended or f"exit status {exit_code}"
    cause = cause_of(reason)
    # Exit status 2 means that the script refused to run, so report a wrong option. srun also exits
    # with 2 if a file is missing, but then `cause` is already MISSING_FILE.
    is_wrong = is_refusal or (exit_code == 2 and cause is Cause.ERROR)
    return Cause.WRONG_OPTION if is_wrong else cause, reason


def find_reason(attempt: Path) -> str | None:
    """Return the line that best explains a failed attempt, at most 240 characters."""
    return _find_reason(attempt)[0]


def cause_of(reason: str) -> Cause:
    return next((cause for cause, form in _CAUSES if re.search(form, reason)), Cause.ERROR)


def is_consequence(error: str) -> bool:
    """Return whether an error follows from another rank's failure."""
    return _CONSEQUENCE.search(error) is not None


def _find_reason(attempt: Path) -> tuple[str | None, bool]:
    log = attempt / "train.log" if attempt.is_dir() else attempt
    folder = log.parent
    findings = [*_read_errors(folder), *_read_console(log)]
    if all(finding.sort >= _EXIT for finding in findings):
        # torchrun shows only one rank per node, and an abort leaves no error.json: read all logs.
        for own in sorted(folder.glob("ranks/*/attempt_*/*/std*.log")):
            findings += _read_console(own)
    if not findings:
        return None, False
    sort = min(finding.sort for finding in findings)
    best = [finding for finding in findings if finding.sort == sort]
    _, rank, text = best[-1] if sort == _SCRIPT else best[0]
    text = text if rank is None else f"rank {rank}: {text}"
    if cause_of(text) is Cause.HANG:
        # A rank that reports a timeout was waiting for another rank, so name the silent ranks.
        missing = ", ".join(map(str, _ranks_missing_from_collective(folder)))
        text = f"hang: no word from rank {missing}; {text}" if missing else f"hang, seen by {text}"
    text = " ".join("".join(one for one in text if one.isprintable() or one.isspace()).split())
    if len(text) > _MAX_CHARACTERS:
        text = text[: _MAX_CHARACTERS - 3].rstrip() + "..."
    return text, sort == _REFUSED


def _read_errors(attempt: Path) -> list[_Clue]:
    """Return the exceptions of all ranks from torchrun's `error.json` files, earliest first.

    File format: {"message": {"message", "extraInfo": {"py_callstack", "timestamp"}}}.
    """
    # With several nodes, the local rank in a path is not the global rank, so leave it out.
    is_one_node = len(list(attempt.glob("ranks/*"))) == 1
    found: list[tuple[float, _Clue]] = []
    for path in attempt.glob("ranks/*/attempt_*/*/error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            message: Any = json.loads(path.read_bytes())["message"]
            stack = str(message["extraInfo"]["py_callstack"])
            text = " ".join(str(message["message"]).split())
            if _BUILD_ERROR.match(text) and "in __init__" in stack and "train.py" in stack:
                text = f"{text[: _MAX_CHARACTERS - 50]} (while the job was built)"
            finding = _exception(text, path.parent.name if is_one_node else None, _RAISED)
            found.append((float(message["extraInfo"]["timestamp"]), finding))
    return [finding for _, finding in sorted(found, key=lambda item: item[0])]


def _exception(text: str, rank: str | None, sort: int) -> _Clue:
    if refusal := _REFUSAL.search(text):
        return _Clue(_REFUSED, None, refusal[1])
    if cause_of(text) is Cause.OUT_OF_MEMORY:
        return _Clue(_MEMORY, rank, text)
    return _Clue(_FOLLOWS if is_consequence(text) else sort, rank, text)


def _read_console(log: Path) -> list[_Clue]:
    findings: list[_Clue] = []
    exceptions: dict[str | None, int] = {}
    in_traceback: set[str | None] = set()
    for raw in _plain_lines(log):
        prefixed = RANK.match(raw)
        rank, line = prefixed[1] if prefixed else None, _PREFIXES.sub("", raw)
        if _REFUSAL.search(line) or _SUMMARY_LINE.match(line):
            findings.append(_exception(line.strip(), None, _EXCEPTION))
        elif line.startswith("Traceback (most recent call last)"):
            in_traceback.add(rank)
        elif rank in in_traceback and _EXCEPTION_LINE.match(line):
            in_traceback.discard(rank)
            found = _exception(line, rank, _EXCEPTION)
            # The last exception of a chain ended the process, but an earlier one may say more.
            at = exceptions.setdefault(rank, len(findings))
            if at == len(findings):
                findings.append(found)
            elif found.sort <= findings[at].sort:
                findings[at] = found
        elif sort := next((sort for sort, form in _LINES if form.search(line)), None):
            findings.append(_Clue(sort, rank, _LOG_HEADER.sub("", line).strip(" │|\t")))
    return findings


def _plain_lines(log: Path) -> Iterator[str]:
    """Yield the lines without metrics. Strip colors; split progress bars at `\\r`."""
    for line in lines_of(log):
        has_bar = b"\r" in line
        if has_bar or b"step:" not in line or b"loss:" not in line:
            text = line[-4096:] if has_bar else line[:4096]
            for part in text.decode("utf-8", "replace").rstrip().split("\r"):
                yield COLOURS.sub("", part).rstrip()


def _ranks_missing_from_collective(attempt: Path) -> list[int]:
    """Return the ranks that printed no error while the others timed out; empty if unclear."""
    starts = [sorted(node.glob("attempt_*"))[-1:] for node in (attempt / "ranks").glob("*")]
    folders = [rank for start in starts for one in start for rank in one.glob("[0-9]*")]
    reported = set()
    for folder in folders:
        text = "".join(log.read_text("utf-8", "replace") for log in sorted(folder.glob("std*.log")))
        # torch prefixes each traceback line with the rank; NCCL names the rank in its message.
        found = re.search(r"^.*(?:Watchdog caught|Traceback \(most recent call last\))", text, re.M)
        if found is None:
            continue
        number = re.search(r"\[rank([0-9]{1,7})\]|\bRank ([0-9]{1,7})\]", text[found.start() :])
        if number is None:
            return []
        reported.add(int(number[1] or number[2]))
    missing = sorted(set(range(len(folders))) - reported)
    # If many ranks are silent, they were probably killed before they could print an error.
    return missing if len(missing) <= min(8, len(reported)) else []


_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>[0-9]+) in (?P<function>\S+)')
_MOST_NAMED = 8


def describe_stacks(attempt: Attempt, world: int) -> str | None:
    """Say where most ranks hang and which differ or left no stack; None if no rank left a stack."""
    places = {
        rank: place
        for rank in range(world)
        if (place := _place(attempt.stacks / f"rank-{rank}.txt"))
    }
    if not places:
        return None
    missing = [rank for rank in range(world) if rank not in places]
    ((usual, count),) = Counter(places.values()).most_common(1)
    others = "the other one" if count == 1 else f"the other {count}"
    if missing:
        return f"{_ranks(missing)} silent (stopped or gone); {others} in {usual}"
    odd = {rank: place for rank, place in places.items() if place != usual}
    if not odd or len(odd) > world // 4 + 1:
        return f"{count} of {world} ranks in {usual}"
    return f"{_ranks([*odd])} in {', '.join(dict.fromkeys(odd.values()))}; {others} in {usual}"


def _place(path: Path) -> str | None:
    text = b"".join(lines_of(path)).decode("utf-8", "replace")
    # faulthandler prints the main thread last, and each thread's innermost frame first.
    thread = re.split(r"^(?:Current t|T)hread 0x.*$", text, flags=re.MULTILINE)[-1]
    frames = [found for line in thread.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return None
    own = next((one for one in frames if "/torch/" not in one["file"]), frames[0])
    words = f"{own['function']} ({Path(own['file']).name}:{own['line']})"
    return words if own is frames[0] else f"{frames[0]['function']} < {words}"


def _ranks(ranks: list[int]) -> str:
    more = len(ranks) - _MOST_NAMED
    shown = ", ".join(map(str, ranks[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
