"""In: the log of an attempt that failed. Out: the one line that tells most about why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cookbook.log.lines import ANSI, RANK

_MAX_CHARACTERS = 240
# torch puts its own `[rank0]: ` before the lines of a traceback, after torchrun's prefix.
_PREFIXES = re.compile(r"^(?:\[(?:rank|default)\d+\]: ?)+")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
_SUMMARY_EXCEPTION = re.compile(r"^  (?:\w+\.)*[A-Z]\w*(?:: .*)?$")
_CHAINED = re.compile(r"^(During handling of the above|The above exception was the direct cause)")
_ROOT_RANK = re.compile(r"^\s*rank\s+: (\d+) \(local_rank: (\d+)\)")
_ROOT_TIME = re.compile(r"^\s*time\s+: (\S+)")
_ROOT_EXIT = re.compile(r"^\s*exitcode\s+: (-?\d+)")
_ROOT_SIGNAL = re.compile(r"^\s*traceback : (Signal \d+ \(\w+\) received)")
# Errors that say only that somebody else failed first.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|Connection (?:closed|reset)|Broken pipe|DistBackendError"
    r"|DistNetworkError|RendezvousConnectionError|RendezvousClosedError|Socket Timeout|recvValue"
    r"|remote process exited|KeyboardInterrupt"
)
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|std::bad_alloc|MemoryError")
_SCRIPT = 15
# Lines that tell the reason outside a traceback, with their weight.
_TELLING: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION)"), 90),
    (re.compile(r"oom[_-]kill"), 80),
    (re.compile(r"Watchdog caught collective operation timeout"), 50),
    (re.compile(r"Unrecognized options:|error: (?:argument|unrecognized|the following)"), 45),
    (re.compile(r"^srun: error: (?!.*(?:Exited with exit code|\btasks? \d))"), 30),
    # Below the exit code of a rank: once torchrun ran, what train.sh said isn't the reason.
    (re.compile(r"^(?:\S*/)?train\w*\.sh: "), _SCRIPT),
    (re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+"), 8),
    (re.compile(r"^slurmstepd: error: .*CANCELLED AT"), 6),
    (re.compile(r"^srun: error: "), 5),
)
_MEMORY_WEIGHT, _EXCEPTION_WEIGHT, _EXIT_WEIGHT, _CONSEQUENCE_WEIGHT = 70, 60, 20, 10
_ROOT_BONUS = 5
_SIGTERM = "-15"
# glog's `[E1120 18:40:01.123 ProcessGroupNCCL.cpp:683] ` and torchrun's own log header.
_LOG_HEADER = re.compile(r"^(?:\[[EWF]\d{4} [^\]]*\] |[EWF]\d{4} [^\]]*\] )")


@dataclass(slots=True)
class _Finding:
    """A line that may be the reason; of equal weights the first in the log counts."""

    weight: int
    rank: int | None
    text: str


@dataclass(slots=True)
class _Root:
    """What torchrun's summary names as the first observed failure."""

    time: str = ""
    rank: int | None = None
    local_rank: int | None = None
    exit_code: str | None = None
    signal: str | None = None


@dataclass(slots=True)
class _Traceback:
    """How far one rank's newest traceback has been read."""

    is_open: bool = False
    is_chained: bool = False
    last: _Finding | None = None


def find_reason(path: Path) -> str | None:
    """The most telling line of a failed attempt, with the rank that printed it; None if none does.

    Args:
        path: an attempt's `train.log`, or the attempt's directory. torchrun shows only one rank of
            a node on the console, so where the summary blames a rank that it didn't show, that
            rank's own log below `ranks/` is read as well.
    """
    log = path / "train.log" if path.is_dir() else path
    findings: list[_Finding] = []
    roots: list[_Root] = []
    if log.is_file():
        findings, roots = _scan(log)
    # Each node's torchrun writes a summary; the nodes that were only told to stop come last.
    root = min(roots, key=lambda r: (r.exit_code == _SIGTERM, r.time), default=_Root())
    local = "*" if root.local_rank is None else str(root.local_rank)
    if all(finding.weight <= _EXIT_WEIGHT for finding in findings):
        for stderr in sorted((log.parent / "ranks").glob(f"*/attempt_*/{local}/stderr.log")):
            findings += _scan(stderr)[0]
    if root.exit_code is not None:
        how = f" ({root.signal})" if root.signal else ""
        findings.append(_Finding(_EXIT_WEIGHT, root.rank, f"exitcode: {root.exit_code}{how}"))
    if not findings:
        return None
    for finding in findings:
        if finding.rank is not None and finding.rank == root.rank:
            finding.weight += _ROOT_BONUS
    # The first error is the cause of those after it, but a script's last words are its reason.
    _, best = max(
        enumerate(findings),
        key=lambda item: (item[1].weight, item[0] if item[1].weight == _SCRIPT else -item[0]),
    )
    text = f"rank {best.rank}: {best.text}" if best.rank is not None else best.text
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3].rstrip() + "..."


