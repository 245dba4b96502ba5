from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cookbook.doctor.__main__ import format_findings, is_ready, main, run_checks
from cookbook.doctor.surroundings import (
    NVIDIA_SMI,
    SLURM_CONFIG,
    SLURM_HISTORY,
    SLURM_PARTITIONS,
    SLURM_PING,
    Answer,
    Finding,
    Surroundings,
)
from cookbook.stack.pins import read_pins, stack_name

REPOSITORY = Path(__file__).resolve().parent.parent
COMMIT = next(pin.value for pin in read_pins() if pin.source)
B200_ROW = "NVIDIA B200, 10.0, 183359, 570.195.03\n"

# What one node of the cluster answers.
ANSWERS = {
    NVIDIA_SMI: Answer(0, B200_ROW * 8),
    SLURM_PING: Answer(0, "Slurmctld(primary) at controller-0 is UP\n"),
    SLURM_CONFIG: Answer(
        0, "AccountingStorageType   = (null)\nSLURM_VERSION           = 25.11.2\n"
    ),
    SLURM_PARTITIONS: Answer(
        0, "main*|up|32|gpu:nvidia_b200:8|infinite\nhidden|up|32|(null)|1:00\n"
    ),
    SLURM_HISTORY: Answer(1, "", "Slurm accounting storage is disabled\n"),
}
DRIVER_OPTIONS = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n"


@dataclass
class Node:
    """A stand-in for a machine, whole at first; each test breaks one part."""

    folder: Path
    answers: dict[tuple[str, ...], Answer] = field(default_factory=lambda: dict(ANSWERS))
    commands: set[str] = field(
        default_factory=lambda: {"sbatch", "srun", "scontrol", "sinfo", "gcc", "nvidia-smi"}
    )
    environment: dict[str, str] = field(default_factory=lambda: {"WANDB_API_KEY": "never-shown"})

    def write(self, path: str, text: str | bytes = "") -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, str):
            file.write_text(text)
        else:
            file.write_bytes(text)
        return file

    def install(self, name: str, version: str, **files: str) -> None:
        about = f"site/{name.replace('-', '_')}-{version}.dist-info"
        self.write(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        for file, text in files.items():
            self.write(f"{about}/{file.replace('__', '.')}", text)

    def surroundings(self) -> Surroundings:
        return Surroundings(
            repository=self.folder / "checkout",
            root=self.folder / "root",
            site=(str(self.folder / "site"),),
            environment=self.environment,
            run=lambda command: self.answers.get(tuple(command), Answer(None)),
            which=lambda name: f"/usr/bin/{name}" if name in self.commands else None,
        )

    def findings(self, partition: str | None = None) -> Mapping[str, Finding]:
        return {finding.name: finding for finding in run_checks(self.surroundings(), partition)}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "checkout/recipes", dirs_exist_ok=True)
    node.write("checkout/requirements.txt", (REPOSITORY / "requirements.txt").read_text())
    node.write("checkout/recipes/a.yaml", 'model:\n  hf_assets_path: "assets/hf/A"\n')
    for recipe in (tmp_path / "checkout/recipes").glob("deepseek*.yaml"):
        recipe.unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        node.write(f"checkout/assets/hf/A/{name}", "{}")
    node.write("checkout/assets/local/stamp.json", '{"bytes": {}}')
    for pin in read_pins():
        if not pin.extra:
            node.install(pin.name, pin.value)
    node.write("site/torch/version.py", "cuda: Optional[str] = '12.8'\n")
    node.write("site/torchao/_C_mxfp8.abi3.so", b"\x7fELF libcudart.so.12 ...")
    node.write("site/nvidia/nvshmem/lib/libnvshmem_device.a")
    node.install("nvidia-nvshmem-cu12", "3.4.5")
    node.install(
        "deep_ep", "1.2.1", direct_url__json=json.dumps({"vcs_info": {"commit_id": COMMIT}})
    )
    node.write("site/deep_ep_cpp.cpython-312.so", b"\x7fELF libnvshmem_host.so.3 ...")
    node.write("root/proc/driver/nvidia/params", DRIVER_OPTIONS)
    node.write("root/proc/self/limits", LIMITS + "Max locked memory  unlimited  unlimited  bytes\n")
    for index in range(12):
        node.write(f"root/sys/class/infiniband/mlx5_{index}/ports/1/state", "4: ACTIVE\n")
    cards = ",".join(f"mlx5_{index}:1" for index in range(4, 12))
    node.write("root/etc/profile.d/90-nccl-network-vars.sh", f"export NCCL_IB_HCA={cards}\n")
    return node


