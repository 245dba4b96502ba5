"""A short test of the network before training, over the real groups; it finds the bad nodes.

When the whole does not reach the profile's floor, the nodes are tested in pairs. A node of a pair
that fails is tested again with one of a pair that did not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from cookbook.config.cluster import Bandwidth
from cookbook.observe.failure import is_consequence
from cookbook.run.slurm import node_addresses
from cookbook.supervise.links_node import ENDED, LinksQuestion
from cookbook.supervise.step import python_of_job, run_step

_MARK = "cookbook-link"
# Import of torch from a cold file system, and NCCL's start over hundreds of ranks.
LIMIT_S = 60.0
_COLLECTIVE_S = 30.0
# Large enough for the links and not for the time; gloo on one machine is slow.
_NUM_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
# Above the training's rendezvous, below the ephemeral ports.
_PORTS = range(31000, 32700)


@dataclass(frozen=True)
class Links:
    """What ranks are tested, on what.

    Attributes:
        expert_parallel: the ranks of a group, each `stride` from the next.
    """

    ranks_per_node: int
    device: str
    floor: Bandwidth
    expert_parallel: int = 1
    stride: int = 1

    def groups(self, world: int) -> list[list[int]]:
        """The groups of the all-to-all, as TorchTitan lays out expert parallelism."""
        size, stride = min(self.expert_parallel, world), self.stride
        if size < 2:
            return []
        block = size * stride
        return [
            list(range(start + offset, start + block, stride))
            for start in range(0, world - block + 1, block)
            for offset in range(stride)
        ]


@dataclass
class Outcome:
    """What a test of some teams found.

    Attributes:
        slowest: of each collective, in GB/s, over all teams.
        faults: why a team failed, by its number.
        is_slow: the numbers of those that ran, and not as fast as they must.
    """

    slowest: dict[str, float] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    is_slow: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class LinksVerdict:
    """What the test says of the nodes.

    Attributes:
        bad: nodes and why.
        warning: what is wrong with no single node.
        error: why the ranks cannot talk, where that is no single node's fault either.
    """

    slowest: dict[str, float]
    bad: dict[str, str] = field(default_factory=dict)
    warning: str = ""
    error: str = ""


def check_links(nodes: Sequence[str], links: Links) -> LinksVerdict:
    """Test the network among `nodes`, and find those that slow it down or break it."""
    whole = _test([sorted(nodes)], links)
    if not whole.faults:
        return LinksVerdict(whole.slowest)
    said = whole.faults[0]
    if len(nodes) < 3:
        bad = _alone(sorted(nodes), links) if len(nodes) == 2 else {}
        return LinksVerdict(whole.slowest, bad, error="" if bad else said)
    bad, all_fail = _search(sorted(nodes), links)
    if bad:
        return LinksVerdict(whole.slowest, bad)
    if all_fail:
        return LinksVerdict(whole.slowest, error=f"{said}; so it is with all pairs of nodes")
    said += "; each pair of nodes is well by itself"
    if whole.is_slow:
        return LinksVerdict(whole.slowest, warning=said)
    return LinksVerdict(whole.slowest, error=said)


def _alone(nodes: Sequence[str], links: Links) -> dict[str, str]:
    """Which one of two nodes fails by itself; empty where both do or none does."""
    outcome = _test([[node] for node in nodes], links)
    bad = {nodes[number]: said for number, said in outcome.faults.items()}
    return bad if len(bad) == 1 else {}


def _search(nodes: Sequence[str], links: Links) -> tuple[dict[str, str], bool]:
    """The bad ones among three nodes or more, and whether all pairs failed."""
    teams = [list(nodes[start : start + 2]) for start in range(0, len(nodes) - 1, 2)]
    if len(nodes) % 2:
        teams[-1].append(nodes[-1])
    if len(teams) == 1:
        # Three nodes: there is no other pair to compare with.
        teams = [[node] for node in nodes]
    first = _test(teams, links)
    good = [team for number, team in enumerate(teams) if number not in first.faults]
    suspects = [node for number in sorted(first.faults) for node in teams[number]]
    if not good:
        return {}, True
    bad: dict[str, str] = {}
    # One suspect with a pair at a time: those of a pair that passed are beyond doubt.
    for start in range(0, len(suspects), len(good)):
        tried = suspects[start : start + len(good)]
        pairs = [[node, team[0]] for node, team in zip(tried, good, strict=False)]
        again = _test(pairs, links)
        bad |= {tried[number]: said for number, said in again.faults.items()}
    return bad, False


def _test(teams: list[list[str]], links: Links) -> Outcome:
    """Run the collectives in each team at once."""
    worlds = {len(team) * links.ranks_per_node for team in teams}
    # Teams of a search may differ by a node; the groups of the smallest fit into all.
    plan = {
        "device": links.device,
        "num_bytes": _NUM_BYTES[links.device],
        "groups": links.groups(min(worlds)),
        "timeout_s": _COLLECTIVE_S,
    }
    start = int(os.environ.get("SLURM_JOB_ID") or 0) * 17
    question = LinksQuestion(
        teams=teams,
        addresses=list(node_addresses([team[0] for team in teams]).values()),
        ports=[_PORTS[(start + number) % len(_PORTS)] for number in range(len(teams))],
        ranks_per_node=links.ranks_per_node,
        plan=plan,
        limit_s=LIMIT_S,
    )
    found: list[dict[str, object]] = []
    ended: dict[str, str] = {}

    def on_line(line: str, moment: float) -> None:
        mark, _, text = line.partition(" ")
        if mark == ENDED:
            content = json.loads(text)
            ended[content["node"]] = content["said"]
        elif mark == _MARK:
            found.append(json.loads(text))

    command = [python_of_job(), "-m", "cookbook.supervise.links_node", json.dumps(asdict(question))]

    def is_enough() -> bool:
        # Of a team that failed, the others wait in vain. One whose connection was closed may be
        # heard before the one that closed it.
        return all(
            any(ended.get(n) and not is_consequence(ended[n]) for n in team)
            or all(n in ended for n in team)
            for team in teams
        )

    run_step([node for team in teams for node in team], command, LIMIT_S + 10, on_line, is_enough)
    outcome = Outcome()
    for number, team in enumerate(teams):
        reached = [one for one in found if one["team"] == str(number)]
        for one in reached:
            name, speed = str(one["name"]), float(str(one["gb_per_s"]))
            outcome.slowest[name] = min(speed, outcome.slowest.get(name, speed))
            if speed < getattr(links.floor, name):
                outcome.is_slow.add(number)
                outcome.faults[number] = (
                    f"{name} over ranks {one['ranks']} reaches {speed:.3g} GB/s, "
                    f"the profile wants {getattr(links.floor, name):g}"
                )
        words = [f"{node}: {ended[node]}" for node in team if ended.get(node)]
        words.sort(key=is_consequence)
        silent = [f"{node}: no answer" for node in team if node not in ended]
        if words or silent:
            outcome.is_slow.discard(number)
            outcome.faults[number] = f"the ranks cannot talk ({[*words, *silent][0]})"
    return outcome