def _scan(path: Path) -> tuple[list[_Finding], list[_Root]]:
    findings: list[_Finding] = []
    roots: list[_Root] = []
    in_summary = False
    tracebacks: dict[int | None, _Traceback] = {}
    for raw in _lines(path):
        prefixed = RANK.match(raw)
        rank = int(prefixed.group(1)) if prefixed else None
        line = _PREFIXES.sub("", raw)
        traceback = tracebacks.setdefault(rank, _Traceback())
        if line.startswith("Root Cause (first observed failure)"):
            in_summary = True
            roots.append(_Root())
        elif in_summary:
            in_summary = not line.startswith("====")
            if finding := _read_summary(line, roots[-1]):
                findings.append(finding)
        elif not _read_traceback(line, rank, traceback, findings):
            finding = _read_telling(line, rank)
            if finding is not None:
                findings.append(finding)
    return findings, roots


def _read_summary(line: str, root: _Root) -> _Finding | None:
    if found := _ROOT_TIME.match(line):
        root.time = found.group(1)
    elif found := _ROOT_RANK.match(line):
        root.rank, root.local_rank = int(found.group(1)), int(found.group(2))
    elif found := _ROOT_EXIT.match(line):
        root.exit_code = found.group(1)
    elif found := _ROOT_SIGNAL.match(line):
        root.signal = found.group(1)
    elif _SUMMARY_EXCEPTION.match(line):
        return _weighed(line.strip(), root.rank)
    return None


def _read_traceback(
    line: str, rank: int | None, traceback: _Traceback, findings: list[_Finding]
) -> bool:
    """Take the line where it belongs to a traceback of this rank, and say whether it did."""
    if line.startswith("Traceback (most recent call last)"):
        traceback.is_open = True
        return True
    if traceback.is_open:
        if not line[:1].isspace() and _EXCEPTION.match(line):
            traceback.is_open = False
            finding = _weighed(line, rank)
            last = traceback.last
            # The last exception of a chain is what ended the process; out of memory tells more.
            if traceback.is_chained and last is not None and last.weight <= finding.weight:
                last.weight, last.text = finding.weight, finding.text
            else:
                findings.append(finding)
                traceback.last = finding
            traceback.is_chained = False
        return True
    if traceback.last is not None and traceback.last.text.endswith(":") and line:
        # `BackendCompilerFailed: backend='inductor' raised:` tells nothing without its next line.
        weighed = _weighed(f"{traceback.last.text} {line.strip()}", rank)
        traceback.last.weight, traceback.last.text = weighed.weight, weighed.text
        return True
    if _CHAINED.match(line):
        traceback.is_chained = True
        return True
    return False


def _read_telling(line: str, rank: int | None) -> _Finding | None:
    for pattern, weight in _TELLING:
        if pattern.search(line):
            return _Finding(weight, rank, _LOG_HEADER.sub("", line).strip(" │|\t"))
    return None


def _weighed(text: str, rank: int | None) -> _Finding:
    if _OUT_OF_MEMORY.search(text):
        return _Finding(_MEMORY_WEIGHT, rank, text)
    weight = _CONSEQUENCE_WEIGHT if _CONSEQUENCE.search(text) else _EXCEPTION_WEIGHT
    return _Finding(weight, rank, text)


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for line in file:
            # Metrics lines are most of a log and never the reason.
            if b"step:" not in line or b"loss:" not in line:
                text = ANSI.sub("", line.decode("utf-8", "replace")).replace("\0", "")
                yield text.rstrip()
