"""Test the network before training, and find the nodes that slow it down or break it.

If the test of all nodes together fails, smaller groups of nodes are tested. In each test, every
node runs this command, which starts the ranks of that node:

    python -m cookbook.supervise.network_test ARGUMENTS     (the arguments of `run_ranks` as JSON)
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.config.cluster import Bandwidth
from cookbook.observe.failure import is_consequence
from cookbook.run.slurm import node_addresses, run_step

_COLLECTIVES = "cookbook.titan.common.collectives"
_MEASURED, _ENDED = "cookbook-link", "cookbook-links"
# Seconds allowed per test, including the import of torch and the start of NCCL.
_LIMIT_S = 60.0
_COLLECTIVE_S = 30.0
# Message sizes: large on GPUs, so that bandwidth dominates latency; small on CPUs, as gloo is slow.
_NUM_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
# Ports for the tests: above the training's rendezvous ports, below the ephemeral ports.
_PORTS = range(31000, 32700)


@dataclass(frozen=True)
class RankGroups:
    """The layout of the ranks; neighboring ranks of an EP group are `stride` apart."""

    ranks_per_node: int
    device: str
    floor: Bandwidth
    expert_parallel: int = 1
    stride: int = 1

    def groups(self, world: int) -> list[list[int]]:
        """Return the ranks of each all-to-all group, in TorchTitan's expert-parallel layout."""
        size, stride = min(self.expert_parallel, world), self.stride
        block = size * stride
        starts = range(0, world - block + 1, block) if size > 1 else ()
        groups = ((start, offset) for start in starts for offset in range(stride))
        return [list(range(start + offset, start + block, stride)) for start, offset in groups]


# A team: nodes, in rank order, whose ranks run the collectives together.
Team = tuple[str, ...]


@dataclass
class Outcome:
    """The result of network tests that ran at the same time, each in its own team of nodes."""

    slowest: dict[str, float] = field(default_factory=dict)  # lowest measured GB/s per collective
    faults: dict[Team, str] = field(default_factory=dict)
    is_broken: bool = False  # whether a test ended in an error, not just with a low bandwidth


@dataclass(frozen=True)
class NetworkVerdict:
    """The result of the network test. Training may start despite a `warning`, not an `error`."""

    slowest: dict[str, float]
    bad: dict[str, str] = field(default_factory=dict)
    warning: str = ""
    error: str = ""


def test_bandwidth(nodes: Sequence[str], groups: RankGroups) -> NetworkVerdict:
    """Test the network among `nodes`, and find the nodes that slow it down or break it."""
    whole = _test([tuple(sorted(nodes))], groups)
    if not whole.faults:
        return NetworkVerdict(whole.slowest)
    (fault,) = whole.faults.values()
    if len(nodes) < 3:
        alone = [(node,) for node in sorted(nodes)]
        faults = _test(alone, groups).faults if len(alone) == 2 else {}
        bad = {node: why for (node,), why in faults.items() if len(faults) == 1}
        return NetworkVerdict(whole.slowest, bad, error="" if bad else fault)
    found = _search(sorted(nodes), groups)
    if found is None:
        return NetworkVerdict(whole.slowest, error=f"{fault}; all smaller groups of nodes fail too")
    if found:
        return NetworkVerdict(whole.slowest, found)
    fault = f"{fault}; each smaller group of nodes passes by itself"
    if whole.is_broken:
        return NetworkVerdict(whole.slowest, error=fault)
    return NetworkVerdict(whole.slowest, warning=fault)


def _search(nodes: Sequence[str], groups: RankGroups) -> dict[str, str] | None:
    """Test three or more nodes in groups; return the bad ones, or None if every group fails."""
    teams: list[Team] = [tuple(nodes[start : start + 2]) for start in range(0, len(nodes) - 1, 2)]
    if len(nodes) % 2:
        teams[-1] += (nodes[-1],)
    if len(teams) == 1:
        # A test of all three nodes cannot tell which one is bad, so test each node alone.
        teams = [(node,) for node in nodes]
    faults = _test(teams, groups).faults
    good = [team for team in teams if team not in faults]
    suspects = [node for team in teams if team in faults for node in team]
    if not good:
        return None
    bad: dict[str, str] = {}
    # Test each node of the groups that failed, in a pair with a node of a group that passed.
    for start in range(0, len(suspects), len(good)):
        pairs = [(node, team[0]) for node, team in zip(suspects[start:], good, strict=False)]
        bad |= {node: fault for (node, _), fault in _test(pairs, groups).faults.items()}
    return bad


