"""In: a machine. Out: findings on its GPUs, driver options, limits, network, disk and Slurm."""

from __future__ import annotations

import re
import shutil
from collections import Counter

from cookbook.doctor.surroundings import (
    NVIDIA_SMI,
    SLURM_CONFIG,
    SLURM_HISTORY,
    SLURM_PARTITIONS,
    SLURM_PING,
    Finding,
    Surroundings,
)
from cookbook.install.deepep import torch_cuda

GIB = 1024**3
NETWORK_FILE = "/etc/profile.d/90-nccl-network-vars.sh"
# The oldest driver branch of each CUDA major version, and Blackwell's first one.
OLDEST_DRIVER = {"12": 525, "13": 580}
OLDEST_BLACKWELL_DRIVER = 570


def check_gpus(here: Surroundings) -> Finding:
    if not here.gpus:
        answer = here.answer(NVIDIA_SMI)
        if answer.status is None and not answer.error:
            return Finding("gpus", "not here", "no nvidia-smi: this machine trains on its CPU")
        said = (answer.error or answer.output).strip().splitlines()
        return Finding(
            "gpus",
            "problem",
            f"nvidia-smi shows none: {said[0] if said else 'no row'}",
            "check the driver, or CUDA's devices in this container",
        )
    kinds = Counter((gpu.name, gpu.capability, round(gpu.memory_mib / 1024)) for gpu in here.gpus)
    found = ", ".join(
        f"{count} x {name} ({capability}, {gib} GiB)"
        for (name, capability, gib), count in kinds.items()
    )
    driver = here.gpus[0].driver
    found += f", driver {driver}"
    least = min(gpu.capability for gpu in here.gpus)
    oldest = OLDEST_DRIVER.get(torch_cuda(here.site).split(".")[0], 0)
    if least >= 10:
        oldest = max(oldest, OLDEST_BLACKWELL_DRIVER)
    if int(re.match(r"\d*", driver)[0] or 0) < oldest:  # type: ignore[index]
        return Finding("gpus", "problem", found, f"this stack needs driver {oldest} or later")
    if len(kinds) > 1:
        return Finding("gpus", "warning", found, "ranks on unlike GPUs wait for the slowest")
    if least < 9:
        return Finding("gpus", "warning", found, "DeepEP and float8 need Hopper or later")
    ability = "MXFP8 in hardware" if least >= 10 else "float8; MXFP8 only emulated"
    return Finding("gpus", "ok", f"{found}: {ability}")


def check_ibgda(here: Surroundings) -> Finding:
    """DeepEP between nodes: the GPU rings the network card's doorbell itself."""
    if not here.gpus:
        found = "no GPU driver here; the compute nodes' options count"
        return Finding("ibgda", "not here", found)
    parameters = here.text("/proc/driver/nvidia/params") or ""
    missing = []
    if not re.search(r"^EnableStreamMemOPs:\s*1\b", parameters, re.MULTILINE):
        missing.append("NVreg_EnableStreamMemOPs=1")
    if not re.search(r"\bPeerMappingOverride=1\b", parameters):
        missing.append('NVreg_RegistryDwords="PeerMappingOverride=1;"')
    if not missing:
        return Finding("ibgda", "ok", "driver options EnableStreamMemOPs and PeerMappingOverride")
    if here.path("/dev/gdrdrv").exists() or here.path("/sys/module/gdrdrv").exists():
        return Finding("ibgda", "ok", "through GDRCopy (gdrdrv is loaded)")
    return Finding(
        "ibgda",
        "warning",
        "neither the driver's options nor GDRCopy: DeepEP stays within a node",
        f"set in /etc/modprobe.d and reload the driver: options nvidia {' '.join(missing)}; "
        "or load gdrdrv",
    )


def check_memlock(here: Surroundings) -> Finding:
    match = re.search(r"^Max locked memory\s+(\S+)", here.text("/proc/self/limits") or "", re.M)
    if match is None:
        return Finding("memlock", "not here", "this system does not say")
    if match[1] == "unlimited":
        return Finding("memlock", "ok", "unlimited")
    mib = int(match[1]) / 1024**2
    if not here.gpus:
        found = f"{mib:.0f} MiB here; the compute nodes' limit counts"
        return Finding("memlock", "not here", found)
    return Finding(
        "memlock",
        "warning" if not _devices(here) else "problem",
        f"{mib:.0f} MiB: too little to register GPU buffers with the network",
        "ulimit -l unlimited, in slurmd's unit or /etc/security/limits.conf",
    )


def _devices(here: Surroundings) -> dict[str, str]:
    """InfiniBand or RoCE devices and the state of their first port, e.g. mlx5_4: ACTIVE."""
    devices = {}
    folder = here.path("/sys/class/infiniband")
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        state = here.text(f"/sys/class/infiniband/{device.name}/ports/1/state") or "?"
        devices[device.name] = state.rpartition(":")[2].strip()
    return devices


