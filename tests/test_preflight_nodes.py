"""What a job does about bad nodes: leaves them out, goes back to the queue, or gives up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.schema import Unchecked
from cookbook.config.cluster import Bandwidth, load_cluster
from cookbook.config.recipe import load_recipe
from cookbook.run import slurm
from cookbook.run.excluded import exclude_nodes, read_excluded
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.supervise import ask, links, nodes
from cookbook.supervise.compare import Fault
from cookbook.supervise.links import Links, check_links
from cookbook.supervise.links_node import ENDED
from cookbook.supervise.node import Question, Report, printed
from cookbook.supervise.nodes import CannotStartError, JobNodes, go_on_without, remember
from cookbook.supervise.step import StepEnd

ECC = Fault("gpu memory", "GPU 3: 1 uncorrectable ECC error(s)", 24.0)
BUSY = Fault("idle", "GPU 0: 9 GiB in use", 1.0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobNodes:
    """A job of four nodes, one of them spare, in a partition of six."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_JOB_PARTITION": "main"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    cell = CellFolder(tmp_path / "runs" / "r" / "cell")
    cell.attempt(0).path.mkdir(parents=True)
    monkeypatch.setattr(slurm, "partition_nodes", lambda name: _names(6))
    monkeypatch.setattr(slurm, "drained", lambda names: {})
    monkeypatch.setattr(slurm, "left_out_by", lambda job_id: [])
    return JobNodes(
        cell=cell,
        attempt=cell.attempt(0),
        record=CellRecord(nodes=3, ranks_per_node=8, max_restarts=3),
        cluster=load_cluster("soperator-b200"),
        recipe=load_recipe("debug"),
        cluster_name="soperator-b200",
        nodes=_names(4),
    )


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """How the job went back to the queue."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(nodes, "leave_for_queue", lambda *words: found.append(words))
    return found


def _names(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


def test_a_node_is_left_out_for_the_longest_of_its_faults(job: JobNodes) -> None:
    job.faults = {"worker-1": [BUSY, ECC], "worker-2": [BUSY], "worker-3": [Fault("list", "x", 0)]}
    remember(job)
    listed = {one.node: one for one in read_excluded()}
    assert listed.keys() == {"worker-1", "worker-2"}
    hours = (listed["worker-1"].until - listed["worker-2"].until) / 3600
    assert hours == pytest.approx(23, abs=0.1)
    assert listed["worker-1"].reason == f"{BUSY.reason}; {ECC.reason}"


@pytest.mark.parametrize(("restarts", "goes"), [("2", True), ("3", False)])
def test_a_job_goes_back_to_the_queue_within_its_restarts(
    job: JobNodes,
    left: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    restarts: str,
    goes: bool,
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    job.faults = {"worker-1": [ECC], "worker-2": [ECC]}
    remember(job)
    if not goes:
        with pytest.raises(CannotStartError, match=r"started again 3 times already .*ECC error"):
            go_on_without(job)
        assert left == []
        return
    go_on_without(job)
    assert left == [("77", ["worker-1", "worker-2"], None)]
    found = json.loads(job.attempt.preflight.read_text())
    assert (found["nodes"], found["told_slurm"]) == ([], ["worker-1", "worker-2"])
    assert found["left_out"].keys() == {"worker-1", "worker-2"}


def test_what_the_user_leaves_out_stays_so_and_what_the_list_brought_does_not(
    job: JobNodes, left: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "left_out_by", lambda job_id: ["worker-4", "worker-5"])
    # The list named worker-5 when this job was told; its entry is gone by now.
    job.attempt.preflight.write_text(json.dumps({"told_slurm": ["worker-5"]}))
    job.faults = {"worker-1": [BUSY]}
    job.record = replace(job.record, nodes=4)
    remember(job)
    go_on_without(job)
    assert left == [("77", ["worker-4", "worker-1"], None)]


def test_where_too_few_are_left_it_waits_for_the_first_that_comes_back(
    job: JobNodes, left: list[tuple[Any, ...]]
) -> None:
    exclude_nodes({"worker-4": "moved"}, hours=5)
    exclude_nodes({"worker-5": "moved"}, hours=3)
    job.faults = {"worker-1": [ECC], "worker-2": [ECC]}
    remember(job)
    listed = {one.node: one.until for one in read_excluded()}
    go_on_without(job)
    # Four of six must be there: two of the four come back first.
    assert left == [("77", ["worker-1", "worker-2"], listed["worker-4"])]
    job.recipe = replace(job.recipe, too_few_nodes="stop")
    with pytest.raises(CannotStartError, match=r"2 missing \(too_few_nodes: stop\)"):
        go_on_without(job)


def _answers(reports: Sequence[Report], asked: list[Any]) -> Callable[..., StepEnd]:
    def run(
        names: Sequence[str], command: Sequence[str], limit_s: float, on_line: Any, *_: Any
    ) -> StepEnd:
        asked.append((list(names), json.loads(command[-1])))
        for report in reports:
            for line in printed(report):
                on_line(line + "\n", 1000.0)
        return StepEnd(1.0, False, {}, "srun: error: worker-2: task 2: Killed\n")

    return run


@pytest.mark.parametrize(("degree", "expected"), [(8, False), (16, True)])
def test_nodes_are_asked_for_what_their_job_needs(
    job: JobNodes, monkeypatch: pytest.MonkeyPatch, degree: int, expected: bool
) -> None:
    options = {
        "parallelism.expert_parallel_comm_backend": "deepep",
        "parallelism.expert_parallel_degree": degree,
        "model.hf_assets_path": "assets/hf/A",
    }
    job.record = replace(job.record, options=Unchecked(options))
    asked: list[Any] = []
    reports = [Report(name, 1000.0, {}, {}) for name in job.nodes]
    reports[0] = replace(reports[0], problems={"idle": (BUSY.reason, BUSY.hours)})
    del reports[2]
    monkeypatch.setattr(ask, "run_step", _answers(reports, asked))
    ask.ask_nodes(job)
    names, question = asked[0]
    assert names == job.nodes
    assert Question(**question) == Question(
        "soperator-b200", str(job.cell.path), expected, {"tokenizer": "assets/hf/A"}
    )
    assert job.faults["worker-0"] == [BUSY]
    (silent,) = job.faults["worker-2"]
    assert silent.check == "answer" and "worker-2: task 2: Killed" in silent.reason
    assert job.well == ["worker-1", "worker-3"]


def test_a_fault_of_most_nodes_is_none_of_theirs(
    job: JobNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"disk": ("/scratch is not there", 1.0)}
    reports = [Report(name, 1000.0, wrong, {}) for name in job.nodes]
    monkeypatch.setattr(ask, "run_step", _answers(reports, []))
    with pytest.raises(CannotStartError, match=r"disk: 4 of 4 nodes.* none is left out"):
        ask.ask_nodes(job)
    assert job.faults == {}


def _measured(speeds: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A network on which the collectives of each test reach these GB/s."""

    def run(
        names: Sequence[str], command: Sequence[str], limit_s: float, on_line: Any, *_: Any
    ) -> StepEnd:
        question = json.loads(command[-1])
        for team, members in enumerate(question["teams"]):
            for name, found in speeds.items():
                for speed in found:
                    one = {"team": str(team), "name": name, "gb_per_s": speed, "ranks": "0-15"}
                    on_line(f"cookbook-link {json.dumps(one)}\n", 1.0)
            for node in members:
                on_line(f"{ENDED} {json.dumps({'node': node, 'said': ''})}\n", 1.0)
        return StepEnd(1.0, False, {}, "")

    monkeypatch.setattr(links, "run_step", run)
    monkeypatch.setattr(links, "node_addresses", lambda names: dict.fromkeys(names, "10.0.0.1"))