def _test(teams: Sequence[Team], groups: RankGroups) -> Outcome:
    world = min(len(team) for team in teams) * groups.ranks_per_node
    question = {
        "teams": teams,
        "addresses": list(node_addresses([team[0] for team in teams]).values()),
        "ranks_per_node": groups.ranks_per_node,
        "plan": {
            "device": groups.device,
            "num_bytes": _NUM_BYTES[groups.device],
            # All teams test groups of the same ranks, so even the smallest team must have them.
            "groups": groups.groups(world),
            "timeout_s": _COLLECTIVE_S,
        },
    }
    measured: list[dict[str, Any]] = []
    ended: dict[str, str] = {}

    def on_line(line: str, moment: float) -> None:
        mark, _, text = line.partition(" ")
        if mark == _ENDED:
            ended.update(json.loads(text))
        elif mark == _MEASURED:
            measured.append(json.loads(text))

    def is_enough() -> bool:
        # Stop waiting for a team when one of its nodes reports an error of its own. A closed
        # connection is not such an error: it follows from the failure of another node.
        return all(
            any(ended.get(n) and not is_consequence(ended[n]) for n in team)
            or all(n in ended for n in team)
            for team in teams
        )

    nodes = [node for team in teams for node in team]
    module, text = "cookbook.supervise.network_test", json.dumps(question)
    run_step(nodes, module, text, _LIMIT_S + 10, on_line, is_enough)
    outcome = Outcome()
    for one in measured:
        name, speed = str(one["name"]), float(one["gb_per_s"])
        outcome.slowest[name] = min(speed, outcome.slowest.get(name, speed))
        if speed < (wanted := getattr(groups.floor, name)):
            found = f"{name} over ranks {one['ranks']} reaches {speed:.3g} GB/s"
            outcome.faults[teams[int(one["team"])]] = f"{found}, the profile wants {wanted:g}"
    for team in teams:
        errors = sorted((f"{n}: {ended[n]}" for n in team if ended.get(n)), key=is_consequence)
        errors += [f"{node}: no answer" for node in team if node not in ended]
        if errors:
            outcome.is_broken = True
            outcome.faults[team] = f"the ranks cannot communicate ({errors[0]})"
    return outcome


def run_ranks(
    teams: Sequence[Sequence[str]],
    addresses: Sequence[str],  # the MASTER_ADDR of each group of nodes in `teams`
    ranks_per_node: int,
    plan: dict[str, Any],
) -> None:
    """Run this node's ranks, and print the first error among them."""
    node = os.environ["SLURMD_NODENAME"]
    number, team = next((index, team) for index, team in enumerate(teams) if node in team)
    command = [sys.executable, "-m", _COLLECTIVES, json.dumps(plan)]
    port = _PORTS[(17 * int(os.environ["SLURM_JOB_ID"]) + number) % len(_PORTS)]
    deadline = time.monotonic() + _LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(local)) for local in range(ranks_per_node)]
        ranks = []
        for local, log in enumerate(logs):
            environment = {
                **os.environ,
                "RANK": str(team.index(node) * ranks_per_node + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(len(team) * ranks_per_node),
                "MASTER_ADDR": addresses[number],
                "MASTER_PORT": str(port),
                "COOKBOOK_TEAM": str(number),
                "OMP_NUM_THREADS": "1",
            }
            with log.open("wb") as errors:
                ranks.append(subprocess.Popen(command, env=environment, stderr=errors))
        error = _first_error(ranks, logs, deadline)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
    print(_ENDED, json.dumps({node: error}), flush=True)


def _first_error(
    ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float
) -> str:
    while time.monotonic() < deadline:
        for local, rank in enumerate(ranks):
            if code := rank.poll():
                lines = logs[local].read_text(errors="replace").strip().splitlines()
                error = next((line for line in reversed(lines) if "Error" in line), "")
                return f"local rank {local}: {error[:300] or f'exit status {code}'}"
        if all(rank.poll() == 0 for rank in ranks):
            return ""
        time.sleep(0.05)
    return "no end in time"


if __name__ == "__main__":
    run_ranks(**json.loads(sys.argv[1]))
