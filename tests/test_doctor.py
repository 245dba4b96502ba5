"""The doctor on a stand-in for a node that is whole at first, then has one part broken."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.base.gpus import Gpu, NoGpusError
from cookbook.cli.main import main
from cookbook.config.pins import read_pins, stack_name
from cookbook.doctor.check import CHECKS, Answer, is_ready
from cookbook.doctor.machine import KERNEL_LOG
from cookbook.doctor.software import CONFIG
from tests.doctor_node import A100, B200, COMMIT, H200, LIMITS, Node, whole_node
from tests.submit import ROOT

FLASH = next(pin.value for pin in read_pins() if pin.name == "flash-attn-4")
DEEPEP = "site/deep_ep-1.2.1.dist-info"
NETWORK = "root/etc/profile.d/90-nccl-network-vars.sh"
LIBRARY = "site/deep_ep_cpp.cpython-312.so"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return whole_node(tmp_path)


def test_a_whole_node_is_ready(node: Node) -> None:
    findings = node.findings()
    not_ok = {name for name, finding in findings.items() if finding.state != "ok"}
    assert not_ok <= {"disk", "python"}
    assert findings["gpus"].found.startswith("8 x NVIDIA B200 (10.0, 179 GiB)")
    assert "MXFP8 in hardware" in findings["gpus"].found
    count = sum(not pin.extra for pin in read_pins())
    words = f"stack {stack_name()}, {count} packages as pinned (the documents' GPU figures are from"
    assert findings["pins"].found.startswith(words)
    assert node.problems(needs_ibgda=True) == {}


Break = Callable[[Node], object]


def answer(
    command: tuple[str, ...], status: int | None, output: str = "", error: str = ""
) -> Break:
    return lambda node: node.answers.update({command: Answer(status, output, error)})


def write(path: str, text: str | bytes) -> Break:
    return lambda node: node.write(path, text)


def remove(path: str) -> Break:
    def act(node: Node) -> None:
        target = node.folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return act


def gpus(*found: Any) -> Break:
    return lambda node: setattr(node, "gpus", list(found))


def no_gpus(reason: str, has_driver: bool) -> Break:
    return lambda node: setattr(node, "gpus", NoGpusError(reason, has_driver))


BROKEN: list[tuple[Break, str, str, str]] = [
    (lambda node: node.install("torchao", "0.17.0"), "pins", "problem", "torchao is 0.17.0"),
    (
        write("site/torchao/_C_mxfp8.abi3.so", b"\x7fELF libcudart.so.13 ..."),
        *("torchao kernels", "warning", "not for torch's CUDA 12.8"),
    ),
    (lambda node: node.commands.remove("gcc"), "compiler", "problem", "a C compiler missing"),
    (no_gpus("NVML: Unknown Error", True), "gpus", "problem", "NVML: Unknown Error"),
    (gpus(replace(B200, driver="560.1")), "gpus", "problem", "driver 560"),
    (gpus(H200, A100), "gpus", "warning", "1 x NVIDIA H200 (9.0, 140 GiB), 1 x NVIDIA A100"),
    (write("root/proc/driver/nvidia/params", ""), "ibgda", "warning", "stays within a node"),
    (
        write("root/proc/self/limits", LIMITS + "Max locked memory  8388608  8388608  bytes\n"),
        *("memlock", "problem", "8 MiB"),
    ),
    (remove(NETWORK), "network", "warning", "no NCCL_IB_HCA"),
    (write(NETWORK, 'NCCL_IB_HCA="mlx5_40:1"\n'), "network", "problem", "names mlx5_40"),
    (
        write("root/sys/class/infiniband/mlx5_7/ports/1/state", "1: DOWN\n"),
        *("network", "problem", "mlx5_7 is DOWN"),
    ),
    (remove(DEEPEP), "deepep", "warning", "not installed"),
    (write(f"{DEEPEP}/direct_url.json", "{"), "deepep", "problem", "pinned"),
    (write(f"{DEEPEP}/direct_url.json", "{}"), "deepep", "problem", f"pinned {COMMIT[:7]}"),
    (
        answer(CONFIG, 1, error="slurm_load_ctl_conf error: Unable to contact slurm controller"),
        *("slurm", "problem", "does not answer: slurm_load_ctl_conf error"),
    ),
    (lambda node: node.commands.remove("sbatch"), "slurm", "not here", "--cluster local"),
    (
        remove(f"site/flash_attn_4-{FLASH}.dist-info"),
        *("flash attention", "warning", "not installed: cells with"),
    ),
    (gpus(A100), "flash attention", "not here", "needs Hopper or Blackwell GPUs"),
]


@pytest.mark.parametrize(
    ("break_it", "name", "state", "found"),
    BROKEN,
    ids=[f"{name}-{found}".replace(" ", "_") for _, name, _, found in BROKEN],
)
def test_each_finding(node: Node, break_it: Break, name: str, state: str, found: str) -> None:
    break_it(node)
    finding = node.findings()[name]
    assert (finding.state, found in finding.found) == (state, True), finding
    if state in ("warning", "problem"):
        assert finding.remedy
    assert is_ready(list(node.findings().values())) == (state != "problem")


def test_nvshmem_is_the_one_that_deepep_was_linked_with(node: Node) -> None:
    """A system's library that is loaded first breaks DeepEP between nodes, in silence."""
    command = ("ldd", str(node.folder / LIBRARY))
    own = f"{node.folder}/site/nvidia/nvshmem/lib/libnvshmem_host.so.3"
    node.answers[command] = Answer(0, f"\tlibnvshmem_host.so.3 => {own} (0x7f)\n")
    assert node.findings()["deepep"].found.endswith(f"inter-node kernels, NVSHMEM in {own}")
    other = "/usr/lib/libnvshmem_host.so.3"
    node.answers[command] = Answer(0, f"\tlibnvshmem_host.so.3 => {other} (0x7f)\n")
    finding = node.findings()["deepep"]
    assert finding.state == "problem" and finding.found.endswith(f"would load {other}")
    assert finding.remedy == "take /usr/lib out of LD_LIBRARY_PATH"


