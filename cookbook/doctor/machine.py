"""The doctor's checks of the machine: GPUs, driver options, limits, network and disk."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence

from cookbook.base.gpus import NVIDIA_SMI, Gpu
from cookbook.doctor.check import Finding, check
from cookbook.doctor.surroundings import Surroundings
from cookbook.install.deepep import torch_cuda

GIB = 1024**3
NETWORK_FILE = "/etc/profile.d/90-nccl-network-vars.sh"
# The oldest driver branch of each CUDA major version, and Blackwell's first one.
OLDEST_DRIVER = {"12": 525, "13": 580}
OLDEST_BLACKWELL_DRIVER = 570


@check(local=True, node_hours=24)
def gpus(here: Surroundings) -> Finding:
    if not here.installed_gpus:
        return _without_gpus(here)
    if not here.gpus:
        chosen = here.environment["CUDA_VISIBLE_DEVICES"]
        hidden = f"CUDA_VISIBLE_DEVICES={chosen!r} hides all {len(here.installed_gpus)}"
        remedy = "unset it, or name GPUs that nvidia-smi -L lists"
        return Finding("gpus", "warning", f"{hidden}: runs on this machine use the CPU", remedy)
    models = [gpu.model for gpu in here.gpus]
    kinds = Counter(models)
    found = ", ".join(f"{count} x {_described(model)}" for model, count in kinds.items())
    if len(here.gpus) < len(here.installed_gpus):
        found += f", of {len(here.installed_gpus)}: the others are not in CUDA_VISIBLE_DEVICES"
    driver = here.gpus[0].driver
    found += f", driver {driver}"
    least = min(model.compute_capability for model in models)
    oldest = OLDEST_DRIVER.get(torch_cuda(here.site).split(".")[0], 0)
    if least >= 10:
        oldest = max(oldest, OLDEST_BLACKWELL_DRIVER)
    branch = re.match("[0-9]+", driver)
    if branch and int(branch[0]) < oldest:
        return Finding("gpus", "problem", found, f"this stack needs driver {oldest} or later")
    if here.sends_jobs and not _fits_profile(here, models):
        assert here.cluster is not None
        return Finding(
            "gpus",
            "problem" if here.is_in_job else "warning",
            f"{found}; {_promised(here)}",
            f"run this on a node of {here.cluster.name}, or correct its `gpu` and `gpus_per_node`",
        )
    if len(kinds) > 1:
        return Finding("gpus", "warning", found, "ranks on unlike GPUs wait for the slowest")
    if least < 9:
        return Finding("gpus", "warning", found, "DeepEP and float8 need Hopper or later")
    return Finding("gpus", "ok", f"{found}: {_ability(models[0])}")


def _without_gpus(here: Surroundings) -> Finding:
    answer = here.answer(NVIDIA_SMI)
    if here.is_login_node:
        counts = _promised(here) or "the compute nodes' GPUs count"
        return Finding("gpus", "not here", f"none on this node, as on a login node; {counts}")
    if here.cluster and here.cluster.gpu:
        words = (answer.error or answer.output).strip().splitlines()
        said = f"none on this node{f' ({words[0]})' if words else ''}; {_promised(here)}"
    elif answer.status is None and not answer.error:
        return Finding("gpus", "not here", "no nvidia-smi: this machine trains on its CPU")
    else:
        lines = (answer.error or answer.output).strip().splitlines()
        said = f"nvidia-smi shows none: {lines[0] if lines else 'no row'}"
    remedy = "check the driver, or CUDA's devices in this container"
    return Finding("gpus", "problem", said, remedy)


def _promised(here: Surroundings) -> str:
    """What the cluster profile says of its nodes' GPUs; empty without a profile."""
    cluster = here.cluster
    if cluster is None:
        return ""
    if cluster.gpu is None:
        return f"{cluster.name} trains on the CPU"
    if here.is_in_job:
        return f"{cluster.name} has {cluster.ranks_per_node} x {cluster.gpu.name}"
    gpus = f"{cluster.ranks_per_node} x {_described(cluster.gpu)}"
    return f"{cluster.name} has {gpus} a node: {_ability(cluster.gpu)}"


