"""The test of the network: what its ranks say, on a clock by which a collective takes a second."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from cookbook.base.paths import ROOT

pytestmark = pytest.mark.titan

# Five ranks, forked from one that has imported torch. The first collective of a group makes its
# connections, and takes longer.
_RANKS = """
import json, os, sys
from types import SimpleNamespace
import torch.distributed as dist
from cookbook.titan.common import collectives

now, connected = [0.0], set()
def on_the_clock(collective):
    def timed(*tensors, group=None):
        now[0] += 1.0 if group in connected else 100.0
        connected.add(group)
        return collective(*tensors, group=group)
    return timed

for rank in range(5):
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        dist.all_reduce = on_the_clock(dist.all_reduce)
        dist.all_to_all_single = on_the_clock(dist.all_to_all_single)
        collectives.time = SimpleNamespace(monotonic=lambda: now[0])
        collectives.main(collectives.Plan(**json.loads(sys.argv[1])))
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5)))
"""


def test_bandwidth_is_what_a_rank_must_send_in_the_time_of_one_collective() -> None:
    plan = {"device": "cpu", "num_bytes": 16000, "groups": [[0, 1], [2, 3, 4]], "timeout_s": 60.0}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "5", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", _RANKS, json.dumps(plan)],
        cwd=ROOT,
        env=os.environ | place | {"COOKBOOK_TEAM": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.partition("cookbook-link ")[2] for line in done.stdout.splitlines()]
    said = sorted((json.loads(line) for line in lines if line), key=lambda one: one["ranks"])
    assert [(one["team"], one["name"], one["ranks"]) for one in said] == [
        ("3", "all_to_all", [0, 1]),
        ("3", "all_reduce", [0, 4]),
        ("3", "all_to_all", [2, 4]),
    ]
    # In a second each: a ring sends and receives 4/5 twice. Of an exchange, a rank's own part
    # stays; three do not divide 4,000 numbers.
    assert [one["gb_per_s"] * 1e9 for one in said] == pytest.approx([8000, 25600, 15996 * 2 / 3])
