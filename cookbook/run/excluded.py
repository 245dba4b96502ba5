"""The nodes that jobs leave out for a while: `excluded.yaml` beside the runs, for people to edit.

Every job that shares the folder of runs reads it, and adds the nodes that failed it. To share one
list among several checkouts, make the file a link.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, described
from cookbook.base.files import write_whole
from cookbook.base.paths import runs_folder
from cookbook.base.yamlfile import YamlFile, parse_yaml, read_yaml

# Of what people or another job can repair within the day, and of what takes a technician.
PASSING_H = 1.0
HARDWARE_H = 24.0

_HEAD = """\
# Nodes that jobs leave out. To use one again, delete its entry; to leave one out, add an entry:
#
# worker-7:
#   until: 2027-01-31 18:00    # UTC
#   reason: smells of smoke
"""
# A writer takes milliseconds; one that was killed must not stop all others.
_LOCK_S = 5.0


@dataclass(frozen=True)
class Excluded:
    """A node that is left out until `until`, in seconds since the epoch, and why."""

    node: str
    until: float
    reason: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}; left out until {_written(self.until)} UTC"


def excluded_file(runs: Path | None = None) -> Path:
    """Where the list is; a link is followed, so that the list and not the link is written."""
    return ((runs or runs_folder()) / "excluded.yaml").resolve()


def read_excluded(runs: Path | None = None) -> list[Excluded]:
    """The nodes to leave out now.

    Args:
        runs: the folder of runs, by default this checkout's.

    Raises:
        InputError: somebody has made a mistake in the list.
    """
    path = excluded_file(runs)
    if not path.exists():
        return []
    return [one for one in _entries(read_yaml(path)) if one.until > time.time()]


def exclude_nodes(reasons: Mapping[str, str], hours: float) -> list[Excluded]:
    """Leave these nodes out for `hours` from now, and not shorter than they are already.

    What people wrote in the list stays as it stands, but for entries that have expired.

    Raises:
        InputError: the list holds a mistake, so it is not written.
    """
    until = time.time() + hours * 3600
    path = excluded_file()
    with _locked(path):
        text = path.read_text(encoding="utf-8") if path.exists() else _HEAD
        file = parse_yaml(text, path)
        before = {one.node: one for one in _entries(file)}
        added = [
            Excluded(node, until, _one_line(reason))
            for node, reason in reasons.items()
            if node not in before or before[node].until < until
        ]
        gone = {one.node for one in before.values() if one.until <= time.time()}
        kept = _without(text, file, gone | {one.node for one in added})
        blocks = [
            f"{one.node}:\n  until: {_written(one.until)}\n  reason: {json.dumps(one.reason)}\n"
            for one in added
        ]
        write_whole(path, "".join([kept, *blocks]))
    return added


def _entries(file: YamlFile) -> list[Excluded]:
    found = []
    for node, entry in file.content.items():
        if not isinstance(entry, dict):
            wanted = f"found {described(entry)}, allowed: until and reason"
            raise InputError(file.place(node), wanted)
        until = _time(file, node, entry.get("until"))
        found.append(Excluded(node, until, _one_line(str(entry.get("reason") or "no reason"))))
    return found


def _time(file: YamlFile, node: str, value: Any) -> float:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InputError(
            file.place(node, "until"),
            f"found {described(value)}, allowed: a time in UTC",
            "write it as 2027-01-31 18:00",
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _written(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _without(text: str, file: YamlFile, nodes: set[str]) -> str:
    """The text without the entries of `nodes`; comments above the entries that follow stay."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    starts = sorted(file.lines[(node,)] - 1 for node in file.content)
    for node in nodes & set(file.content):
        start = file.lines[(node,)] - 1
        end = next((other for other in starts if other > start), len(lines))
        for number in range(start, end):
            # What stands at the margin below the entry belongs to the next one.
            if number > start and not lines[number].startswith((" ", "\t")):
                break
            lines[number] = ""
    return "".join(lines)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other writers out, on any machine: a new file is made by one alone, also over NFS."""
    lock = path.with_name(f".{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                lock.unlink(missing_ok=True)
                deadline = time.monotonic() + _LOCK_S
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


@dataclass(frozen=True)
class Choice:
    """What to tell Slurm: the nodes to leave out, and the earliest start, None for now.

    Attributes:
        short: how many nodes are missing now for want of those that are left out.
    """

    nodes: tuple[str, ...]
    begin: float | None = None
    short: int = 0


def choose(needed: int, nodes: Sequence[str], excluded: Sequence[Excluded]) -> Choice:
    """Which of `excluded` a job of `needed` nodes leaves out, where the partition has `nodes`.

    Names that Slurm does not know are left out of the answer: sbatch refuses them. Where too few
    nodes are left, the job begins when enough of them may be used again.
    """
    listed = sorted((one for one in excluded if one.node in set(nodes)), key=lambda one: one.until)
    short = max(0, needed - (len(nodes) - len(listed)))
    names = tuple(one.node for one in listed[short:])
    if not short or short > len(listed):
        return Choice(tuple(one.node for one in listed))
    return Choice(names, listed[short - 1].until, short)
