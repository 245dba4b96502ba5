"""What a job asks each of its nodes before training; runs there, one task a node.

    python -m cookbook.supervise.node QUESTION          (QUESTION: a `Question` as JSON)

It prints its `Report` as JSON in short lines: srun passes each of those on whole, and mixes the
parts of longer ones with other nodes' words.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cookbook.base.gpus import read_gpus
from cookbook.base.paths import ROOT
from cookbook.config.cluster import load_cluster
from cookbook.config.stack import read_pins
from cookbook.doctor.check import Surroundings, ask
from cookbook.doctor.checks import node_problems
from cookbook.install.packages import find_distribution

_MARK = "cookbook-node"
# srun passes on up to 1024 bytes at once.
_PIECE = 800
# NVML takes seconds where the driver is not kept loaded.
_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Question:
    """What a node is to look at.

    Attributes:
        cluster: the name or path of the profile.
        folder: the cell's, which all nodes write to.
        files: files and folders that must be the same everywhere, by what a message calls them.
    """

    cluster: str
    folder: str
    deepep_between_nodes: bool = False
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a node answers.

    Attributes:
        clock: its time when it answered, in seconds since the epoch.
        problems: why it cannot train, by check, with the hours to leave it out.
        facts: what must be the same on all nodes.
    """

    node: str
    clock: float
    problems: dict[str, tuple[str, float]]
    facts: dict[str, str]


def look(question: Question) -> Report:
    """Look at this node."""
    here = Surroundings(
        cluster=load_cluster(question.cluster),
        read_gpus=functools.partial(read_gpus, _PATIENCE_S),
        run=functools.partial(ask, timeout_s=_PATIENCE_S),
        job_folder=Path(question.folder),
        deepep_between_nodes=question.deepep_between_nodes,
    )
    problems = node_problems(here)
    facts = {"Python": platform.python_version(), **_packages(), "cookbook": _digest_of_sources()}
    for what, path in question.files.items():
        facts[what] = _digest(Path(path))
    if here.installed_gpus:
        facts["GPU driver"] = here.installed_gpus[0].driver
        facts["GPU model"] = here.installed_gpus[0].model.name
    devices = here.path("/sys/class/infiniband")
    cards = sorted(card.name for card in devices.iterdir()) if devices.is_dir() else []
    facts["network cards"] = f"{len(cards)}" + (f" ({cards[0]}, ...)" if cards else "")
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Report(name, time.time(), problems, facts)


def _packages() -> dict[str, str]:
    names = [pin.name for pin in read_pins()]
    found = {name: find_distribution(name) for name in names}
    return {name: one.version if one else "not installed" for name, one in found.items()}


def _digest_of_sources() -> str:
    return _hash(sorted((ROOT / "cookbook").rglob("*.py")))


def _digest(path: Path) -> str:
    """Of a file's content; of a folder's file names, and what its small files hold."""
    if path.is_file():
        return _hash([path])
    if not path.is_dir():
        return "not there"
    names = sorted(one.name for one in path.iterdir())
    small = [path / name for name in names[:20] if (path / name).is_file()]
    digest = hashlib.sha256("\n".join(names).encode())
    digest.update(_hash([one for one in small if one.stat().st_size < 32 * 2**20]).encode())
    return f"{len(names)} files, {digest.hexdigest()[:12]}"


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def printed(report: Report) -> list[str]:
    """The report as lines that `read_lines` reads."""
    text = json.dumps(asdict(report))
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [
        f"{_MARK} {report.node} {number}/{len(pieces)} {piece}"
        for number, piece in enumerate(pieces)
    ]


class Reader:
    """Puts the lines of many nodes together again."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[int, str]] = {}

    def read(self, line: str) -> Report | None:
        """The report that `line` completes."""
        mark, _, rest = line.rstrip("\n").partition(" ")
        node, _, rest = rest.partition(" ")
        count, _, piece = rest.partition(" ")
        number, _, total = count.partition("/")
        if mark != _MARK or not (number.isdecimal() and total.isdecimal()):
            return None
        pieces = self._pieces.setdefault(node, {})
        pieces[int(number)] = piece
        if len(pieces) < int(total):
            return None
        content = json.loads("".join(pieces[index] for index in range(int(total))))
        problems = {name: (text, hours) for name, (text, hours) in content["problems"].items()}
        return Report(content["node"], content["clock"], problems, content["facts"])


if __name__ == "__main__":
    for line in printed(look(Question(**json.loads(sys.argv[1])))):
        print(line, flush=True)