def test_a_host_name_that_does_not_resolve_is_warned_of(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "renamed.invalid")
    finding = node.findings()["host name"]
    assert finding.state == "warning" and finding.found.startswith("renamed.invalid does not resol")


def test_the_disk_is_that_of_the_runs(node: Node) -> None:
    checkout = node.folder / "checkout"
    assert f"free in {checkout}," in node.findings()["disk"].found
    # Of the runs' folder, or that which it will be made in.
    node.environment["COOKBOOK_RUNS"] = "elsewhere/runs"
    assert f"free in {checkout}," in node.findings()["disk"].found
    (checkout / "elsewhere/runs").mkdir(parents=True)
    assert f"free in {checkout}/elsewhere/runs," in node.findings()["disk"].found


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


def test_a_small_dev_shm_is_no_problem_where_an_image_is_built(
    node: Node, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    assert node.findings()["scratch"].state == "problem"
    node.gpus = NoGpusError("no library", has_driver=False)
    assert node.findings()["scratch"].state == "warning"
    assert node.problems()["scratch"] == "/tmp: 0.1 GiB free"


class TestCluster:
    def test_the_ranks_software_is_that_of_their_image(self, node: Node) -> None:
        own = str(ROOT / "tests/clusters/container.yaml")
        # The ranks use the image's packages and compiler.
        shutil.rmtree(node.folder / DEEPEP)
        states = {name: finding.state for name, finding in node.findings(own).items()}
        ours = ("torchao kernels", "compiler", "deepep", "flash attention")
        assert {states[name] for name in ours} == {"not here"} and states["pins"] == "ok"

    def test_a_login_node_is_checked_for_its_cluster(self, node: Node) -> None:
        node.gpus = NoGpusError("NVML Shared Library Not Found", has_driver=False)
        for folder in ("root/sys", "root/proc/driver"):
            shutil.rmtree(node.folder / folder)
        node.write("root/proc/self/limits", LIMITS + "Max locked memory  65536  65536  bytes\n")
        findings = node.findings("soperator-b200")
        assert {findings[name].state for name in ("gpus", "ibgda", "memlock")} == {"not here"}
        assert "soperator-b200 has 8 x B200 (10.0, 178 GiB) a node" in findings["gpus"].found
        assert is_ready(list(findings.values()))
        assert node.findings("h200-node")["gpus"].found.endswith("float8; MXFP8 only emulated")
        assert "the compute nodes' GPUs count" in node.findings()["gpus"].found
        cpu_nodes = str(ROOT / "tests/clusters/cpu-nodes.yaml")
        assert node.findings(cpu_nodes)["gpus"].found.endswith("cpu-nodes trains on the CPU")
        # The cluster's GPUs count.
        assert findings["flash attention"].found == FLASH

    @pytest.mark.parametrize(
        ("found", "profile", "state"),
        [
            ([B200] * 8, "soperator-b200", "ok"),
            ([H200] * 8, "h200-node", "ok"),
            ([H200] * 8, "soperator-b200", "warning"),
            ([B200] * 4, "soperator-b200", "warning"),
            ([replace(H200, model=Gpu("NVIDIA H100", 9.0, 79.6))] * 8, "h200-node", "warning"),
        ],
    )
    def test_gpus_and_profile(self, node: Node, found: list[Any], profile: str, state: str) -> None:
        node.gpus = found
        finding = node.findings(profile)["gpus"]
        assert finding.state == state
        assert (f"; {profile} has 8 x " in finding.found) == (state == "warning")


XID_79 = "[99000.000000] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus.\n"


def gpu(number: int, **state: Any) -> Break:
    def act(node: Node) -> None:
        assert isinstance(node.gpus, list)
        node.gpus[number] = replace(node.gpus[number], **state)

    return act


class TestHealth:
    """What a job asks of its nodes."""

    @pytest.mark.parametrize(
        ("break_it", "name", "reason"),
        [
            (no_gpus("no library", False), "gpus", "none on this node (no library); soperator-b"),
            (gpu(5, memory_used_mib=90000), "idle", "GPU 5: 88 GiB in use"),
            (gpu(2, processes=("7 (python)",)), "idle", "GPU 2: process 7 (python) uses it"),
            (gpu(3, ecc_errors=3), "gpu memory", "GPU 3: 3 uncorrectable ECC error(s)"),
            (gpu(1, row_pending=True), "gpu memory", "GPU 1: a memory row waits for a reset"),
            (
                answer(KERNEL_LOG, 0, XID_79),
                *("xid", "GPU at 0000:1b:00: XID 79, fell off the bus"),
            ),
            (gpu(7, links=17), "nvlink", "GPU 7: 17 of 18 links up"),
        ],
    )
    def test_each_fault_of_a_gpu(self, node: Node, break_it: Break, name: str, reason: str) -> None:
        break_it(node)
        problems = node.problems()
        assert problems.keys() == {name} and reason in problems[name]

    @pytest.mark.parametrize(
        "break_it",
        [
            # Long ago, a program's own fault, or a log that one may not read.
            answer(KERNEL_LOG, 0, XID_79.replace("99000", "  100")),
            answer(KERNEL_LOG, 0, XID_79.replace(" 79,", " 31,")),
            answer(KERNEL_LOG, 1, "", error="dmesg: read kernel buffer failed"),
            # Cards without NVLink.
            lambda node: [gpu(number, links=0)(node) for number in range(8)],
            gpu(0, memory_used_mib=2000),
        ],
    )
    def test_what_says_nothing_of_the_node_is_no_fault(self, node: Node, break_it: Break) -> None:
        break_it(node)
        assert node.problems() == {}

    def test_only_the_gpus_of_the_job_count(self, node: Node) -> None:
        node.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(1, 8)))
        gpu(0, processes=("4711 (python)",))(node)
        # The profile's eight are not there, but the busy one is somebody else's.
        assert node.problems().keys() == {"gpus"}

    def test_a_job_asks_for_what_only_it_needs(self, node: Node) -> None:
        node.write("root/proc/driver/nvidia/params", "EnableStreamMemOPs: 0\n")
        assert node.problems() == {}
        assert "DeepEP stays within a node" in node.problems(needs_ibgda=True)["ibgda"]

    def test_a_full_memory_and_a_missing_folder(self, node: Node) -> None:
        node.write("root/proc/meminfo", "MemTotal: 1879048192 kB\nMemAvailable: 18790481 kB\n")
        shutil.rmtree(node.folder / "root/dev/shm")
        problems = node.problems()
        assert problems["memory"] == "18 of 1792 GiB free"
        assert problems["scratch"] == "/dev/shm: No such file or directory"
        gone = node.problems(job_folder=node.folder / "gone")
        assert "No such file or directory" in gone["disk"]
        assert "cannot write to " in gone["job folder"]


def test_a_local_profile_leaves_slurm_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster", "lokal"]) == 2
    assert re.search("--cluster: .*did you mean 'local'", capsys.readouterr().err)
    # Without the training packages this Python is not ready, which is another matter.
    assert main(["doctor", "--cluster", "local", "--json"]) in (0, 1)
    names = {finding["name"] for finding in json.loads(capsys.readouterr().out)}
    assert "local corpus" in names and "slurm" not in names


def test_the_guide_says_how_long_each_fault_excludes_a_node() -> None:
    guide = (ROOT / "docs/guide/long-runs.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in guide.splitlines() if line.endswith(" h |")]
    said = {name.lower(): hours for names, _, hours in rows for name in names.split(", ")}
    hours = {one.name: one.node_hours for one in CHECKS if one.node_hours is not None}
    assert {name: said[name] for name in hours} == {n: f"{h:g} h" for n, h in hours.items()}
    assert {"gpu memory", "idle"} < hours.keys()
