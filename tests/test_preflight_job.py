"""The look at a job's nodes from its beginning to its answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.config.cluster import Bandwidth, Container
from cookbook.run import slurm
from cookbook.run.excluded import HARDWARE_H, exclude_nodes, read_excluded
from cookbook.run.folder import CellFolder
from cookbook.run.status import RUNNING, Status, read_status, write_status
from cookbook.supervise import __main__ as job_main
from cookbook.supervise import preflight as looking
from cookbook.supervise.compare import Fault
from cookbook.supervise.links import Links, LinksVerdict
from cookbook.supervise.nodes import CannotStartError, JobNodes
from cookbook.supervise.preflight import leave_out_known, look_at_links, preflight
from tests.cells import Point
from tests.test_preflight_nodes import ECC, job, left

__all__ = ["job", "left"]


def test_what_is_known_of_a_node_is_reason_enough(
    job: JobNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    exclude_nodes({"worker-1": "GPU 3: ECC", "worker-5": "of another job"}, hours=5)
    monkeypatch.setattr(slurm, "drained", lambda names: {"worker-2": "Slurm: DRAIN: fan"})
    leave_out_known(job)
    assert job.well == ["worker-0", "worker-3"]
    # Slurm and the list know them already: neither is noted anew.
    assert {fault.hours for faults in job.faults.values() for fault in faults} == {0.0}
    (Path(job.cell.path).parent.parent / "excluded.yaml").write_text("worker-1: [\n")
    job.faults = {}
    leave_out_known(job)
    assert job.well == ["worker-0", "worker-1", "worker-3"]
    assert "the list of nodes to leave out is not used" in job.attempt.log.read_text()


Verdicts = Callable[..., list[list[str]]]


@pytest.fixture
def verdicts(job: JobNodes, monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    """Has the test of the network say these in turn; the nodes that it was asked for."""
    job.cluster = replace(job.cluster, bandwidth=Bandwidth(100.0, 20.0), container=None)

    def say(*found: LinksVerdict) -> list[list[str]]:
        asked: list[list[str]] = []

        def check(names: list[str], links: Links) -> LinksVerdict:
            asked.append(list(names))
            return found[len(asked) - 1]

        monkeypatch.setattr(looking, "check_links", check)
        return asked

    return say


def test_a_node_with_a_bad_link_is_replaced_by_a_spare_one(
    job: JobNodes, verdicts: Verdicts
) -> None:
    asked = verdicts(
        LinksVerdict({"all_reduce": 9.0}, {"worker-1": "slow"}), LinksVerdict({"all_reduce": 180.0})
    )
    look_at_links(job)
    # Of four nodes three train: the spare one is tested when it takes a place.
    assert asked == [["worker-0", "worker-1", "worker-2"], ["worker-0", "worker-2", "worker-3"]]
    assert job.faults == {"worker-1": [Fault("network test", "slow", HARDWARE_H)]}
    assert [one.node for one in read_excluded()] == ["worker-1"]
    assert job.speeds == {"all_reduce": 180.0}


def test_what_no_node_is_to_blame_for_stops_or_is_said(job: JobNodes, verdicts: Verdicts) -> None:
    verdicts(LinksVerdict({}, error="the ranks cannot talk"))
    with pytest.raises(CannotStartError, match="the ranks cannot talk; no fault of single nodes"):
        look_at_links(job)
    verdicts(LinksVerdict({"all_reduce": 9.0}, warning="slow as a whole"))
    look_at_links(job)
    assert "slow as a whole; training starts all the same" in job.attempt.log.read_text()
    assert job.faults == {}


@pytest.mark.parametrize("without", ["floor", "container", "ranks"])
def test_the_network_is_tested_where_that_can_be(
    job: JobNodes, verdicts: Verdicts, without: str
) -> None:
    asked = verdicts(LinksVerdict({}))
    if without == "floor":
        job.cluster = replace(job.cluster, bandwidth=None)
    elif without == "container":
        job.cluster = replace(job.cluster, container=Container("image"))
    else:
        job.record = replace(job.record, nodes=1, ranks_per_node=1)
    look_at_links(job)
    assert asked == []


@pytest.fixture
def cell(job: JobNodes, monkeypatch: pytest.MonkeyPatch) -> CellFolder:
    """A cell of three nodes in a job of four."""
    record = Point("debug", "bf16", "standard", "soperator-b200").cell().record()
    replace(record, nodes=3).write(job.cell.record)
    write_status(job.cell, Status(RUNNING, 0))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "worker-[0-3]")
    monkeypatch.setattr(slurm, "nodes_in", lambda names: job.nodes)
    monkeypatch.setattr(looking, "look_at_links", lambda found: None)
    return job.cell


@pytest.mark.parametrize(
    ("bad", "expected"),
    [([], "worker-0,worker-1,worker-2"), (["worker-1"], "worker-0,worker-2,worker-3")],
)
def test_the_answer_is_the_nodes_that_train(
    cell: CellFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bad: list[str],
    expected: str,
) -> None:
    monkeypatch.delenv("COOKBOOK_PREFLIGHT", raising=False)
    monkeypatch.setattr(
        looking, "ask_nodes", lambda job: job.faults.update({node: [ECC] for node in bad})
    )
    assert job_main.main(["preflight", str(cell.path), "--attempt=0"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    found = json.loads(cell.attempt(0).preflight.read_text())
    assert found["nodes"] == expected.split(",")
    assert list(found["left_out"]) == bad == [one.node for one in read_excluded()]


def test_switched_off_it_takes_the_first_nodes_unseen(
    cell: CellFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(job: JobNodes) -> None:
        pytest.fail("it was asked")

    monkeypatch.setattr(looking, "ask_nodes", ask)
    monkeypatch.setenv("COOKBOOK_PREFLIGHT", "off")
    assert preflight(cell, 0) == ["worker-0", "worker-1", "worker-2"]
    monkeypatch.setenv("COOKBOOK_PREFLIGHT", "of")
    with pytest.raises(InputError, match="found 'of', allowed: full, nodes, off"):
        preflight(cell, 0)


def test_what_cannot_start_ends_its_script_and_is_noted(
    cell: CellFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(job: JobNodes) -> None:
        raise CannotStartError("disk: 4 of 4 nodes")

    monkeypatch.delenv("COOKBOOK_PREFLIGHT", raising=False)
    monkeypatch.setattr(looking, "ask_nodes", ask)
    assert job_main.main(["preflight", str(cell.path), "--attempt=0"]) == 4
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "cookbook.supervise: preflight: disk: 4 of 4 nodes\n")
    status = read_status(cell)
    assert (status.state, status.reason) == ("failed", "preflight: disk: 4 of 4 nodes")
