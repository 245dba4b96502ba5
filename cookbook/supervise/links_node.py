"""Starts a node's ranks of the short test of the network; runs there, one task a node.

    python -m cookbook.supervise.links_node QUESTION          (QUESTION: a `LinksQuestion` as JSON)

The nodes are divided into teams, each of which is a world of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ENDED = "cookbook-links"
_COLLECTIVES = "cookbook.titan.common.collectives"
_MOST_WORDS = 300


@dataclass(frozen=True)
class LinksQuestion:
    """What the nodes do.

    Attributes:
        teams: nodes, in the order of their ranks.
        addresses: where the first node of each team is reached.
        ports: of each team's store.
        plan: what each rank does, as `collectives.Plan` has it.
        limit_s: for all of it.
    """

    teams: list[list[str]]
    addresses: list[str]
    ports: list[int]
    ranks_per_node: int
    plan: dict[str, object]
    limit_s: float


def main(question: LinksQuestion) -> None:
    """Run this node's ranks, and print how they ended."""
    node = os.environ["SLURMD_NODENAME"]
    deadline = time.monotonic() + question.limit_s
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(local)) for local in range(question.ranks_per_node)]
        ranks = [_start(question, node, local, log) for local, log in enumerate(logs)]
        said = _first_end(ranks, logs, deadline)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
    print(ENDED, json.dumps({"node": node, "said": said}), flush=True)


def _start(question: LinksQuestion, node: str, local: int, log: Path) -> subprocess.Popen[bytes]:
    number = next(index for index, team in enumerate(question.teams) if node in team)
    team = question.teams[number]
    environment = {
        **os.environ,
        "RANK": str(team.index(node) * question.ranks_per_node + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(len(team) * question.ranks_per_node),
        "MASTER_ADDR": question.addresses[number],
        "MASTER_PORT": str(question.ports[number]),
        "COOKBOOK_TEAM": str(number),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", _COLLECTIVES, json.dumps(question.plan)]
    with log.open("wb") as errors:
        return subprocess.Popen(command, env=environment, stderr=errors)


def _first_end(
    ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float
) -> str:
    """What the first rank that failed said; empty where all ended well."""
    while time.monotonic() < deadline:
        for local, rank in enumerate(ranks):
            if code := rank.poll():
                lines = logs[local].read_text(errors="replace").strip().splitlines()
                words = next((line for line in reversed(lines) if "Error" in line), "")
                return f"local rank {local}: {words[:_MOST_WORDS] or f'exit status {code}'}"
        if all(rank.poll() == 0 for rank in ranks):
            return ""
        time.sleep(0.05)
    return "no end in time"


if __name__ == "__main__":
    main(LinksQuestion(**json.loads(sys.argv[1])))
