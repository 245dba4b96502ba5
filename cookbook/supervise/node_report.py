"""Report the health of one node before training; runs on each node of a job.

python -m cookbook.supervise.node_report ARGUMENTS     (the arguments of `report_node` as JSON)
"""

import functools
import hashlib
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.gpus import read_gpus
from cookbook.base.paths import CODE
from cookbook.base.text_files import find_sources
from cookbook.config.cluster import cluster_from_record
from cookbook.config.pins import read_pins
from cookbook.doctor.check import Fault, Surroundings, ask, node_faults
from cookbook.doctor.machine import rdma_devices
from cookbook.install import find_distribution
from cookbook.run.record import CellRecord

_MARK = "cookbook-node"
_PART = re.compile(rf"{_MARK} (\S+) (\d+)/(\d+) (.*)")
# Bytes of a report in one line of output. srun forwards at most 1024 bytes at once, so longer
# lines of several nodes would get mixed.
_PIECE = 800
# NVML takes seconds to start unless the driver is kept loaded.
_COMMAND_S = 15.0
_SMALL_BYTES = 32 << 20


@dataclass(frozen=True)
class Report:
    """The faults and versions of a node."""

    node: str
    faults: list[Fault]
    facts: dict[str, str]


def report_node(
    cluster: str,
    profile: dict[str, Any],
    folder: str,
    needs_ibgda: bool,
    files: Mapping[str, str],
    texts: Mapping[str, Sequence[str]],
) -> Report:
    """Check this node, and return its faults and versions.

    Args:
        cluster, profile: name and content of the cluster's profile.
        folder: the cell's folder, which all nodes write to.
        files: display name -> path of a file or folder that must be the same on all nodes.
        texts: display name -> entries of `data.files` whose files must be the same on all nodes.
    """
    here = Surroundings(
        cluster=cluster_from_record(CellRecord(cluster=cluster, profile=profile)),
        read_gpus=functools.partial(read_gpus, _COMMAND_S),
        run=functools.partial(ask, timeout_s=_COMMAND_S),
        job_folder=Path(folder),
        needs_ibgda=needs_ibgda,
    )
    facts = {"Python": platform.python_version()}
    for pin in read_pins():
        found = find_distribution(pin.name)
        facts[pin.name] = found.version if found else "not installed"
    facts["cookbook"] = _hash(sorted((CODE / "cookbook").rglob("*.py")))
    facts |= {name: _digest(Path(path)) for name, path in files.items()}
    facts |= {name: _digest_texts(patterns) for name, patterns in texts.items()}
    if here.installed_gpus:
        facts["GPU driver"] = here.installed_gpus[0].driver
        facts["GPU model"] = here.installed_gpus[0].model.name
    cards = list(rdma_devices(here))
    facts["network cards"] = f"{len(cards)}" + (f" ({cards[0]}, ...)" if cards else "")
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Report(name, node_faults(here), facts)


def _digest(path: Path) -> str:
    if path.is_file():
        return _hash([path])
    if not path.is_dir():
        return "not there"
    names = sorted(one.name for one in path.iterdir())
    small = [path / name for name in names[:20] if (path / name).is_file()]
    digest = hashlib.sha256("\n".join(names).encode())
    digest.update(_hash([one for one in small if one.stat().st_size < _SMALL_BYTES]).encode())
    return f"{len(names)} files, {digest.hexdigest()[:12]}"


def _digest_texts(patterns: Sequence[str]) -> str:
    try:
        files = [file for source in find_sources(patterns, "") for file in source.files]
    except InputError as error:
        return error.found
    listed = "\n".join(f"{file.path} {file.path.stat().st_size}" for file in files)
    return f"{len(files)} files, {hashlib.sha256(listed.encode()).hexdigest()[:12]}"


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def format_report(report: Report) -> list[str]:
    text = json.dumps(asdict(report))
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    head, total = f"{_MARK} {report.node}", len(pieces)
    return [f"{head} {number}/{total} {piece}" for number, piece in enumerate(pieces)]


class ReportReader:
    """Reassemble the reports from the mixed lines of many nodes."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[int, str]] = {}

    def read(self, line: str) -> Report | None:
        if (found := _PART.match(line)) is None:
            return None
        node, number, total, piece = found.groups()
        pieces = self._pieces.setdefault(node, {})
        pieces[int(number)] = piece
        if len(pieces) < int(total):
            return None
        content = json.loads("".join(text for _, text in sorted(pieces.items())))
        return Report(**content | {"faults": [Fault(*one) for one in content["faults"]]})


if __name__ == "__main__":
    for line in format_report(report_node(**json.loads(sys.argv[1]))):
        print(line, flush=True)
