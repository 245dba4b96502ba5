"""Why an attempt failed: the one line of its logs that tells most."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cookbook.observe.hang import TIMED_OUT, silent_ranks
from cookbook.observe.text import ESCAPES, RANK, blocks, plain_text

_MAX_CHARACTERS = 240
# A log may hold anything: no more bytes of a line, and no more lines that may be the reason, are
# kept than this. The first ones tell most.
_MAX_LINE_BYTES = 4096
_MAX_FINDINGS = 1000
# torch puts its own `[rank0]: ` before the lines of a traceback, after torchrun's prefix.
_PREFIXES = re.compile(r"^(?:\[(?:rank|default)[0-9]+\]: ?)+")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
_SUMMARY_EXCEPTION = re.compile(r"^  (?:\w+\.)*[A-Z]\w*(?:: .*)?$")
_CHAINED = re.compile(r"^(During handling of the above|The above exception was the direct cause)")
_ROOT_RANK = re.compile(r"^\s*rank\s+: ([0-9]{1,7}) \(local_rank: ([0-9]{1,7})\)")
_ROOT_TIME = re.compile(r"^\s*time\s+: (\S+)")
_ROOT_EXIT = re.compile(r"^\s*exitcode\s+: (-?[0-9]{1,7})")
_ROOT_SIGNAL = re.compile(r"^\s*traceback : (Signal [0-9]+ \(\w+\) received)")
# Errors that say only that somebody else failed first; JobError is the supervisor's, of a cell.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|Connection (?:closed|reset)|Broken pipe|DistBackendError"
    r"|DistNetworkError|RendezvousConnectionError|RendezvousClosedError|Socket Timeout|recvValue"
    r"|remote process exited|KeyboardInterrupt|^cookbook\.base\.errors\.JobError"
)
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|std::bad_alloc|MemoryError")
# What the cookbook's own check in the training process says: the rest of the log follows from it.
_REFUSAL = re.compile(r"(?:^| - ERROR - )cookbook refuses: (\S.*?)\s*(?:\[rank[0-9]+\]:|$)")
_REFUSED, _SCRIPT = 100, 15
# Lines that tell the reason outside a traceback: a word that each holds, its form, its weight.
_TELLING: tuple[tuple[bytes, re.Pattern[str], int], ...] = (
    (b"DUE TO ", re.compile(r"DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION)"), 90),
    (b"oom", re.compile(r"oom[_-]kill"), 80),
    (b"Watchdog", re.compile(r"Watchdog caught collective operation timeout"), 50),
    (b"Unrecognized options:", re.compile(r"Unrecognized options:"), 45),
    (b"error: ", re.compile(r"error: (?:argument|unrecognized|the following)"), 45),
    (b"error: ", re.compile(r"^srun: error: (?!.*(?:Exited with exit code|\btasks? [0-9]))"), 30),
    # train.sh, or bash about it; under sbatch its copy is called slurm_script. Below the exit code
    # of a rank: once torchrun ran, what the script said isn't the reason.
    (b".sh: ", re.compile(r"^(?:\S*/)?[\w.+-]+\.sh: "), _SCRIPT),
    # What the script's check of its words says.
    (b"cookbook.supervise: ", re.compile(r"^cookbook\.supervise: "), _SCRIPT),
    (b": line ", re.compile(r"^(?:\S*/)?[\w.+-]+: line [0-9]+: "), _SCRIPT),
    (b"(exitcode: ", re.compile(r"failed \(exitcode: -?[0-9]+\) local_rank: [0-9]+"), 8),
    (b"CANCELLED AT", re.compile(r"^slurmstepd: error: .*CANCELLED AT"), 6),
    (b"error: ", re.compile(r"^srun: error: "), 5),
)
_LAUNCHED = re.compile(r"^(?:cookbook: cell |\[rank[0-9]|[EWI][0-9]{4} )")
# The newline before a line belongs to it, so that the search begins with literal text.
_METRICS = re.compile(
    rb"\n\[rank[0-9]+\]:\[titan\] [-0-9:, ]{23} - root - INFO - (?:\x1b\[[0-9;]*m)?step: +[0-9]+ +"
    rb"(?:\x1b\[[0-9;]*m)?loss:[^\n]*(?=\n)"
)
# Line by line a GB takes a minute, so a block that holds none of these is passed over.
_WORDS = (
    *(b"Traceback (most recent", b"Root Cause (first", b"of the above exception", b"direct cause"),
    *(b"cookbook refuses: ", *dict.fromkeys(word for word, _, _ in _TELLING)),
)
_MEMORY_WEIGHT, _EXCEPTION_WEIGHT, _EXIT_WEIGHT, _CONSEQUENCE_WEIGHT = 70, 60, 20, 10
_ROOT_BONUS = 5
_SIGTERM = "-15"
# glog's `[E1120 18:40:01.123 ProcessGroupNCCL.cpp:683] ` and torchrun's own log header.
_LOG_HEADER = re.compile(r"^(?:\[[EWF][0-9]{4} [^\]]*\] |[EWF][0-9]{4} [^\]]*\] )")


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

    @property
    def is_unfinished(self) -> bool:
        """Whether the exception's text goes on in the next line."""
        last = self.last
        return last is not None and last.text.endswith(":") and len(last.text) < _MAX_CHARACTERS


