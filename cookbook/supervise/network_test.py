"""Test the network before training, and name the nodes that slow it down or break it.

All ranks run an all-reduce together, then each node an all-to-all with the node after it and with
the one before it. A node that is slow with both is bad. Each node starts its ranks by this command:

    python -m cookbook.supervise.network_test ARGUMENTS     (the arguments of `run_ranks` as JSON)
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.config.cluster import Bandwidth
from cookbook.observe.failure import find_reason, is_consequence
from cookbook.run.slurm import node_addresses, run_step

_COLLECTIVES = "cookbook.titan.common.collectives"
_MEASURED, _ENDED = "cookbook-link", "cookbook-links"
# Seconds for the test, with NCCL's start and two imports of torch: by torchrun and by the ranks.
_LIMIT_S = 240.0
_COLLECTIVE_S = 90.0
# Message sizes: large on GPUs, so that bandwidth dominates latency; small on CPUs, as gloo is slow.
_NUM_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
# Ports for the tests: above the training's rendezvous ports, below the ephemeral ports.
_PORTS = range(31000, 32700)
Pair = tuple[str, ...]  # two neighbouring nodes, or a job's only one


@dataclass
class Network:
    """What the test found. Training may start despite a `warning`, not an `error`."""

    slowest: dict[str, float] = field(default_factory=dict)  # lowest measured GB/s per collective
    bad: dict[str, str] = field(default_factory=dict)
    warning: str = ""
    error: str = ""


def pairs_of(nodes: Sequence[str]) -> list[Pair]:
    """Return the pairs of neighbours on a ring of nodes, those first that can run at once."""
    if len(nodes) < 3:
        return [tuple(nodes)]
    ring: list[Pair] = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return [*ring[:-1:2], *ring[1::2], *ring[len(nodes) - 1 :: 2][: len(nodes) % 2]]


def check_links(
    nodes: Sequence[str], device: str, ranks_per_node: int, floor: Bandwidth
) -> Network:
    """Run the test on `nodes`, whose ranks must reach the bandwidths in `floor`."""
    nodes, pairs = sorted(nodes), pairs_of(sorted(nodes))
    places = [sorted(map(nodes.index, pair)) for pair in pairs]
    groups = [
        [place * ranks_per_node + local for place in of_pair for local in range(ranks_per_node)]
        for of_pair in places
    ]
    question = {
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "plan": {
            "address": node_addresses(nodes[:1])[nodes[0]],
            "world": len(nodes) * ranks_per_node,
            "device": device,
            "num_bytes": _NUM_BYTES[device],
            "groups": groups,
            "timeout_s": _COLLECTIVE_S,
        },
    }
    found, slow, ended = Network(), dict[Pair, str](), dict[str, str]()

    def on_line(line: str) -> None:
        mark, _, text = line.partition(" ")
        if mark == _ENDED:
            ended.update(json.loads(text))
        elif mark == _MEASURED:
            one = json.loads(text)
            name, speed, (first, last) = str(one["name"]), float(one["gb_per_s"]), one["ranks"]
            found.slowest[name] = min(speed, found.slowest.get(name, speed))
            if speed < (wanted := getattr(floor, name)):
                reaches = f"{name} over ranks {first} to {last} reaches {speed:.3g} GB/s"
                found.warning = f"{reaches}, the profile wants {wanted:g}"
                if name == "all_to_all":
                    ends = [(group[0], group[-1]) for group in groups]
                    slow[pairs[ends.index((first, last))]] = found.warning

    def own_errors() -> dict[str, str]:
        # A closed connection is no error of a node's own: it follows from another node's.
        return {node: why for node, why in ended.items() if why and not is_consequence(why)}

    def is_enough() -> bool:
        return bool(own_errors()) or len(ended) == len(nodes)

    module, text = "cookbook.supervise.network_test", json.dumps(question)
    run_step(nodes, module, text, _LIMIT_S + 10, on_line, is_enough)
    silent = {node: "no answer" for node in nodes if node not in ended}
    broken = own_errors() or silent or {node: why for node, why in ended.items() if why}
    if broken:
        cannot = "the ranks cannot communicate"
        bad = {node: f"{cannot} ({node}: {why})" for node, why in broken.items()}
        found.error = next(iter(bad.values()))
    elif len(slow) == len(pairs):
        bad, found.error = {}, found.warning
    else:
        bad = slow_nodes(nodes, slow)
    if bad and 2 * len(bad) <= len(nodes):
        found.bad, found.error = bad, ""
    return found


def slow_nodes(nodes: Sequence[str], slow: Mapping[Pair, str]) -> dict[str, str]:
    """Return the nodes that explain slow pairs on the ring: those that are slow with both sides."""
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    first = next(place for place, pair in enumerate(ring) if pair not in slow)
    ring, bad = [*ring[first:], *ring[:first], ring[first]], dict[str, str]()
    for before, pair, after in zip(ring, ring[1:], ring[2:], strict=False):
        is_new = pair in slow and bad.keys().isdisjoint(pair)
        if is_new and (before in slow or after in slow):
            bad[pair[1] if after in slow else pair[0]] = slow[pair]
    return bad


def run_ranks(nodes: Sequence[str], ranks_per_node: int, plan: dict[str, Any]) -> None:
    """Run this node's ranks by a torchrun of their own, and print the first error among them."""
    node = os.environ["SLURMD_NODENAME"]
    number = 17 * int(os.environ["SLURM_JOB_ID"]) % len(_PORTS)
    plan |= {"first_rank": nodes.index(node) * ranks_per_node, "port": _PORTS[number]}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects=2"),
            *("--local-addr=localhost", f"--nproc-per-node={ranks_per_node}"),
            *(f"--log-dir={folder}/ranks", "-m", _COLLECTIVES, json.dumps(plan)),
        ]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as torchrun:
            try:
                code = torchrun.wait(_LIMIT_S)
                error = code and (find_reason(Path(folder)) or f"exit status {code}")
            except subprocess.TimeoutExpired:
                torchrun.terminate()
                error = "no end in time"
    print(_ENDED, json.dumps({node: error or ""}), flush=True)


if __name__ == "__main__":
    run_ranks(**json.loads(sys.argv[1]))
