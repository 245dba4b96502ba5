"""Read and write the exclusion list, `excluded.yaml` in the folder of runs.

Each job that shares this folder avoids the listed nodes, and adds nodes that failed its checks. To
share one list among several checkouts, make the file a symbolic link.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from cookbook.base.errors import InputError, described
from cookbook.base.files import locked, write_whole
from cookbook.base.paths import runs_folder
from cookbook.base.yamlfile import read_yaml
from cookbook.run.slurm import nodes_in

# In a job's environment, this variable holds the nodes that the list excluded, comma-separated.
EXCLUDED_VARIABLE = "COOKBOOK_EXCLUDED"
_HEAD = """\
# Nodes that jobs exclude; jobs rewrite this file, and keep the entries but no other comments.
# To use a node again, delete its entry; to exclude one, add an entry:
#
# worker-7:
#   until: 2027-01-31 18:00    # UTC
#   reason: smells of smoke
"""


@dataclass(frozen=True)
class Excluded:
    """A node that is excluded until `until` (seconds since the epoch), and the reason."""

    node: str
    until: float
    reason: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}; excluded until {_written(self.until)} UTC"


def excluded_file(runs: Path | None = None) -> Path:
    """Return the path of the exclusion list, or of the file that it links to."""
    return ((runs or runs_folder()) / "excluded.yaml").resolve()


def read_excluded(runs: Path | None = None) -> list[Excluded]:
    """Read the nodes that are excluded now; ignore expired entries."""
    path = excluded_file(runs)
    if not path.exists():
        return []
    file, found = read_yaml(path), []
    for node, entry in file.content.items():
        if not isinstance(entry, dict):
            wanted = f"found {described(entry)}, allowed: until and reason"
            raise InputError(file.place(node), wanted)
        written, remedy = entry.get("until"), "write it as 2027-01-31 18:00"
        try:
            moment = datetime.fromisoformat(str(written))
        except ValueError:
            wanted = f"found {described(written)}, allowed: a time in UTC"
            raise InputError(file.place(node, "until"), wanted, remedy) from None
        until = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        reason = _one_line(str(entry.get("reason") or "no reason"))
        # An entry may name several nodes in Slurm's notation: `worker-[0-3,7]`.
        names = nodes_in(node) if re.search(r"[\[,]", node) else [node]
        found += [Excluded(name, until, reason) for name in names]
    return [one for one in found if one.until > time.time()]


def exclude_nodes(reasons: Mapping[str, str], hours: float) -> None:
    """Exclude these nodes for `hours` from now; never shorten an existing exclusion."""
    until, path = time.time() + hours * 3600, excluded_file()
    with locked(path.with_name(f".{path.name}.lock")):
        listed = {one.node: one for one in read_excluded()}
        for node, reason in reasons.items():
            if node not in listed or listed[node].until < until:
                listed[node] = Excluded(node, until, _one_line(reason))
        content = {
            one.node: {"until": _written(one.until), "reason": one.reason}
            for one in listed.values()
        }
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True) if content else ""
        write_whole(path, _HEAD + text)


def _written(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text).strip()


@dataclass(frozen=True)
class Choice:
    """Options of a Slurm job: nodes to exclude, and the earliest start (None: now)."""

    nodes: tuple[str, ...]
    begin: float | None = None
    short: int = 0  # how many of the needed nodes are missing now


def choose(needed: int, nodes: Sequence[str], excluded: Sequence[Excluded]) -> Choice:
    """Choose which of a partition's `nodes` to exclude from a job that needs `needed` of them.

    If too few nodes would be left, the job may use those whose exclusion expires first, but starts
    only after that. If the partition is smaller than the job, waiting cannot help: do not delay it.
    """
    listed = sorted((one for one in excluded if one.node in set(nodes)), key=lambda one: one.until)
    short, names = needed - (len(nodes) - len(listed)), tuple(one.node for one in listed)
    if not 0 < short <= len(listed):
        return Choice(names)
    return Choice(names[short:], listed[short - 1].until, short)