@dataclass(frozen=True)
class Failure:
    """The most telling line of a failed attempt, with the rank that printed it.

    Attributes:
        text: printable text of one line and at most 240 characters.
        is_refusal: the training process itself refused what it was asked to do.
    """

    text: str
    is_refusal: bool = False


def is_consequence(error: str) -> bool:
    """Whether an error says only that somebody else failed first."""
    return _CONSEQUENCE.search(error) is not None


def find_reason(path: Path) -> str | None:
    """The text of `find_failure`."""
    failure = find_failure(path)
    return failure.text if failure else None


def find_failure(path: Path) -> Failure | None:
    """Why an attempt failed; None where no line of its logs tells.

    Args:
        path: an attempt's `train.log` or directory, or the log of a job that ended before it made
            one. torchrun shows only one rank of a node on the console, so where the summary
            blames a rank that it didn't show, that rank's own logs below `ranks/` are read too.
    """
    log = path / "train.log" if path.is_dir() else path
    console = _Scan()
    if log.is_file():
        console.read(log)
    findings, root = console.findings, _first_of(console.roots)
    local = "*" if root.local_rank is None else str(root.local_rank)
    if all(finding.weight <= _EXIT_WEIGHT for finding in findings):
        for own in sorted((log.parent / "ranks").glob(f"*/attempt_*/{local}/std*.log")):
            rank = _Scan(is_launched=True)
            rank.read(own)
            findings += rank.findings
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
    if TIMED_OUT.search(best.text):
        silent = ", ".join(map(str, silent_ranks(log.parent)))
        # Who reports a time-out is the victim of a rank that did not come.
        text = f"hang: no word from rank {silent}; {text}" if silent else f"hang, seen by {text}"
    return Failure(plain_text(text, _MAX_CHARACTERS), best.weight >= _REFUSED)


