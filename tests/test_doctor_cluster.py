"""The doctor for a cluster profile: login nodes, nodes with other GPUs, partitions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.base.gpus import NVIDIA_SMI
from cookbook.doctor.__main__ import main
from cookbook.doctor.check import Finding
from cookbook.doctor.checks import is_ready
from cookbook.doctor.surroundings import SLURM_PARTITIONS, SLURM_PING, Answer, Surroundings
from tests.doctor_node import B200_ROW, H200_ROW, LIMITS, Node, whole_node
from tests.submit import ROOT


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return whole_node(tmp_path)


def test_the_profile_s_partition(node: Node) -> None:
    assert node.findings(partition="hidden")["partition"].found.startswith("hidden: 32 nodes")
    own = str(ROOT / "tests/clusters/container.yaml")
    assert "no partition 'training'" in node.findings(own)["partition"].found
    assert node.findings(own, partition="main")["partition"].state == "ok"
    finding = node.findings(partition="gpus")["partition"]
    assert (finding.state, "there are: hidden, main" in finding.found) == ("problem", True)


def test_a_login_node_waits_for_no_gpu(node: Node) -> None:
    node.become_login_node()
    node.write("root/proc/self/limits", LIMITS + "Max locked memory  65536  65536  bytes\n")
    findings = node.findings()
    assert {findings[name].state for name in ("gpus", "ibgda", "memlock")} == {"not here"}
    assert is_ready(list(findings.values()))


def test_gpus_are_those_that_a_run_gets(node: Node) -> None:
    node.environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    found = node.findings()["gpus"].found
    assert found.startswith("2 x NVIDIA B200 (10.0, 179 GiB), of 8: ")
    node.environment["CUDA_VISIBLE_DEVICES"] = "-1"
    finding = node.findings()["gpus"]
    assert finding.state == "warning"
    assert finding.found.startswith("CUDA_VISIBLE_DEVICES='-1' hides all 8")
    # The driver is here all the same.
    assert node.findings()["ibgda"].state == "ok"


@pytest.mark.parametrize("answered", [None, 9])
def test_a_login_node_is_checked_for_its_cluster(node: Node, answered: int | None) -> None:
    """A shared root file system can bring nvidia-smi to nodes that have no GPU."""
    node.become_login_node()
    node.answers[NVIDIA_SMI] = Answer(answered, "NVIDIA-SMI has failed" if answered else "")
    findings = node.findings("soperator-b200")
    assert findings["gpus"] == Finding(
        "gpus",
        "not here",
        "none on this node, as on a login node; soperator-b200 has 8 x B200 (10.0, 178 GiB) a "
        "node: MXFP8 in hardware",
    )
    assert is_ready(list(findings.values()))
    assert node.findings("h200-node")["gpus"].found.endswith("float8; MXFP8 only emulated")
    assert "the compute nodes' GPUs count" in node.findings()["gpus"].found
    cpu_nodes = str(ROOT / "tests/clusters/cpu-nodes.yaml")
    assert node.findings(cpu_nodes)["gpus"].found.endswith("cpu-nodes trains on the CPU")


def test_a_node_whose_gpus_are_gone_is_no_login_node(node: Node) -> None:
    node.answers[NVIDIA_SMI] = Answer(9, "No devices were found\n")
    assert node.findings("soperator-b200")["gpus"].state == "problem"


@pytest.mark.parametrize(
    ("rows", "profile", "state"),
    [
        (B200_ROW * 8, "soperator-b200", "ok"),
        (H200_ROW * 8, "h200-node", "ok"),
        (H200_ROW * 8, "soperator-b200", "warning"),
        (B200_ROW * 8, "h200-node", "warning"),
        (B200_ROW * 4, "soperator-b200", "warning"),
        ("NVIDIA H100, 9.0, 81559, 570.1, GPU-d\n" * 8, "h200-node", "warning"),
    ],
)
def test_gpus_are_compared_with_the_profile(
    node: Node, rows: str, profile: str, state: str
) -> None:
    node.answers[NVIDIA_SMI] = Answer(0, rows)
    finding = node.findings(profile)["gpus"]
    assert finding.state == state
    assert (f"; {profile} has 8 x " in finding.found) == (state == "warning")


@pytest.mark.parametrize(
    ("row", "state", "found"),
    [
        ("main*|up|32|gpu:nvidia_b200:8(S:0-1),shard:16|infinite", "ok", "32 nodes"),
        ("main*|up|32|gpu:8|infinite", "ok", "32 nodes"),
        ("main*|up|32|gpu:b200:4,gpu:t4:4|infinite", "ok", "32 nodes"),
        ("main*|up|32|gpu:4|infinite", "problem", "no node has the 8 GPUs that soperator-b200"),
        ("main*|up|32|(null)|infinite", "problem", "no node has the 8 GPUs"),
        ("main*|up|32|shard:gpu:8|infinite", "problem", "no node has the 8 GPUs"),
        (
            "main*|up|8|gpu:8|infinite\nmain*|up|24|gpu:4|infinite",
            "warning",
            "8 have 8 GPUs, and soperator-b200 says 32 nodes",
        ),
    ],
)
def test_the_partition_must_have_the_profile_s_gpus(
    node: Node, row: str, state: str, found: str
) -> None:
    node.answers[SLURM_PARTITIONS] = Answer(0, row + "\n")
    finding = node.findings("soperator-b200")["partition"]
    assert (finding.state, found in finding.found) == (state, True), finding
    # Which GPUs jobs ask for, only a profile says.
    assert node.findings()["partition"].state == "ok"


def test_a_slurm_profile_needs_slurm(node: Node) -> None:
    node.answers[SLURM_PING] = Answer(1, "", "could not establish a configuration source")
    assert node.findings("soperator-b200")["slurm"].state == "problem"
    node.commands.remove("sbatch")
    assert node.findings("soperator-b200")["slurm"].state == "problem"
    assert node.findings()["slurm"].state == "not here"


def test_for_a_local_profile(capfd: pytest.CaptureFixture[str]) -> None:
    # Without the training packages this Python is not ready, which is another matter.
    assert main(["--cluster", "local"]) in (0, 1)
    printed = capfd.readouterr().out
    assert "local corpus" in printed
    assert "slurm" not in printed


def test_an_unknown_profile() -> None:
    with pytest.raises(InputError, match=r"--cluster: .*did you mean 'local'"):
        main(["--cluster", "lokal"])


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ([], (None, False, None)),
        (["--local"], (None, True, None)),
        (["--cluster", "local"], ("local", True, None)),
        (["--cluster", "h200-node", "--partition", "hidden"], ("h200-node", False, "hidden")),
    ],
)
def test_words_say_what_is_looked_at(
    words: list[str],
    seen: tuple[str | None, bool, str | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = Finding("gpus", "problem", "none", "buy some")

    def diagnose(here: Surroundings) -> list[Finding]:
        name = here.cluster.name if here.cluster else None
        assert (name, here.local, here.partition) == seen
        return [problem]

    monkeypatch.setattr("cookbook.doctor.__main__.diagnose", diagnose)
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [asdict(problem)]