def test_the_slowest_of_each_collective_is_held_to_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    floor = Bandwidth(all_to_all=20.0, all_reduce=100.0)
    pair = Links(8, "cuda", floor, 16)
    _measured({"all_to_all": [31.0, 25.0, 29.0], "all_reduce": [180.0]}, monkeypatch)
    verdict = check_links(_names(2), pair)
    assert verdict.slowest == {"all_to_all": 25.0, "all_reduce": 180.0}
    assert not verdict.bad and not verdict.error
    _measured({"all_to_all": [31.0, 19.9], "all_reduce": [180.0]}, monkeypatch)
    verdict = check_links(_names(2), pair)
    assert "all_to_all over ranks 0-15 reaches 19.9 GB/s, the profile wants 20" in verdict.error
    _measured({"all_to_all": [20.0], "all_reduce": [100.0]}, monkeypatch)
    assert not check_links(_names(2), pair).error


def test_who_closed_a_connection_is_heard_before_whose_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = "local rank 0: torch.distributed.DistNetworkError: Failed to recv, got 0 bytes."
    own = "local rank 0: RuntimeError: Unable to find address for: none0"
    heard: list[bool] = []

    def run(
        names: Sequence[str],
        command: Sequence[str],
        limit_s: float,
        on_line: Any,
        is_enough: Callable[[], bool],
    ) -> StepEnd:
        for node, words in said:
            on_line(f"{ENDED} {json.dumps({'node': node, 'said': words})}\n", 1.0)
            heard.append(is_enough())
        return StepEnd(1.0, False, {}, "")

    monkeypatch.setattr(links, "run_step", run)
    monkeypatch.setattr(links, "node_addresses", lambda names: dict.fromkeys(names, "10.0.0.1"))
    one_rank = Links(1, "cpu", Bandwidth(1.0, 1.0))
    said = [("worker-1", cut), ("worker-0", own)]
    outcome = links._test([["worker-1", "worker-0"]], one_rank)
    assert heard == [False, True]
    assert outcome.faults == {0: f"the ranks cannot talk (worker-0: {own})"}
    # Nobody says more: then all have been heard.
    heard.clear()
    said = [("worker-1", cut), ("worker-0", cut)]
    outcome = links._test([["worker-1", "worker-0"]], one_rank)
    assert heard == [False, True]
    assert outcome.faults == {0: f"the ranks cannot talk (worker-1: {cut})"}