def _fits_profile(here: Surroundings, models: Sequence[Gpu]) -> bool:
    cluster = here.cluster
    if cluster is None or cluster.gpu is None:
        return True
    wanted = cluster.gpu
    # Names differ in their spelling, and profiles give the memory that a job can use.
    return len(models) == cluster.ranks_per_node and all(
        model.compute_capability == wanted.compute_capability
        and (
            not model.memory_gib
            or abs(model.memory_gib - wanted.memory_gib) < 0.1 * wanted.memory_gib
        )
        for model in models
    )


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.compute_capability}, {gpu.memory_gib:.0f} GiB)"


def _ability(gpu: Gpu) -> str:
    if gpu.compute_capability >= 10:
        return "MXFP8 in hardware"
    return "float8; MXFP8 only emulated"


@check(local=False, node_hours=24)
def ibgda(here: Surroundings) -> Finding:
    """DeepEP between nodes: the GPU rings the network card's doorbell itself."""
    if not here.installed_gpus:
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
        "problem" if here.deepep_between_nodes else "warning",
        "neither the driver's options nor GDRCopy: DeepEP stays within a node",
        f"set in /etc/modprobe.d and reload the driver: options nvidia {' '.join(missing)}; "
        "or load gdrdrv",
    )


@check(local=False, node_hours=24)
def memlock(here: Surroundings) -> Finding:
    match = re.search(r"^Max locked memory\s+(\S+)", here.text("/proc/self/limits") or "", re.M)
    if match is None:
        return Finding("memlock", "not here", "this system does not say")
    if match[1] == "unlimited":
        return Finding("memlock", "ok", "unlimited")
    mib = int(match[1]) / 1024**2
    if not here.installed_gpus:
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


@check(local=False, node_hours=24)
def network(here: Surroundings) -> Finding:
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


@check(local=True, node_hours=1)
def disk(here: Surroundings) -> Finding:
    folder = here.job_folder or here.repository
    try:
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Finding("disk", "problem", f"{folder}: {error.strerror}", "mount it on this node")
    found = f"{free:.0f} GiB free where runs/ and checkpoints go"
    if free < 2:
        return Finding("disk", "problem", found, "free some: logs alone may fill it")
    if free < 50 and here.trains_for_real:
        return Finding(
            "disk",
            "warning",
            found,
            "a checkpoint of the 16B takes about 175 GiB, of the 671B 9.5 TiB",
        )
    return Finding("disk", "ok", found)


@check(local=True, node_hours=1)
def scratch(here: Surroundings) -> Finding:
    """Where compilers and worker processes put small files, each in this node's own memory or disk.

    NCCL takes a segment of /dev/shm for each pair of ranks; containers often have 64 MiB of it.
    """
    found = []
    for folder in (here.environment.get("TMPDIR") or "/tmp", "/dev/shm"):
        try:
            free = shutil.disk_usage(here.path(folder)).free / GIB
        except OSError as error:
            return Finding("scratch", "problem", f"{folder}: {error.strerror}", "create it")
        if free < 1:
            said = f"{folder}: {free:.1f} GiB free"
            return Finding("scratch", "problem", said, "free some, or give the container more")
        found.append(f"{free:.0f} GiB in {folder}")
    return Finding("scratch", "ok", f"{' and '.join(found)}")


@check(local=False, node_hours=1)
def memory(here: Surroundings) -> Finding:
    text = here.text("/proc/meminfo") or ""
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
    if len(sizes) < 2:
        return Finding("memory", "not here", "this system does not say")
    total, free = (int(sizes[name]) / 1024**2 for name in ("MemTotal", "MemAvailable"))
    found = f"{free:.0f} of {total:.0f} GiB free"
    if free < 0.05 * total:
        remedy = "end what is left over there, or delete its files in /dev/shm and /tmp"
        return Finding("memory", "problem", found, remedy)
    return Finding("memory", "ok", found)


@check(local=False, node_hours=1)
def job_folder(here: Surroundings) -> list[Finding]:
    """Whether the run's folder is there on this node and can be written."""
    if here.job_folder is None:
        return []
    try:
        with tempfile.TemporaryFile(dir=here.job_folder) as file:
            file.write(b"1")
    except OSError as error:
        said = f"cannot write to {here.job_folder}: {error.strerror}"
        return [Finding("job folder", "problem", said, "mount the shared file system there")]
    return [Finding("job folder", "ok", str(here.job_folder))]
