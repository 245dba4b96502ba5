"""The nodes of a job before training: who is bad, who trains; the list of nodes to leave out."""

import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError, JobError
from cookbook.base.paths import ROOT
from cookbook.config.cluster import Bandwidth, load_cluster
from cookbook.doctor.check import Fault
from cookbook.run import slurm
from cookbook.run.excluded import exclude_nodes, read_excluded
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.slurm import StepEnd
from cookbook.run.status import AttemptEnd, Cause, write_attempt_end
from cookbook.supervise import network_test
from cookbook.supervise import preflight as module
from cookbook.supervise.network_test import Network
from cookbook.supervise.node_report import Report, ReportReader, format_report, report_node
from cookbook.supervise.preflight import JobNodes
from tests.cells import Point

ECC = Fault("gpu memory", "GPU 3: 1 uncorrectable ECC error(s)", 24.0)
BUSY = Fault("idle", "GPU 0: 9 GiB in use", 1.0)


def names(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobNodes:
    """A job of four nodes, one of them spare, in a partition of six."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("COOKBOOK_SCHEDULER", "slurm")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "main")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "worker-[0-3]")
    for name in ("SLURM_RESTART_COUNT", "COOKBOOK_PREFLIGHT"):
        monkeypatch.delenv(name, raising=False)
    cell = CellFolder(tmp_path / "runs" / "r" / "cell")
    cell.attempt(0).path.mkdir(parents=True)
    monkeypatch.setattr(slurm, "partition_nodes", lambda name: names(6))
    monkeypatch.setattr(slurm, "drained", lambda names: {})
    monkeypatch.setattr(module, "rehearsed", lambda job: nullcontext())
    monkeypatch.setattr(slurm, "excluded_by", lambda job_id: [])
    monkeypatch.setattr(slurm, "nodes_in", lambda text: names(4))
    cluster = load_cluster("soperator-b200")
    profile = dict(cluster.content)
    record = CellRecord(cluster=cluster.name, profile=profile, nodes=3, ranks_per_node=8)
    return JobNodes(cell, cell.attempt(0), record, cluster, names(4))


def _report(node: str, facts: dict[str, str]) -> Report:
    return Report(node, [], facts)


def test_the_node_that_differs_from_most_is_named_with_what_differs() -> None:
    reports = [_report(name, {"torch": "2.10", "Python": "3.11"}) for name in names(4)]
    reports[2] = _report("worker-2", {"torch": "2.9", "Python": "3.11"})
    ((node, fault),) = module.differing(reports).items()
    assert (node, fault.reason) == ("worker-2", "torch is 2.9, elsewhere 2.10")
    # Of two that differ the node of the script is right.
    first, second = _report("worker-9", {"torch": "2.10"}), _report("worker-1", {"torch": "2.9"})
    assert module.differing([first, second]).keys() == {"worker-1"}
    assert module.differing([second, first]).keys() == {"worker-9"}
    # A fact that a node does not know is no difference.
    assert module.differing([_report("worker-0", {"driver": "580"}), _report("worker-1", {})]) == {}


def test_a_node_without_the_texts_or_with_others_differs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.jsonl.gz").write_bytes(b"1")
    patterns = [f"0.5:{tmp_path}", f"0.5:{tmp_path}/*.jsonl"]

    def texts() -> str:
        job = ("local", dict(load_cluster("local").content), str(tmp_path), False)
        return report_node(*job, files={}, texts={"texts": patterns}).facts["texts"]

    whole = texts()
    assert whole.startswith("3 files, ") and texts() == whole
    (tmp_path / "b.jsonl.gz").write_bytes(b"12")
    assert texts() != whole and texts().startswith("3 files, ")
    (tmp_path / "a.jsonl").unlink()
    assert texts() == f"'{tmp_path}/*.jsonl' matches no file"


def test_reports_of_many_nodes_come_through_mixed_lines() -> None:
    reports = [
        Report(f"worker-{n}", [Fault("gpus", f"é{n}" * 500, 24)], {"torch": "2"}) for n in range(5)
    ]
    lines = [line + "\n" for report in reports for line in format_report(report)]
    assert all(len(line.encode()) < 1024 for line in lines) and len(lines) > 10
    random.Random(1).shuffle(lines)
    reader, found = ReportReader(), {}
    for line in ["srun: warning: something else\n", *lines]:
        if report := reader.read(line):
            found[report.node] = report
    assert [found[report.node] for report in reports] == reports


def _answers(reports: Sequence[Report], asked: list[Any]) -> Callable[..., StepEnd]:
    def run(
        nodes: Sequence[str], module: str, question: str, limit_s: float, on_line: Any, *_: Any
    ) -> StepEnd:
        asked.append((list(nodes), json.loads(question)))
        for report in reports:
            for line in format_report(report):
                on_line(line + "\n")
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
        "data.files": ["0.7:web/*.jsonl", "0.3:code"],
        "data.validation_files": ["held-out.jsonl"],
        "validation.dataset_path": "c4",
        "validation.enable": expected,
    }
    job.record = replace(job.record, options=options)
    asked: list[Any] = []
    reports = [Report(name, [], {}) for name in job.nodes]
    reports[0] = replace(reports[0], faults=[BUSY, ECC])
    del reports[2]
    monkeypatch.setattr(module, "run_step", _answers(reports, asked))
    module.ask_nodes(job)
    nodes, question = asked[0]
    assert nodes == job.nodes
    assert question == {
        "cluster": "soperator-b200",
        "profile": dict(job.record.profile),
        "folder": str(job.cell.path),
        "needs_ibgda": expected,
        "files": {"tokenizer": "assets/hf/A"} | ({"validation data": "c4"} if expected else {}),
        "texts": {"texts": ["0.7:web/*.jsonl", "0.3:code"]}
        | ({"validation texts": ["held-out.jsonl"]} if expected else {}),
    }
    assert job.faults["worker-0"] == [BUSY, ECC]
    (silent,) = job.faults["worker-2"]
    assert silent.check == "answer" and "worker-2: task 2: Killed" in silent.reason
    assert job.healthy == ["worker-1", "worker-3"]
    # A node is excluded for the longest of its faults.
    listed = {one.node: one for one in read_excluded()}
    assert listed.keys() == {"worker-0", "worker-2"}
    hours = (listed["worker-0"].until - listed["worker-2"].until) / 3600
    assert hours == pytest.approx(23, abs=0.1)
    assert listed["worker-0"].reason == f"{BUSY.reason}; {ECC.reason}"


def test_a_wrong_profile_takes_one_node_and_not_the_cluster(
    job: JobNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [Fault("GPUs", "H200, and the profile has B200", 24.0)]
    reports = [Report(name, wrong, {}) for name in names(6)]
    monkeypatch.setattr(module, "run_step", _answers(reports, []))
    job.record, job.nodes = replace(job.record, nodes=1), ["worker-0"]
    module.ask_nodes(job)
    with pytest.raises(module.RequeueNeededError):
        module.require_nodes(job)
    write_attempt_end(job.attempt, AttemptEnd(0, Cause.BAD_NODES, job_id="77"))
    # Slurm starts it again elsewhere.
    job.attempt, job.nodes, job.faults = job.cell.attempt(1), ["worker-1"], {}
    with pytest.raises(JobError, match=r"GPUs: 2 of 2 nodes.* no fault of single nodes"):
        module.ask_nodes(job)
    assert [one.node for one in read_excluded()] == ["worker-0"]
    # Whatever jobs find, the list takes no more than half of a partition.
    for number in range(6):
        job.exclude({f"worker-{number}": [ECC]})
    assert len(read_excluded()) == 3


def requeued(job: JobNodes) -> tuple[Sequence[str] | None, float | None]:
    with pytest.raises(module.RequeueNeededError) as needed:
        module.require_nodes(job)
    return needed.value.decision.exclude, needed.value.decision.begin


def test_requeued_within_its_restarts(job: JobNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(cause: Cause, job_id: str = "77") -> None:
        write_attempt_end(job.attempt, AttemptEnd(0, cause, job_id=job_id))
        job.attempt = job.cell.next_attempt()
        job.attempt.path.mkdir()

    # Slurm started it again after each; a save and a preemption are no failures.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "5")
    for cause in (Cause.DEAD_RANK, Cause.STOPPED, Cause.STOPPED, Cause.SAVED, Cause.BAD_NODES):
        end(cause)
    end(Cause.DEAD_RANK, job_id="76")
    job.faults = {"worker-1": [ECC]}
    # The spare one takes its place.
    module.require_nodes(job)
    job.faults["worker-2"] = [ECC]
    assert requeued(job) == (["worker-1", "worker-2"], None)
    found = json.loads(job.attempt.preflight.read_text())
    assert (found["nodes"], found["for_slurm"]) == ([], ["worker-1", "worker-2"])
    assert found["excluded"].keys() == {"worker-1", "worker-2"}
    end(Cause.BAD_NODES)
    with pytest.raises(JobError, match=r"restarted 3 times already, as max_restarts.*ECC error"):
        module.require_nodes(job)


def test_what_the_user_excludes_stays_so(job: JobNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = ["worker-4", "worker-5", "worker-6", "worker-7"]
    monkeypatch.setattr(slurm, "excluded_by", lambda job_id: left_out)
    # The list named the others, at submission and at a requeue; their entries are gone by now.
    monkeypatch.setenv("COOKBOOK_EXCLUDED", "worker-6,worker-7")
    # An earlier job of this cell left out worker-4 too, before the user excluded it.
    for number, (job_id, node) in enumerate([("76", "worker-4"), ("77", "worker-5")]):
        attempt = job.cell.attempt(number)
        attempt.path.mkdir(exist_ok=True)
        attempt.preflight.write_text(json.dumps({"for_slurm": [node]}))
        write_attempt_end(attempt, AttemptEnd(number, Cause.BAD_NODES, job_id=job_id))
    job.faults = {"worker-1": [BUSY]}
    job.record = replace(job.record, nodes=4)
    assert requeued(job) == (["worker-4", "worker-1"], None)


def test_where_too_few_are_left_it_waits_for_the_first_that_comes_back(job: JobNodes) -> None:
    exclude_nodes({"worker-1": ECC.reason, "worker-2": ECC.reason}, hours=24)
    exclude_nodes({"worker-4": "moved"}, hours=5)
    exclude_nodes({"worker-5": "moved"}, hours=3)
    job.faults = {"worker-1": [ECC], "worker-2": [ECC]}
    listed = {one.node: one.until for one in read_excluded()}
    # Four of six must be there: two of the four come back first.
    assert requeued(job) == (["worker-1", "worker-2"], listed["worker-4"])
    job.record = replace(job.record, too_few_nodes="stop")
    with pytest.raises(JobError, match=r"2 missing \(too_few_nodes: stop\)"):
        module.require_nodes(job)


def test_a_network_fault_of_no_single_node(job: JobNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    job.cluster = replace(job.cluster, bandwidth=Bandwidth(100.0, 20.0), container=None)
    found = Network({}, error="the ranks cannot communicate")
    monkeypatch.setattr(module, "check_links", lambda *_: found)
    with pytest.raises(JobError, match="communicate; no fault of single nodes"):
        module.check_network(job)
    found = Network({"all_to_all": 8, "all_reduce": 9}, warning="slow as a whole")
    assert module.check_network(job) and job.faults == {}
    assert [*job.speeds] == ["all_reduce", "all_to_all"]
    assert "slow as a whole; training starts all the same" in job.attempt.log.read_text()


def test_switched_off_it_asks_nobody(job: JobNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_nodes", lambda job: pytest.fail("it was asked"))
    monkeypatch.setenv("COOKBOOK_PREFLIGHT", "off")
    assert module.preflight(job.cell, job.attempt, job.record) == names(3)


REHEARSED = module.rehearsed


@pytest.mark.titan
def test_what_would_end_every_rank_ends_the_job_before_they_start(
    job: JobNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, content in (("tokenizer.json", "{}"), ("tokenizer_config.json", "{}")):
        (tmp_path / name).write_text(content)
    job.record = Point("debug", "bf16", "standard", "local").cell().job_record()
    # Also where the texts are not here.
    hub = {"training.dataset": "c4", "training.dataset_path": None}
    options = job.record.options | hub | {"model.hf_assets_path": str(tmp_path)}
    wrong = replace(job, record=replace(job.record, options=options))
    says = f"debug-.*failed: ValueError: {tmp_path}: Exception: Model missing"
    with pytest.raises(InputError, match=says), REHEARSED(wrong):
        pass
    with REHEARSED(job):
        pass
    write_attempt_end(job.attempt, AttemptEnd(0, Cause.ERROR, job_id="77"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("rehearsed again"))
    with REHEARSED(job):
        pass
    assert re.fullmatch(
        r"cookbook: preflight: rehearsed \([\d.]+ s\)\n", job.attempt.log.read_text()
    )


@pytest.mark.parametrize(
    ("resolved", "address"),
    [
        # Every node would take that for itself; Slurm's address is none.
        ("127.0.1.1", "worker-0-ib"),
        ("10.9.8.7", "10.9.8.7"),
    ],
)
def test_the_heads_address(monkeypatch: pytest.MonkeyPatch, resolved: str, address: str) -> None:
    monkeypatch.setattr(slurm, "node_addresses", lambda nodes: {nodes[0]: f"{nodes[0]}-ib"})
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    asked: list[str] = []

    def getaddrinfo(name: str, *_: object) -> list[Any]:
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror
        return [(0, 0, 0, "", (resolved, 0)), (0, 0, 0, "", ("10.1.1.1", 0))]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    assert module.head_address("worker-0") == address
    assert asked == ["worker-0-ib"] * 3


FLOOR = Bandwidth(1, 4)


def check_links(monkeypatch: pytest.MonkeyPatch, count: int, speed: Any, **errors: str) -> Network:
    """Test `count` nodes of 8 ranks, whose all-to-alls have the speed of their slower node."""

    def run(
        nodes: Sequence[str], module: str, text: str, limit: float, on_line: Any, *_: Any
    ) -> None:
        question = json.loads(text)
        assert question["nodes"] == sorted(nodes) and "networ" in module
        groups = question["plan"]["groups"]
        # Those that run at once are of other nodes.
        assert not set(groups[0]) & {rank for one in groups[1 : count // 2] for rank in one}
        for name, ranks in (("all_reduce", range(8 * count)), *(("all_to_all", g) for g in groups)):
            slower = min(speed(sorted(nodes)[rank // 8]) for rank in ranks)
            one = {"name": name, "ranks": [ranks[0], ranks[-1]], "gb_per_s": slower}
            on_line(f"cookbook-link {json.dumps(one)}")
        for node in nodes:
            on_line(f"cookbook-links {json.dumps({node: errors.get(node[7:], '')})}")

    monkeypatch.setattr(network_test, "run_step", run)
    monkeypatch.setattr(network_test, "node_addresses", lambda nodes: {nodes[0]: "10.0.0.7"})
    return network_test.check_links(names(count), "cuda", 8, FLOOR)


@pytest.mark.parametrize("count", [3, 4, 5, 9, 32])
def test_slow_nodes_are_found(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for bad in ({"worker-0"}, {"worker-1", f"worker-{count - 1}"}):
        if 2 * len(bad) < count:
            found = check_links(monkeypatch, count, lambda node, bad=bad: 9 - 6 * (node in bad))
            assert found.bad.keys() == bad and not found.error
            assert "reaches 3 GB/s, the profile wants 4" in found.bad["worker-" + min(bad)[7:]]
    assert found.slowest == {"all_reduce": 3, "all_to_all": 3}


def test_a_fault_that_is_no_single_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_links(monkeypatch, 4, lambda node: 9) == Network(
        {"all_reduce": 9, "all_to_all": 9}
    )
    for count in (1, 2, 4):
        found = check_links(monkeypatch, count, lambda node: 3)
        assert not found.bad and "reaches 3 GB/s, the profile wants 4" in found.error
    # One pair of nodes that are fast otherwise: they train.
    nodes = names(4)
    assert network_test.slow_nodes(nodes, {(nodes[3], nodes[0]): "slow"}) == {}


def test_a_node_that_breaks_the_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = dict.fromkeys("023", "rank 3: RuntimeError: Connection closed by peer")
    own = {"1": "rank 0: RuntimeError: Unable to find address for: ib0"}
    found = check_links(monkeypatch, 4, lambda node: 9, **closed, **own)
    assert [*found.bad] == ["worker-1"] and "cannot communicate (worker-1: rank" in str(found.bad)
    found = check_links(monkeypatch, 4, lambda node: 9, **dict.fromkeys("0123", own["1"]))
    assert not found.bad and "find address" in found.error


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list, in a folder of runs of the test's own."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    return tmp_path / "excluded.yaml"


def test_a_node_is_left_out_until_its_entry_expires(path: Path) -> None:
    assert read_excluded() == []
    path.write_text(
        "worker-1:\n  until: 2020-01-01\n  reason: old\n"
        "worker-2:\n  until: 2999-01-01   # for ever\n"
    )
    exclude_nodes({"worker-7": "GPU 3: # 'a' \"b\" \\ \x07\nsecond line"}, hours=24)
    found = {one.node: one for one in read_excluded()}
    assert {node: one.reason for node, one in found.items()} == {
        "worker-2": "no reason",
        "worker-7": "GPU 3: # 'a' \"b\" \\   second line",
    }
    assert abs(found["worker-7"].until - time.time() - 24 * 3600) <= 60
    text = path.read_text()
    assert "worker-1" not in text and text.startswith("#") and "delete its entry" in text
    # Never for a shorter time than before.
    for reason, hours, expected in (("ECC", 36, "ECC"), ("disk", 1, "ECC"), ("new", 48, "new")):
        exclude_nodes({"worker-7": reason}, hours=hours)
        assert {one.node: one.reason for one in read_excluded()}["worker-7"] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker-1: until tomorrow\n", r"excluded.yaml:1: worker-1: found the text"),
        ("worker-1:\n  until: tomorrow\n", r"excluded.yaml:2: worker-1.until: .* 2027-01-31 18:00"),
        ("worker-1:\n  reason: no time\n", r"worker-1.until: found nothing"),
        ("worker-1: [\n", "YAML syntax"),
    ],
)
def test_a_broken_list_is_not_overwritten(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_excluded()
    with pytest.raises(InputError, match=message):
        exclude_nodes({"worker-2": "ECC"}, hours=1)
    assert path.read_text() == text


def test_writers_at_the_same_time_lose_nothing(path: Path) -> None:
    code = (
        "import sys\nfrom cookbook.run.excluded import exclude_nodes\n"
        "for k in range(8):\n    exclude_nodes({f'worker-{sys.argv[1]}-{k}': 'ECC'}, hours=1)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], cwd=ROOT) for number in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert len(read_excluded()) == 32
