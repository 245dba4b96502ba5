"""The test of the network: which nodes are bad, and the ranks that each node starts for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cookbook.config.cluster import Bandwidth
from cookbook.supervise import network_test
from cookbook.supervise.network_test import ENDED, Outcome, Question, RankGroups, run_ranks
from cookbook.supervise.step import StepEnd

# Stands in for a rank: notes where it was placed, then ends as the plan says.
RANK = """
import json, os, sys, time
from pathlib import Path
plan = json.loads(sys.argv[1])
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COOKBOOK_TEAM"
local = os.environ["LOCAL_RANK"]
Path(plan["folder"], local).write_text(json.dumps([os.environ[name] for name in names]))
end = plan["ends"][int(local)]
if end == "hang":
    time.sleep(60)
time.sleep(end.get("after", 0))
print(end.get("said", ""), file=sys.stderr)
sys.exit(end["status"])
"""
WELL = {"status": 0}


def said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *ends: object,
    limit_s: float = 30,
) -> str:
    """What worker-3, the second node of the second team, says of ranks that end so."""
    (tmp_path / "stand_in_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "worker-3")
    monkeypatch.setattr(network_test, "_COLLECTIVES", "stand_in_rank")
    (tmp_path / "ranks").mkdir()
    run_ranks(
        Question(
            teams=[["worker-0", "worker-1", "worker-4"], ["worker-2", "worker-3"]],
            addresses=["10.0.0.1", "10.0.0.2"],
            ports=[7001, 7002],
            ranks_per_node=len(ends),
            plan={"folder": str(tmp_path / "ranks"), "ends": ends},
            limit_s=limit_s,
        )
    )
    mark, _, answer = capsys.readouterr().out.partition(" ")
    found = json.loads(answer)
    assert (mark, found["node"]) == (ENDED, "worker-3")
    return str(found["error"])


def test_ranks_are_numbered_through_their_own_team(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(tmp_path, monkeypatch, capsys, WELL, WELL) == ""
    placed = [json.loads((tmp_path / f"ranks/{local}").read_text()) for local in (0, 1)]
    assert placed == [
        ["2", "0", "4", "10.0.0.2", "7002", "1"],
        ["3", "1", "4", "10.0.0.2", "7002", "1"],
    ]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"status": 3}, "local rank 1: exit status 3"),
        ({"status": 1, "said": "a\nDistError: no route\n  at b"}, "local rank 1: DistError: no r"),
    ],
)
def test_a_rank_that_fails_is_told_although_another_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: dict[str, object],
    words: str,
) -> None:
    assert said(tmp_path, monkeypatch, capsys, "hang", end).startswith(words)


def test_the_groups_are_those_of_torchtitan() -> None:
    floor = Bandwidth(1, 1)
    assert RankGroups(8, "cuda", floor, 4).groups(8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # With experts split over TP, the ranks of a group are that far apart.
    assert RankGroups(8, "cuda", floor, 2, 2).groups(8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert RankGroups(8, "cuda", floor).groups(8) == []
    assert len(RankGroups(8, "cuda", floor, 32).groups(256)) == 8
    # Of a pair of nodes only, all ranks.
    assert RankGroups(8, "cuda", floor, 32).groups(16) == [list(range(16))]


def network(monkeypatch: pytest.MonkeyPatch, bad: Sequence[str], is_slow: bool) -> None:
    """A network in which a test fails where a bad node takes part."""

    def run(teams: list[list[str]], groups: RankGroups) -> Outcome:
        nodes = [node for team in teams for node in team]
        assert len(set(nodes)) == len(nodes), "a node is in two teams"
        failed = {n: f"of {team}" for n, team in enumerate(teams) if set(team) & set(bad)}
        return Outcome({"all_reduce": 1.0}, failed, set(failed) if is_slow else set())

    monkeypatch.setattr(network_test, "_test", run)


GROUPS = RankGroups(8, "cuda", Bandwidth(1, 1), 8)


def names(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


@pytest.mark.parametrize("count", [3, 4, 5, 9, 32])
@pytest.mark.parametrize("is_slow", [True, False])
def test_the_bad_nodes_are_found_by_pairs(
    monkeypatch: pytest.MonkeyPatch, count: int, is_slow: bool
) -> None:
    choice = random.Random(count)
    for size in {1, max(1, count // 4)}:
        bad = choice.sample(names(count), size)
        network(monkeypatch, bad, is_slow)
        verdict = network_test.test_bandwidth(names(count), GROUPS)
        assert sorted(verdict.bad) == sorted(bad)
        assert not verdict.error and not verdict.warning


def test_a_fault_that_is_no_single_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    network(monkeypatch, [], is_slow=False)
    assert network_test.test_bandwidth(names(4), GROUPS).slowest == {"all_reduce": 1.0}
    network(monkeypatch, names(4), is_slow=True)
    verdict = network_test.test_bandwidth(names(4), GROUPS)
    assert not verdict.bad and "all pairs of nodes fail too" in verdict.error

    def only_together(teams: list[list[str]], groups: RankGroups) -> Outcome:
        return Outcome({}, {0: "slow"}, {0}) if len(teams[0]) == 4 else Outcome()

    monkeypatch.setattr(network_test, "_test", only_together)
    verdict = network_test.test_bandwidth(names(4), GROUPS)
    assert "each pair of nodes passes by itself" in verdict.warning
    assert not verdict.bad and not verdict.error


def step(monkeypatch: pytest.MonkeyPatch, lines: Callable[[Any], Iterator[str]]) -> list[bool]:
    """Have the nodes print these lines of a question; whether each was enough."""
    heard: list[bool] = []

    def run(
        nodes: Sequence[str], module: str, question: str, limit_s: float, on_line: Any, enough: Any
    ) -> StepEnd:
        for line in lines(json.loads(question)):
            on_line(line, 1.0)
            heard.append(enough())
        return StepEnd(1.0, False, {}, "")

    monkeypatch.setattr(network_test, "run_step", run)
    monkeypatch.setattr(network_test, "node_addresses", lambda nodes: dict.fromkeys(nodes, "x"))
    return heard


def ended(node: str, error: str = "") -> str:
    return f"{ENDED} {json.dumps({'node': node, 'error': error})}\n"


@pytest.mark.parametrize(("slowest", "is_fault"), [(25.0, False), (19.0, True)])
def test_the_slowest_of_each_collective_is_held_to_the_floor(
    monkeypatch: pytest.MonkeyPatch, slowest: float, is_fault: bool
) -> None:
    speeds = [("all_to_all", 31.0), ("all_to_all", slowest), ("all_reduce", 180.0)]

    def lines(question: Any) -> Iterator[str]:
        for team, members in enumerate(question["teams"]):
            for name, speed in speeds:
                one = {"team": str(team), "name": name, "gb_per_s": speed, "ranks": "0-15"}
                yield f"cookbook-link {json.dumps(one)}\n"
            yield from map(ended, members)

    step(monkeypatch, lines)
    floor = Bandwidth(all_to_all=20.0, all_reduce=100.0)
    verdict = network_test.test_bandwidth(names(2), RankGroups(8, "cuda", floor, 16))
    assert verdict.slowest == {"all_to_all": slowest, "all_reduce": 180.0}
    fault = "all_to_all over ranks 0-15 reaches 19 GB/s, the profile wants 20"
    assert verdict.error == (fault if is_fault else "")


def test_a_closed_connection_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, own = "local rank 0: DistBackendError: Connection closed", "local rank 0: CUDA error"
    said = [("worker-1", cut), ("worker-0", own)]
    heard = step(monkeypatch, lambda question: (ended(*one) for one in said))
    one_rank = RankGroups(1, "cpu", Bandwidth(1.0, 1.0))
    outcome = network_test._test([["worker-1", "worker-0"]], one_rank)
    assert heard == [False, True]
    assert outcome.faults == {0: f"the ranks cannot communicate (worker-0: {own})"}
    # Without another error it is all that is known.
    said = [("worker-1", cut), ("worker-0", cut)]
    outcome = network_test._test([["worker-1", "worker-0"]], one_rank)
    assert outcome.faults == {0: f"the ranks cannot communicate (worker-1: {cut})"}
    said = [("worker-1", "")]
    outcome = network_test._test([["worker-1", "worker-0"]], one_rank)
    assert outcome.faults == {0: "the ranks cannot communicate (worker-0: no answer)"}
