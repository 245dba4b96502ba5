"""The doctor's checks of the GPUs' health, and what a job asks of its nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cookbook.base.gpus import GPU_LINKS, GPU_PROCESSES, GPU_ROWS, GPU_STATES, NVIDIA_SMI
from cookbook.config.cluster import load_cluster
from cookbook.doctor.checks import node_problems
from cookbook.doctor.surroundings import DCGM_HEALTH, KERNEL_LOG, Answer
from tests.doctor_node import ANSWERS, Node, whole_node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return whole_node(tmp_path)


def _problems(node: Node, deepep: bool = False) -> dict[str, str]:
    here = node.surroundings(
        load_cluster("soperator-b200"),
        job_folder=node.folder,
        deepep_between_nodes=deepep,
    )
    return {name: said for name, (said, _) in node_problems(here).items()}


def _changed(command: tuple[str, ...], old: str, new: str) -> Answer:
    output = ANSWERS[command].output
    assert old in output
    return Answer(0, output.replace(old, new))


def test_a_node_that_is_well_has_no_problem(node: Node) -> None:
    assert _problems(node, deepep=True) == {}


XID_79 = "[99000.000000] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(
    ("command", "answer", "check", "said"),
    [
        (NVIDIA_SMI, Answer(9, "Unable to determine the device handle"), "gpus", "device handle"),
        (NVIDIA_SMI, Answer(None, error="nvidia-smi: no answer"), "gpus", "none on this node"),
        (
            GPU_STATES,
            _changed(GPU_STATES, "GPU-5, 5, 1, 0", "GPU-5, 5, 90000, 0"),
            "idle",
            "88 GiB",
        ),
        (
            GPU_STATES,
            _changed(GPU_STATES, "GPU-5, 5, 1, 0", "GPU-5, 5, 1, 3"),
            "gpu memory",
            "3 un",
        ),
        (GPU_PROCESSES, Answer(0, "GPU-2, 4711, python\n"), "idle", "GPU 2: process 4711 (python)"),
        (
            GPU_ROWS,
            _changed(GPU_ROWS, "GPU-1, No", "GPU-1, Yes"),
            "gpu memory",
            "waits for a reset",
        ),
        (GPU_ROWS, Answer(0, "GPU-1, 0, 1\n"), "gpu memory", "GPU 1: no spare memory row"),
        (KERNEL_LOG, Answer(0, XID_79), "xid", "GPU at 0000:1b:00: XID 79, fell off the bus"),
        (
            GPU_LINKS,
            _changed(GPU_LINKS, "GPU-7)\n\t Link 0: 50 GB/s", "GPU-7)\n\t Link 0: <inactive>"),
            "nvlink",
            "GPU 7: 17 of 18 links up",
        ),
        (
            DCGM_HEALTH,
            Answer(0, "| Overall Health | Failure |\n+---+\n| GPU | 3 |\n| | PCIe replays |\n"),
            "dcgm",
            "Failure: GPU 3 PCIe replays",
        ),
    ],
)
def test_a_fault_of_a_gpu_is_named(
    node: Node, command: tuple[str, ...], answer: Answer, check: str, said: str
) -> None:
    node.answers[command] = answer
    problems = _problems(node)
    assert problems.keys() == {check}
    assert said in problems[check]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        # Long ago, a program's own fault, or a log that one may not read.
        (KERNEL_LOG, Answer(0, XID_79.replace("99000", "  100"))),
        (KERNEL_LOG, Answer(0, XID_79.replace(" 79,", " 31,"))),
        (KERNEL_LOG, Answer(1, "", "dmesg: read kernel buffer failed")),
        # A watch that was never told to watch, and one that is content or only warns.
        (DCGM_HEALTH, Answer(1, "", "Error: Health watches not enabled.")),
        (DCGM_HEALTH, Answer(0, "| Overall Health | Healthy |\n")),
        (DCGM_HEALTH, Answer(0, "| Overall Health: Warning |\n")),
        # Cards without NVLink, and a driver that does not count errors.
        (GPU_LINKS, Answer(0, "GPU 0: NVIDIA B200 (UUID: GPU-0)\n")),
        (GPU_STATES, Answer(0, "GPU-0, 0, 1, [N/A]\n")),
        (GPU_ROWS, Answer(6, "Option is not recognized")),
        # Another job's process on a GPU that is not this one's.
        (GPU_PROCESSES, Answer(0, "GPU-of-another-job, 4711, python\n")),
    ],
)
def test_what_says_nothing_of_the_node_is_no_fault(
    node: Node, command: tuple[str, ...], answer: Answer
) -> None:
    node.answers[command] = answer
    assert _problems(node) == {}


def test_only_the_gpus_of_the_job_count(node: Node) -> None:
    node.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(1, 8)))
    node.answers[GPU_PROCESSES] = Answer(0, "GPU-0, 4711, python\n")
    # The profile's eight are not there, but the busy one is somebody else's.
    assert _problems(node).keys() == {"gpus"}


def test_a_job_asks_for_what_only_it_needs(node: Node) -> None:
    node.write("root/proc/driver/nvidia/params", "EnableStreamMemOPs: 0\n")
    assert _problems(node) == {}
    assert "PeerMappingOverride" not in str(_problems(node))
    assert "DeepEP stays within a node" in _problems(node, deepep=True)["ibgda"]
    node.write("root/sys/class/infiniband/mlx5_7/ports/1/state", "1: DOWN\n")
    assert _problems(node)["network"] == "mlx5_7 is DOWN"


def test_a_full_memory_and_a_missing_folder(node: Node) -> None:
    node.write("root/proc/meminfo", "MemTotal: 1879048192 kB\nMemAvailable: 18790481 kB\n")
    shutil.rmtree(node.folder / "root/dev/shm")
    problems = _problems(node)
    assert problems["memory"] == "18 of 1792 GiB free"
    assert problems["scratch"] == "/dev/shm: No such file or directory"
    gone = node_problems(node.surroundings(job_folder=node.folder / "gone"))
    assert "No such file or directory" in gone["disk"][0]
    assert "cannot write to " in gone["job folder"][0]


def test_outside_a_job_a_busy_gpu_is_a_warning(node: Node) -> None:
    node.answers[GPU_PROCESSES] = Answer(0, "GPU-2, 4711, python\n")
    assert node.findings()["idle"].state == "warning"
    assert node.findings(local=True).get("idle") is None
