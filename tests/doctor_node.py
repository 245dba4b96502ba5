"""A stand-in for a node of the cluster, for the doctor's tests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cookbook.base.gpus import Gpu, InstalledGpu, NoGpusError
from cookbook.config.cluster import load_cluster
from cookbook.config.pins import read_pins
from cookbook.doctor.check import Answer, CheckResult, Surroundings, diagnose, node_faults
from cookbook.doctor.machine import KERNEL_LOG
from cookbook.doctor.software import CONFIG
from tests.submit import ROOT

COMMIT = next(pin.value for pin in read_pins() if pin.source)
B200 = InstalledGpu(Gpu("NVIDIA B200", 10.0, 179.1), "570.195.03", "GPU-0", 4, links=18)
H200 = InstalledGpu(Gpu("NVIDIA H200", 9.0, 140.4), "570.195.03", "GPU-0", 4, links=18)
A100 = InstalledGpu(Gpu("NVIDIA A100", 8.0, 80.0), "570.195.03", "GPU-0", 4, links=18)
ANSWERS = {
    KERNEL_LOG: Answer(0, "[    1.000000] Linux version 6.8\n"),
    CONFIG: Answer(0, "AccountingStorageType   = (null)\nSLURM_VERSION           = 25.11.2\n"),
}
DRIVER_OPTIONS = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n"


@dataclass
class Node:
    """A stand-in for a machine, whole at first; each test breaks one part."""

    folder: Path
    answers: dict[tuple[str, ...], Answer] = field(default_factory=lambda: dict(ANSWERS))
    # GPUs of one kind that are told apart.
    gpus: list[InstalledGpu] | NoGpusError = field(
        default_factory=lambda: [replace(B200, uuid=f"GPU-{number}") for number in range(8)]
    )
    commands: set[str] = field(default_factory=lambda: {"sbatch", "srun", "gcc"})
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, path: str, text: str | bytes = "") -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file

    def install(self, name: str, version: str) -> None:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.write(f"site/{name.replace('-', '_')}-{version}.dist-info/METADATA", text)

    def _read_gpus(self) -> tuple[InstalledGpu, ...]:
        if isinstance(self.gpus, NoGpusError):
            raise self.gpus
        return tuple(self.gpus)

    def surroundings(self, profile: str = "", **options: Any) -> Surroundings:
        return Surroundings(
            cluster=load_cluster(profile) if profile else None,
            repository=self.folder / "checkout",
            root=self.folder / "root",
            site=(str(self.folder / "site"),),
            environment=self.environment,
            read_gpus=self._read_gpus,
            run=lambda command: self.answers.get(tuple(command), Answer(None)),
            which=lambda name: f"/usr/bin/{name}" if name in self.commands else None,
            **options,
        )

    def findings(self, profile: str = "", **options: Any) -> Mapping[str, CheckResult]:
        found = diagnose(self.surroundings(profile, **options))
        assert len({finding.name for finding in found}) == len(found)
        return {finding.name: finding for finding in found}

    def problems(self, **options: Any) -> dict[str, str]:
        """Why a job of the cluster cannot train here."""
        here = self.surroundings("soperator-b200", **{"job_folder": self.folder} | options)
        return {fault.check: fault.reason for fault in node_faults(here)}


def whole_node(tmp_path: Path) -> Node:
    """A node on which nothing is missing."""
    node = Node(tmp_path)
    node.write("checkout/requirements.txt", (ROOT / "requirements.txt").read_text())
    node.write("checkout/assets/local/stamp.json", '{"bytes": {}}')
    for pin in read_pins():
        if pin.extra != "deepep":
            node.install(pin.name, pin.value)
    node.write("site/torch/version.py", "cuda: Optional[str] = '12.8'\n")
    node.write("site/torchao/_C_mxfp8.abi3.so", b"\x7fELF libcudart.so.12 ...")
    node.write("site/nvidia/nvshmem/lib/libnvshmem_device.a")
    node.install("nvidia-nvshmem-cu12", "3.4.5")
    source = json.dumps({"vcs_info": {"commit_id": COMMIT}})
    node.install("deep_ep", "1.2.1")
    node.write("site/deep_ep-1.2.1.dist-info/direct_url.json", source)
    node.write("site/deep_ep_cpp.cpython-312.so", b"\x7fELF libnvshmem_host.so.3 ...")
    node.write("site/flash_attn/cute/__init__.py")
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