class _Scan:
    """What a log holds that may be the reason.

    Args:
        is_launched: the log is a rank's own, so nothing in it comes from the script.
    """

    def __init__(self, is_launched: bool = False) -> None:
        self.findings: list[_Finding] = []
        self.roots: list[_Root] = []
        self._most = 0
        self._is_launched = is_launched
        self._in_summary = False
        self._tracebacks: dict[int | None, _Traceback] = {}

    def read(self, path: Path) -> None:
        """Read the whole log, also a last line without its newline."""
        for block in blocks(path, with_last=True):
            # Metrics lines are most of a log and never the reason.
            block = _METRICS.sub(b"", block)
            if self._is_launched and not self._is_amid() and not any(w in block for w in _WORDS):
                continue
            for line in block.split(b"\n"):
                if line and (b"step:" not in line or b"loss:" not in line):
                    text = line.replace(b"\0", b"")[:_MAX_LINE_BYTES].decode("utf-8", "replace")
                    self._read_line(ESCAPES.sub("", text).rstrip())
            # All that a script says before it launches fits in a block.
            self._is_launched = True

    def _is_amid(self) -> bool:
        """Whether the next line belongs to what the lines before it began."""
        return self._in_summary or any(
            traceback.is_open or traceback.is_unfinished for traceback in self._tracebacks.values()
        )

    def _read_line(self, raw: str) -> None:
        prefixed = RANK.match(raw)
        rank = int(prefixed.group(1)) if prefixed else None
        line = _PREFIXES.sub("", raw)
        self._is_launched = self._is_launched or bool(_LAUNCHED.match(raw))
        if refusal := _REFUSAL.search(line):
            # Every rank refuses for the same reason, so none is named.
            self._add(_Finding(_REFUSED, None, refusal.group(1)))
        elif line.startswith("Root Cause (first observed failure)"):
            self._in_summary = True
            self.roots = [_first_of(self.roots), _Root()] if self.roots else [_Root()]
        elif self._in_summary:
            self._in_summary = not line.startswith("====")
            self._add(_read_summary(line, self.roots[-1]))
        else:
            traceback = self._tracebacks.setdefault(rank, _Traceback())
            is_taken, finding = _read_traceback(line, rank, traceback)
            self._add(finding if is_taken else self._read_telling(line, rank))

    def _read_telling(self, line: str, rank: int | None) -> _Finding | None:
        for _, pattern, weight in _TELLING:
            if pattern.search(line):
                return _Finding(weight, rank, _LOG_HEADER.sub("", line).strip(" │|\t"))
        return None

    def _add(self, finding: _Finding | None) -> None:
        if finding and (len(self.findings) < _MAX_FINDINGS or finding.weight > self._most):
            self.findings.append(finding)
            self._most = max(self._most, finding.weight)


def _first_of(roots: Iterable[_Root]) -> _Root:
    """The first failure of all nodes: each node's torchrun writes a summary of its own."""
    # The nodes that were only told to stop come last.
    return min(roots, key=lambda r: (r.exit_code == _SIGTERM, r.time), default=_Root())


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
    line: str, rank: int | None, traceback: _Traceback
) -> tuple[bool, _Finding | None]:
    """Whether the line belongs to a traceback of this rank, and what it adds to the findings."""
    last = traceback.last
    if line.startswith("Traceback (most recent call last)"):
        traceback.is_open = True
        return True, None
    if traceback.is_open:
        if line[:1].isspace() or not _EXCEPTION.match(line):
            return True, None
        traceback.is_open = False
        is_chained, traceback.is_chained = traceback.is_chained, False
        finding = _weighed(line, rank)
        # The last exception of a chain is what ended the process; out of memory tells more.
        if is_chained and last is not None and last.weight <= finding.weight:
            last.weight, last.text = finding.weight, finding.text
            return True, None
        traceback.last = finding
        return True, finding
    if last is not None and traceback.is_unfinished:
        # `BackendCompilerFailed: backend='inductor' raised:` tells nothing without its next line.
        weighed = _weighed(f"{last.text} {line.strip()}", rank)
        last.weight, last.text = weighed.weight, weighed.text
        return True, None
    if _CHAINED.match(line):
        traceback.is_chained = True
        return True, None
    return False, None


def _weighed(text: str, rank: int | None) -> _Finding:
    if _OUT_OF_MEMORY.search(text):
        return _Finding(_MEMORY_WEIGHT, rank, text)
    weight = _CONSEQUENCE_WEIGHT if is_consequence(text) else _EXCEPTION_WEIGHT
    return _Finding(weight, rank, text)