def test_a_whole_node_is_ready(node: Node) -> None:
    findings = node.findings()
    not_ok = {name: finding for name, finding in findings.items() if finding.state != "ok"}
    assert not_ok.keys() <= {"disk", "python"}
    assert findings["gpus"].found.startswith("8 x NVIDIA B200 (10.0, 179 GiB)")
    assert "MXFP8 in hardware" in findings["gpus"].found
    assert "32 nodes, gpu:nvidia_b200:8" in findings["partition"].found
    assert findings["accounting"].found.startswith("off: ")
    assert findings["pins"].found.startswith(f"stack {stack_name()}")
    assert "never-shown" not in format_findings(list(findings.values()))


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


BROKEN: list[tuple[Break, str, str, str]] = [
    (lambda node: node.install("torchao", "0.17.0"), "pins", "problem", "torchao is 0.17.0"),
    (remove("site/submitit-1.5.4.dist-info"), "pins", "problem", "submitit is missing"),
    (
        write("site/torchao/_C_mxfp8.abi3.so", b"\x7fELF libcudart.so.13 ..."),
        "torchao kernels",
        "warning",
        "not for torch's CUDA 12.8",
    ),
    (lambda node: node.commands.remove("gcc"), "compiler", "problem", "a C compiler missing"),
    (answer(NVIDIA_SMI, 9, "No devices were found\n"), "gpus", "problem", "No devices were found"),
    (answer(NVIDIA_SMI, None, error="no answer in 5 s"), "gpus", "problem", "no answer in 5 s"),
    (answer(NVIDIA_SMI, None), "gpus", "not here", "trains on its CPU"),
    (answer(NVIDIA_SMI, 0, B200_ROW.replace("570", "560")), "gpus", "problem", "driver 560"),
    (answer(NVIDIA_SMI, 0, "NVIDIA H200, 9.0, 143771, 550.1\n"), "gpus", "ok", "only emulated"),
    (answer(NVIDIA_SMI, 0, "NVIDIA A100, 8.0, 81920, 550.1\n"), "gpus", "warning", "A100"),
    (write("root/proc/driver/nvidia/params", ""), "ibgda", "warning", "stays within a node"),
    (
        write("root/proc/self/limits", LIMITS + "Max locked memory  8388608  8388608  bytes\n"),
        "memlock",
        "problem",
        "8 MiB",
    ),
    (
        remove("root/etc/profile.d/90-nccl-network-vars.sh"),
        "network",
        "warning",
        "no NCCL_IB_HCA",
    ),
    (
        write("root/etc/profile.d/90-nccl-network-vars.sh", 'NCCL_IB_HCA="mlx5_40:1"\n'),
        "network",
        "problem",
        "names mlx5_40",
    ),
    (
        write("root/sys/class/infiniband/mlx5_7/ports/1/state", "1: DOWN\n"),
        "network",
        "problem",
        "mlx5_7 is DOWN",
    ),
    (remove("root/sys/class/infiniband"), "network", "not here", "no RDMA device"),
    (remove("site/deep_ep-1.2.1.dist-info"), "deepep", "warning", "not installed"),
    (
        lambda node: node.install("deep_ep", "1.2.1", direct_url__json="{}"),
        "deepep",
        "problem",
        f"pinned {COMMIT[:7]}",
    ),
    (
        write("site/deep_ep_cpp.cpython-312.so", b"NVSHMEM is disabled during compilation"),
        "deepep",
        "warning",
        "intra-node kernels only",
    ),
    (remove("site/deep_ep_cpp.cpython-312.so"), "deepep", "problem", "without its library"),
    (remove("checkout/assets/hf/A/tokenizer.json"), "tokenizer a", "warning", "not in assets/hf/A"),
    (remove("checkout/assets/local"), "local corpus", "warning", "not made"),
    (answer(SLURM_PING, 1, "Slurmctld(primary) at c is DOWN\n"), "slurm", "problem", "is DOWN"),
    (
        answer(SLURM_PING, 1, error="scontrol: fatal: Could not establish a configuration source"),
        "slurm",
        "warning",
        "without a configuration",
    ),
    (lambda node: node.commands.remove("srun"), "slurm", "problem", "sbatch without srun"),
    (lambda node: node.commands.remove("sbatch"), "slurm", "not here", "--cluster local"),
    (answer(SLURM_PARTITIONS, 0, "main*|down|32|(null)|1:00\n"), "partition", "problem", "not up"),
    (answer(SLURM_PARTITIONS, 0, "main|up|3|(null)|1:00\n"), "partition", "problem", "no default"),
    (
        answer(SLURM_CONFIG, 0, "AccountingStorageType = accounting_storage/slurmdbd\n"),
        "accounting",
        "warning",
        "sacct fails",
    ),
    (lambda node: node.environment.clear(), "wandb", "not here", "TensorBoard only"),
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


def test_gdrcopy_stands_in_for_driver_options(node: Node) -> None:
    node.write("root/proc/driver/nvidia/params", "EnableStreamMemOPs: 0\n")
    node.write("root/sys/module/gdrdrv/version")
    assert node.findings()["ibgda"] == Finding("ibgda", "ok", "through GDRCopy (gdrdrv is loaded)")


def test_accounting_that_works(node: Node) -> None:
    config = "AccountingStorageType = accounting_storage/slurmdbd\n"
    node.answers[SLURM_CONFIG] = Answer(0, config)
    node.answers[SLURM_HISTORY] = Answer(0)
    assert node.findings()["accounting"].found.startswith("on: ")


def test_the_profile_s_partition(node: Node) -> None:
    assert node.findings(partition="hidden")["partition"].found.startswith("hidden: 32 nodes")
    finding = node.findings(partition="gpus")["partition"]
    assert (finding.state, "there are: hidden, main" in finding.found) == ("problem", True)


def test_a_login_node_waits_for_no_gpu(node: Node) -> None:
    node.answers[NVIDIA_SMI] = Answer(None)
    node.write("root/proc/self/limits", LIMITS + "Max locked memory  65536  65536  bytes\n")
    shutil.rmtree(node.folder / "root/sys")
    shutil.rmtree(node.folder / "root/proc/driver")
    findings = node.findings()
    assert {findings[name].state for name in ("gpus", "ibgda", "memlock")} == {"not here"}
    assert is_ready(list(findings.values()))


def test_torch_from_another_index_is_the_pinned_one(node: Node) -> None:
    pin = next(pin.value for pin in read_pins() if pin.name == "torch")
    shutil.rmtree(node.folder / f"site/torch-{pin}.dist-info")
    node.install("torch", f"{pin}+cu130")
    assert node.findings()["pins"].state == "ok"


def test_nothing_installed_names_the_environment(node: Node) -> None:
    shutil.rmtree(node.folder / "site")
    assert node.findings()["pins"].remedy == "run ./setup.sh"
    node.write("checkout/.venv/bin/python")
    assert ".venv/bin/python" in node.findings()["pins"].remedy


def test_local_leaves_the_cluster_out(node: Node) -> None:
    names = {finding.name for finding in run_checks(node.surroundings(), local=True)}
    assert names == {"python", "pins", "compiler", "gpus", "local corpus", "disk"}


def test_lines_are_aligned(node: Node) -> None:
    findings = list(node.findings().values())
    findings[0] = replace(findings[0], state="problem", remedy="do this " * 30)
    lines = format_findings(findings).splitlines()
    assert max(map(len, lines[:5])) <= 100
    assert {line.index(line[24:].split()[0]) for line in lines[:1]}
    assert lines[-1].startswith("not ready: ")
    assert "\033[31mproblem" in format_findings(findings, colour=True)


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [("local", 0, "local corpus"), ("lokal", 2, "did you mean 'local'")],
)
def test_for_a_profile(
    capfd: pytest.CaptureFixture[str], name: str, status: int, said: str
) -> None:
    # Without the pins this Python is not ready, which is another matter.
    assert main(["--cluster", name]) in {status, min(status + 1, 2)}
    captured = capfd.readouterr()
    assert said in captured.out + captured.err
    assert "slurm" not in captured.out


def test_as_a_command_without_any_package() -> None:
    """-I -S: no site-packages, as on a machine where nothing is installed yet."""
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); " + (
        "from cookbook.doctor.__main__ import main; status = main(['--json']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    took = time.monotonic() - began
    assert result.returncode == 1, result.stderr
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["pins"]["state"] == "problem"
    assert set(findings["pins"]) == {"name", "state", "found", "remedy"}
    assert took < 5, f"{took:.1f} s"