def check_network(here: Surroundings) -> Finding:
    devices = _devices(here)
    chosen = here.environment.get("NCCL_IB_HCA", "")
    place = "NCCL_IB_HCA"
    if not chosen and (text := here.text(NETWORK_FILE)):
        match = re.search(r"^\s*(?:export\s+)?NCCL_IB_HCA=[\"']?([^\"'\s]*)", text, re.MULTILINE)
        chosen, place = (match[1] if match else ""), NETWORK_FILE
    if not devices:
        found = f"no RDMA device here; {place} names {chosen}" if chosen else "no RDMA device here"
        return Finding("network", "not here", f"{found}; one node, or TCP between nodes")
    if not chosen:
        return Finding(
            "network",
            "warning",
            f"{len(devices)} devices and no NCCL_IB_HCA: NCCL may take a virtual one",
            "name the devices that belong to the GPUs, e.g. NCCL_IB_HCA=mlx5_4:1,mlx5_5:1",
        )
    named = [name.split(":")[0] for name in chosen.lstrip("=").split(",") if name]
    if chosen.startswith("^"):
        return Finding("network", "ok", f"{place}: all but {chosen[1:]}")
    # NCCL takes a name as a prefix unless the list begins with "=".
    unknown = [name for name in named if not any(device.startswith(name) for device in devices)]
    if unknown:
        return Finding(
            "network",
            "problem",
            f"{place} names {', '.join(unknown)}; here are {', '.join(devices)}",
            "name devices of this node",
        )
    down = [name for name in named if devices.get(name, "ACTIVE") != "ACTIVE"]
    if down:
        return Finding(
            "network",
            "problem",
            f"{', '.join(f'{name} is {devices[name]}' for name in down)}",
            "have the link repaired, or leave this node out with the profile's `exclude`",
        )
    return Finding("network", "ok", f"{len(named)} devices, active ({place}={chosen})")


def check_disk(here: Surroundings, local: bool = False) -> Finding:
    free = shutil.disk_usage(here.repository).free / GIB
    found = f"{free:.0f} GiB free where runs/ and checkpoints go"
    if free < 2:
        return Finding("disk", "problem", found, "free some: logs alone may fill it")
    if free < 50 and here.trains_for_real and not local:
        return Finding(
            "disk",
            "warning",
            found,
            "a checkpoint of the 16B takes about 175 GiB, of the 671B 9.5 TiB",
        )
    return Finding("disk", "ok", found)


def check_slurm(here: Surroundings, partition: str | None) -> list[Finding]:
    if not here.has_slurm:
        return [Finding("slurm", "not here", "no sbatch: runs use this machine (--cluster local)")]
    if here.which("srun") is None:
        return [Finding("slurm", "problem", "sbatch without srun", "install Slurm's client whole")]
    ping = here.answer(SLURM_PING)
    if "dns_srv" in ping.error or "configuration source" in ping.error:
        found = "Slurm's commands are here without a configuration (slurm.conf)"
        return [Finding("slurm", "warning", found, "use --cluster local, or set SLURM_CONF")]
    if not ping.works or " UP" not in ping.output:
        said = (ping.output or ping.error).strip().splitlines()
        return [
            Finding(
                "slurm",
                "problem",
                f"the controller does not answer{': ' + said[0] if said else ''}",
                "ask who runs the cluster; --cluster local works without Slurm",
            )
        ]
    config = here.answer(SLURM_CONFIG).output
    version = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", config, re.MULTILINE)
    return [
        Finding("slurm", "ok", f"{version[1] if version else ''} controller answers".strip()),
        _check_partition(here, partition),
        _check_accounting(here, config),
    ]


def _check_partition(here: Surroundings, wanted: str | None) -> Finding:
    rows = [line.split("|") for line in here.answer(SLURM_PARTITIONS).output.splitlines()]
    partitions: dict[str, list[list[str]]] = {}
    for row in rows:
        if len(row) == 5:
            partitions.setdefault(row[0].rstrip("*"), []).append(row)
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), None)
    name = wanted or default
    if name is None or name not in partitions:
        found = f"no partition {name!r}" if name else "no default partition"
        known = ", ".join(sorted(partitions)) or "none"
        return Finding(
            "partition",
            "problem",
            f"{found}; there are: {known}",
            "name one in the cluster profile",
        )
    nodes = sum(int(row[2]) for row in partitions[name] if row[2].isdigit())
    resources = sorted({row[3] for row in partitions[name]} - {"(null)"})
    found = f"{name}: {nodes} nodes, {' '.join(resources) or 'no GPUs declared'}"
    if any(row[1] != "up" for row in partitions[name]):
        return Finding("partition", "problem", f"{found}, not up", "ask who runs the cluster")
    return Finding("partition", "ok", f"{found}, time limit {partitions[name][0][4]}")


def _check_accounting(here: Surroundings, config: str) -> Finding:
    match = re.search(r"^AccountingStorageType\s*=\s*(\S+)", config, re.MULTILINE)
    kind = match[1] if match else "unknown"
    if "slurmdbd" not in kind:
        return Finding(
            "accounting", "ok", "off: states come from squeue and each run's status file"
        )
    if not here.answer(SLURM_HISTORY).works:
        return Finding(
            "accounting",
            "warning",
            "on, but sacct fails: finished jobs are known from their status file only",
            "ask who runs the cluster; nothing here depends on it",
        )
    return Finding("accounting", "ok", "on: sacct knows finished jobs")
