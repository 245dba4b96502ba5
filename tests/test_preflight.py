"""What follows from the nodes' answers before training: who differs, and who is to blame."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cookbook.config.cluster import Bandwidth
from cookbook.supervise import links
from cookbook.supervise.compare import Fault, common_fault, differing, skewed
from cookbook.supervise.links import Links, Outcome, check_links
from cookbook.supervise.node import Reader, Report, printed


def _report(node: str, facts: dict[str, str], clock: float = 1000.0) -> Report:
    return Report(node, clock, {}, facts)


def test_the_node_that_differs_from_most_is_named_with_what_differs() -> None:
    reports = [_report(f"worker-{n}", {"torch": "2.10.0", "Python": "3.11"}) for n in range(4)]
    reports[2] = _report("worker-2", {"torch": "2.9.1", "Python": "3.11"})
    found = differing(reports)
    assert found.keys() == {"worker-2"}
    assert found["worker-2"][0].reason == "torch is 2.9.1, elsewhere 2.10.0"


def test_of_two_that_differ_the_node_of_the_script_is_right() -> None:
    first, second = _report("worker-9", {"torch": "2.10"}), _report("worker-1", {"torch": "2.9"})
    assert differing([first, second]).keys() == {"worker-1"}
    assert differing([second, first]).keys() == {"worker-9"}


def test_many_differences_fit_into_a_line() -> None:
    reports = [_report(f"worker-{n}", {f"p{k}": "1" for k in range(9)}) for n in range(3)]
    reports[1] = _report("worker-1", {f"p{k}": "2" for k in range(9)})
    (fault,) = differing(reports)["worker-1"]
    assert fault.reason.endswith("p2 is 2, elsewhere 1; and 6 more")


def test_a_fact_that_a_node_does_not_know_is_no_difference() -> None:
    reports = [
        _report("worker-0", {"driver": "580"}),
        _report("worker-1", {}),
        _report("worker-2", {}),
    ]
    assert differing(reports) == {}


def test_a_clock_is_compared_when_the_answer_comes() -> None:
    reports = [_report(f"worker-{n}", {}, 1000.0 + 10 * n) for n in range(3)]
    # They answered ten seconds apart, and their clocks agree.
    received = {f"worker-{n}": 1000.2 + 10 * n for n in range(3)}
    assert skewed(reports, received) == {}
    received["worker-1"] += 60
    assert skewed(reports, received)["worker-1"][0].reason == "its clock is 60 s behind"
    received["worker-1"] -= 120
    assert skewed(reports, received)["worker-1"][0].reason == "its clock is 60 s ahead"


def test_three_of_ten_are_to_blame_and_six_of_ten_are_not() -> None:
    nodes = [f"worker-{n}" for n in range(10)]
    ecc = [Fault("gpu memory", "GPU 3: 1 uncorrectable ECC error(s)", 24)]
    assert common_fault(dict.fromkeys(nodes[:3], ecc), nodes) is None
    assert common_fault(dict.fromkeys(nodes[:5], ecc), nodes) is None
    said = common_fault(dict.fromkeys(nodes[:6], ecc), nodes)
    assert said is not None and said.startswith("gpu memory: 6 of 10 nodes, worker-0: GPU 3")
    # Each has a fault of its own; a node alone may well be bad.
    mixed = {node: [Fault(f"check {n}", "bad", 24)] for n, node in enumerate(nodes)}
    assert common_fault(mixed, nodes) is None
    assert common_fault({"worker-0": ecc}, ["worker-0"]) is None


def test_reports_of_many_nodes_come_through_mixed_lines() -> None:
    reports = [
        Report(f"worker-{n}", float(n), {"gpus": (f"é{n}" * 500, 24)}, {"torch": "2"})
        for n in range(5)
    ]
    lines = [line + "\n" for report in reports for line in printed(report)]
    assert all(len(line.encode()) < 1024 for line in lines) and len(lines) > 10
    random.Random(1).shuffle(lines)
    reader, found = Reader(), {}
    for line in ["srun: warning: something else\n", *lines]:
        if report := reader.read(line):
            found[report.node] = report
    assert [found[report.node] for report in reports] == reports


def test_the_groups_are_those_of_torchtitan() -> None:
    floor = Bandwidth(1, 1)
    assert Links(8, "cuda", floor, 4).groups(8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # With experts split over TP, the ranks of a group are that far apart.
    assert Links(8, "cuda", floor, 2, 2).groups(8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Links(8, "cuda", floor).groups(8) == []
    assert len(Links(8, "cuda", floor, 32).groups(256)) == 8
    # Of a pair of nodes only, all ranks.
    assert Links(8, "cuda", floor, 32).groups(16) == [list(range(16))]


def _network(monkeypatch: pytest.MonkeyPatch, bad: Sequence[str], is_slow: bool) -> None:
    """A network in which a test fails where a bad node takes part."""

    def run(teams: list[list[str]], links: Links) -> Outcome:
        nodes = [node for team in teams for node in team]
        assert len(set(nodes)) == len(nodes), "a node is in two teams"
        failed = {n: f"of {team}" for n, team in enumerate(teams) if set(team) & set(bad)}
        return Outcome({"all_reduce": 1.0}, failed, set(failed) if is_slow else set())

    monkeypatch.setattr(links, "_test", run)


LINKS = Links(8, "cuda", Bandwidth(1, 1), 8)


@pytest.mark.parametrize("count", [3, 4, 5, 9, 32])
@pytest.mark.parametrize("is_slow", [True, False])
def test_the_bad_nodes_are_found_by_pairs(
    monkeypatch: pytest.MonkeyPatch, count: int, is_slow: bool
) -> None:
    nodes = [f"worker-{n}" for n in range(count)]
    choice = random.Random(count)
    for size in {1, max(1, count // 4)}:
        bad = choice.sample(nodes, size)
        _network(monkeypatch, bad, is_slow)
        verdict = check_links(nodes, LINKS)
        assert sorted(verdict.bad) == sorted(bad)
        assert not verdict.error and not verdict.warning


def test_what_no_node_is_to_blame_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [f"worker-{n}" for n in range(4)]
    _network(monkeypatch, [], is_slow=False)
    assert check_links(nodes, LINKS).slowest == {"all_reduce": 1.0}
    _network(monkeypatch, nodes, is_slow=True)
    verdict = check_links(nodes, LINKS)
    assert not verdict.bad and "so it is with all pairs" in verdict.error

    def only_together(teams: list[list[str]], links: Links) -> Outcome:
        return Outcome({}, {0: "slow"}, {0}) if len(teams[0]) == 4 else Outcome()

    monkeypatch.setattr(links, "_test", only_together)
    verdict = check_links(nodes, LINKS)
    assert "each pair of nodes is well by itself" in verdict.warning
    assert not verdict.bad and not verdict.error
