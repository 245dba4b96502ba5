"""The test of the network: which nodes are bad, and the ranks that each node starts for it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cookbook.config.cluster import Bandwidth
from cookbook.supervise import network_test
from cookbook.supervise.network_test import Outcome, RankGroups


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
def test_bad_nodes_are_found(monkeypatch: pytest.MonkeyPatch, count: int, is_slow: bool) -> None:
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
