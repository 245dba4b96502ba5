"""A stand-in for a node of the cluster, for the doctor's tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path

from cookbook.base.gpus import GPU_LINKS, GPU_PROCESSES, GPU_ROWS, GPU_STATES, NVIDIA_SMI
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.stack import read_pins
from cookbook.doctor.check import Finding
from cookbook.doctor.checks import diagnose
from cookbook.doctor.surroundings import (
    KERNEL_LOG,
    SLURM_CONFIG,
    SLURM_HISTORY,
    SLURM_PARTITIONS,
    SLURM_PING,
    Answer,
    Surroundings,
)
from tests.submit import ROOT

COMMIT = next(pin.value for pin in read_pins() if pin.source)
B200_ROW = "NVIDIA B200, 10.0, 183359, 570.195.03, GPU-a\n"
H200_ROW = "NVIDIA H200, 9.0, 143771, 570.195.03, GPU-b\n"

# What one node of the cluster answers.
ANSWERS = {
    NVIDIA_SMI: Answer(0, "".join(B200_ROW.replace("GPU-a", f"GPU-{n}") for n in range(8))),
    GPU_STATES: Answer(0, "".join(f"GPU-{n}, {n}, 1, 0\n" for n in range(8))),
    GPU_ROWS: Answer(0, "".join(f"GPU-{n}, No, No\n" for n in range(8))),
    GPU_PROCESSES: Answer(0),
    GPU_LINKS: Answer(
        0,
        "".join(
            f"GPU {n}: NVIDIA B200 (UUID: GPU-{n})\n"
            + "".join(f"\t Link {link}: 50 GB/s\n" for link in range(18))
            for n in range(8)
        ),
    ),
    KERNEL_LOG: Answer(0, "[    1.000000] Linux version 6.8\n"),
    SLURM_PING: Answer(0, "Slurmctld(primary) at controller-0 is UP\n"),
    SLURM_CONFIG: Answer(
        0, "AccountingStorageType   = (null)\nSLURM_VERSION           = 25.11.2\n"
    ),
    SLURM_PARTITIONS: Answer(
        0, "main*|up|32|gpu:nvidia_b200:8|infinite\nhidden|up|32|(null)|1:00\n"
    ),
    SLURM_HISTORY: Answer(1, "", "Slurm accounting storage is disabled\n"),
}
# Where FlashAttention-4's compiler is, once for each CUDA major version.
COMPILER = "site/nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs"
COMPILER_FILE = COMPILER + "/_cutlass_ir.cu{}.cpython-312-x86_64-linux-gnu.so"
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

    def surroundings(
        self,
        cluster: Cluster | None = None,
        local: bool = False,
        partition: str | None = None,
        job_folder: Path | None = None,
        deepep_between_nodes: bool = False,
    ) -> Surroundings:
        return Surroundings(
            cluster=cluster,
            local=local,
            partition=partition,
            repository=self.folder / "checkout",
            root=self.folder / "root",
            site=(str(self.folder / "site"),),
            environment=self.environment,
            run=lambda command: self.answers.get(tuple(command), Answer(None)),
            which=lambda name: f"/usr/bin/{name}" if name in self.commands else None,
            job_folder=job_folder,
            deepep_between_nodes=deepep_between_nodes,
        )

    def findings(
        self, profile: str = "", local: bool = False, partition: str | None = None
    ) -> Mapping[str, Finding]:
        cluster = load_cluster(profile) if profile else None
        found = diagnose(self.surroundings(cluster, local, partition))
        assert len({finding.name for finding in found}) == len(found)
        return {finding.name: finding for finding in found}

    def become_login_node(self) -> None:
        self.answers[NVIDIA_SMI] = Answer(None)
        for folder in ("root/sys", "root/proc/driver"):
            shutil.rmtree(self.folder / folder)


def whole_node(tmp_path: Path) -> Node:
    """A node on which nothing is missing."""
    node = Node(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "checkout/recipes", dirs_exist_ok=True)
    node.write("checkout/requirements.txt", (ROOT / "requirements.txt").read_text())
    node.write("checkout/recipes/a.yaml", 'model:\n  hf_assets_path: "assets/hf/A"\n')
    for recipe in (tmp_path / "checkout/recipes").glob("deepseek*.yaml"):
        recipe.unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        node.write(f"checkout/assets/hf/A/{name}", "{}")
    node.write("checkout/assets/local/stamp.json", '{"bytes": {}}')
    for pin in read_pins():
        if pin.extra != "deepep":
            node.install(pin.name, pin.value)
    node.write("site/torch/version.py", "cuda: Optional[str] = '12.8'\n")
    node.write(cache_from_source("site/torch/__init__.py"))
    node.write("site/torchao/_C_mxfp8.abi3.so", b"\x7fELF libcudart.so.12 ...")
    node.write("site/nvidia/nvshmem/lib/libnvshmem_device.a")
    node.install("nvidia-nvshmem-cu12", "3.4.5")
    node.install(
        "deep_ep", "1.2.1", direct_url__json=json.dumps({"vcs_info": {"commit_id": COMMIT}})
    )
    node.write("site/deep_ep_cpp.cpython-312.so", b"\x7fELF libnvshmem_host.so.3 ...")
    node.write("site/flash_attn/cute/__init__.py")
    for major in (12, 13):
        node.write(COMPILER_FILE.format(major))
    node.write("root/proc/driver/nvidia/params", DRIVER_OPTIONS)
    for folder in ("tmp", "dev/shm"):
        (tmp_path / "root" / folder).mkdir(parents=True, exist_ok=True)
    node.write("root/proc/uptime", "100000.00 1.0\n")
    node.write("root/proc/meminfo", "MemTotal: 1879048192 kB\nMemAvailable: 1800000000 kB\n")
    node.write("root/proc/self/limits", LIMITS + "Max locked memory  unlimited  unlimited  bytes\n")
    for index in range(12):
        node.write(f"root/sys/class/infiniband/mlx5_{index}/ports/1/state", "4: ACTIVE\n")
    cards = ",".join(f"mlx5_{index}:1" for index in range(4, 12))
    node.write("root/etc/profile.d/90-nccl-network-vars.sh", f"export NCCL_IB_HCA={cards}\n")
    return node
