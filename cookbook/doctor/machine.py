"""The doctor's checks of the machine: its GPUs and their health, driver options, network, disk.

Nearly all of them also run on a job's nodes before each attempt.
"""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable

from cookbook.base.gpus import Gpu, InstalledGpu
from cookbook.doctor.check import HARDWARE_H, PASSING_H, Outcome, State, Surroundings, check
from cookbook.install import find_distribution
from cookbook.install.deepep import torch_cuda

GIB = 1024**3
NETWORK_FILE = "/etc/profile.d/90-nccl-network-vars.sh"
# The oldest driver branch that supports each CUDA major version, and the oldest for Blackwell.
OLDEST_DRIVER = {"12": 525, "13": 580}
OLDEST_BLACKWELL_DRIVER = 570


@check("gpus", local=True, node_hours=HARDWARE_H)
def gpus(here: Surroundings) -> Outcome:
    if not here.installed_gpus:
        return _without_gpus(here)
    if not here.gpus:
        chosen = here.environment["CUDA_VISIBLE_DEVICES"]
        hidden = f"CUDA_VISIBLE_DEVICES={chosen!r} hides all {len(here.installed_gpus)}"
        remedy = "unset it, or name GPUs that nvidia-smi -L lists"
        return "warning", f"{hidden}: runs on this machine use the CPU", remedy
    models, driver = [gpu.model for gpu in here.gpus], here.gpus[0].driver
    kinds = Counter(models)
    found = ", ".join(f"{count} x {_described(model)}" for model, count in kinds.items())
    if len(here.gpus) < len(here.installed_gpus):
        found += f", of {len(here.installed_gpus)}: the others are not in CUDA_VISIBLE_DEVICES"
    found += f", driver {driver}"
    least = min(model.compute_capability for model in models)
    oldest = OLDEST_DRIVER.get(torch_cuda(here.site).split(".")[0], 0)
    if least >= 10:
        oldest = max(oldest, OLDEST_BLACKWELL_DRIVER)
    if int("0" + driver.partition(".")[0]) < oldest:
        return "problem", found, f"this stack needs driver {oldest} or later"
    if here.cluster and here.sends_jobs and (wanted := here.cluster.gpu):
        # Compare the GPUs' memory, not their names, which have several spellings. Allow 10% because
        # the cluster's file may state only the usable memory.
        sizes = [model.memory_gib for model in models if model.memory_gib]
        differ = [abs(size - wanted.memory_gib) >= 0.1 * wanted.memory_gib for size in sizes]
        fits = len(models) == here.cluster.ranks_per_node
        fits &= {model.compute_capability for model in models} == {wanted.compute_capability}
        if not fits or any(differ):
            place = f"run this on a node of {here.cluster.name}"
            remedy = f"{place}, or correct its `gpu` and `gpus_per_node`"
            return "problem" if here.is_in_job else "warning", f"{found}; {_promised(here)}", remedy
    if len(kinds) > 1:
        return "warning", found, "ranks on unlike GPUs wait for the slowest"
    if least < 9:
        return "warning", found, "DeepEP and float8 need Hopper or later"
    return "ok", f"{found}: {_ability(models[0])}"


def _without_gpus(here: Surroundings) -> Outcome:
    reason = here.why_no_gpus
    if here.is_login_node:
        counts = _promised(here) or "the compute nodes' GPUs count"
        return "not here", f"none on this node, as on a login node; {counts}"
    if here.cluster and here.cluster.gpu:
        found = f"none on this node ({reason}); {_promised(here)}"
    elif reason and not reason.has_driver:
        known = find_distribution("nvidia-ml-py", here.site) is not None
        return "not here", f"{reason}: {'this machine trains on its CPU' if known else 'not known'}"
    else:
        found = str(reason)
    return "problem", found, "check the driver, or CUDA's devices in this container"


def _promised(here: Surroundings) -> str:
    cluster = here.cluster
    if cluster is None:
        return ""
    if cluster.gpu is None:
        return f"{cluster.name} trains on the CPU"
    if here.is_in_job:
        return f"{cluster.name} has {cluster.ranks_per_node} x {cluster.gpu.name}"
    gpus = f"{cluster.ranks_per_node} x {_described(cluster.gpu)}"
    return f"{cluster.name} has {gpus} a node: {_ability(cluster.gpu)}"


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.compute_capability}, {gpu.memory_gib:.0f} GiB)"


def _ability(gpu: Gpu) -> str:
    return "MXFP8 in hardware" if gpu.compute_capability >= 10 else "float8; MXFP8 only emulated"


# An idle B200 or H200 has less than 1 GiB in use.
_IDLE_MIB = 2048
# XIDs of hardware errors in NVIDIA's catalogue. Not listed: errors that a program causes (13, 31,
# 43, 45), remapped memory rows (63) and corrected errors (92).
_HARDWARE_XIDS = {
    48: "uncorrectable memory error",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "fell off the bus",
    94: "memory error in one program",
    95: "uncontained memory error",
    119: "its firmware (GSP) does not answer",
    120: "its firmware (GSP) failed",
    140: "unrecovered memory error",
    149: "NVLink error",
}
KERNEL_LOG = ("dmesg",)


def _faults(here: Surroundings, fault: Callable[[InstalledGpu], str]) -> str:
    number = here.installed_gpus.index
    return "; ".join(f"GPU {number(gpu)}: {words}" for gpu in here.gpus if (words := fault(gpu)))


@check("idle", node_hours=PASSING_H, of_gpus=True)
def idle(here: Surroundings) -> Outcome:
    def use(gpu: InstalledGpu) -> str:
        if gpu.processes:
            return f"process {gpu.processes[-1]} uses it"
        gib = gpu.memory_used_mib / 1024
        return f"{gib:.0f} GiB in use" if gpu.memory_used_mib > _IDLE_MIB else ""

    if found := _faults(here, use):
        # Outside a job the GPUs may be in legitimate use.
        return "problem" if here.is_in_job else "warning", found, "end what is left over there"
    return "ok", "no GPU is in use"


@check("gpu memory", node_hours=HARDWARE_H, of_gpus=True)
def gpu_memory(here: Surroundings) -> Outcome:
    def errors(gpu: InstalledGpu) -> str:
        count = gpu.ecc_errors
        words = [f"{count} uncorrectable ECC error(s)"] if count else []
        if gpu.row_failed:
            words.append("no spare memory row is left")
        elif gpu.row_pending:
            words.append("a memory row waits for a reset of the GPU")
        return ", ".join(words)

    if found := _faults(here, errors):
        return "problem", found, "reset the GPU, or replace it"
    return "ok", "no uncorrectable error since the driver was loaded"


@check("xid", node_hours=HARDWARE_H, of_gpus=True)
def xid(here: Surroundings) -> Outcome:
    """Check the kernel log, if readable, for the GPU driver's errors of the last day."""
    log, uptime = here.answer(KERNEL_LOG), here.text("/proc/uptime").split()
    if log.status != 0 or not uptime:
        return "not here", "the kernel's log cannot be read here"
    found = {}
    for seconds, bus, number in re.findall(
        r"^\[\s*([0-9.]+)\] NVRM: Xid \(PCI:([^)]+)\): ([0-9]+)", log.output, re.MULTILINE
    ):
        error = _HARDWARE_XIDS.get(int(number))
        if error and float(uptime[0]) - float(seconds) < 24 * 3600:
            found[bus, number] = f"GPU at {bus}: XID {number}, {error}"
    if found:
        return "problem", "; ".join(found.values()), "reset or replace the GPU"
    return "ok", "no hardware error of a GPU in the last day"


@check("nvlink", node_hours=HARDWARE_H)
def nvlink(here: Surroundings) -> Outcome:
    """Check for a GPU with fewer active NVLinks than the others; skip GPUs without NVLink."""
    most = max((gpu.links for gpu in here.gpus), default=0)
    if len(here.gpus) < 2 or not most:
        return None
    words = "{} of {} links up".format
    if few := _faults(here, lambda gpu: words(gpu.links, most) if gpu.links < most else ""):
        return "problem", few, "restart the fabric manager, or have it repaired"
    return "ok", f"{most} links up on each of {len(here.gpus)} GPUs"


@check("ibgda", node_hours=HARDWARE_H)
def ibgda(here: Surroundings) -> Outcome:
    """Check for IBGDA, where the GPU rings the NIC's doorbell: DeepEP needs it between nodes."""
    if not here.installed_gpus:
        return "not here", "no GPU driver here; the compute nodes' options count"
    wanted = {
        "NVreg_EnableStreamMemOPs=1": r"(?m)^EnableStreamMemOPs:\s*1\b",
        'NVreg_RegistryDwords="PeerMappingOverride=1;"': r"\bPeerMappingOverride=1\b",
    }
    parameters = here.text("/proc/driver/nvidia/params")
    missing = [option for option, line in wanted.items() if not re.search(line, parameters)]
    if not missing:
        return "ok", "driver options EnableStreamMemOPs and PeerMappingOverride"
    if here.path("/dev/gdrdrv").exists() or here.path("/sys/module/gdrdrv").exists():
        return "ok", "through GDRCopy (gdrdrv is loaded)"
    options = f"options nvidia {' '.join(missing)}"
    remedy = f"set in /etc/modprobe.d and reload the driver: {options}; or load gdrdrv"
    found = "neither the driver's options nor GDRCopy: DeepEP stays within a node"
    return "problem" if here.needs_ibgda else "warning", found, remedy


@check("memlock", node_hours=HARDWARE_H)
def memlock(here: Surroundings) -> Outcome:
    match = re.search(r"^Max locked memory\s+(\S+)", here.text("/proc/self/limits"), re.MULTILINE)
    if match is None:
        return "not here", "this system does not say"
    if match[1] == "unlimited":
        return "ok", "unlimited"
    mib = int(match[1]) / 1024**2
    if not here.installed_gpus:
        return "not here", f"{mib:.0f} MiB here; the compute nodes' limit counts"
    found = f"{mib:.0f} MiB: too little to register GPU buffers with the network"
    remedy = "ulimit -l unlimited, in slurmd's unit or /etc/security/limits.conf"
    return "problem" if rdma_devices(here) else "warning", found, remedy


def rdma_devices(here: Surroundings) -> dict[str, str]:
    """Return the state of each InfiniBand or RoCE device's first port, e.g. mlx5_4: ACTIVE."""
    folder = here.path("/sys/class/infiniband")
    names = sorted(device.name for device in folder.iterdir()) if folder.is_dir() else []
    states = {name: here.text(f"/sys/class/infiniband/{name}/ports/1/state") for name in names}
    return {name: state.rpartition(":")[2].strip() for name, state in states.items()}


@check("network", node_hours=HARDWARE_H)
def network(here: Surroundings) -> Outcome:
    devices = rdma_devices(here)
    chosen = here.environment.get("NCCL_IB_HCA", "")
    place = "NCCL_IB_HCA"
    if not chosen and (text := here.text(NETWORK_FILE)):
        match = re.search(r"^\s*(?:export\s+)?NCCL_IB_HCA=[\"']?([^\"'\s]*)", text, re.MULTILINE)
        chosen, place = (match[1] if match else ""), NETWORK_FILE
    if not devices:
        found = f"no RDMA device here; {place} names {chosen}" if chosen else "no RDMA device here"
        return "not here", f"{found}; one node, or TCP between nodes"
    if not chosen:
        found = f"{len(devices)} devices and no NCCL_IB_HCA: NCCL may take a virtual one"
        remedy = "name the devices that belong to the GPUs, e.g. NCCL_IB_HCA=mlx5_4:1,mlx5_5:1"
        return "warning", found, remedy
    if chosen.startswith("^"):
        return "ok", f"{place}: all but {chosen[1:]}"
    named = [name.split(":")[0] for name in chosen.lstrip("=").split(",") if name]
    # NCCL treats each name in NCCL_IB_HCA as a prefix unless the list begins with "=".
    unknown = [name for name in named if not any(device.startswith(name) for device in devices)]
    if unknown:
        found = f"{place} names {', '.join(unknown)}; here are {', '.join(devices)}"
        return "problem", found, "name devices of this node"
    if down := [name for name in named if devices.get(name, "ACTIVE") != "ACTIVE"]:
        found = ", ".join(f"{name} is {devices[name]}" for name in down)
        remedy = "have the link repaired, or leave this node out with the profile's `exclude`"
        return "problem", found, remedy
    return "ok", f"{len(named)} devices, active ({place}={chosen})"


@check("host name", local=True)
def host_name(here: Surroundings) -> Outcome:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        found = f"{name} does not resolve ({error.strerror}), so ranks may wait for one another"
        return "warning", found, f"add a line to /etc/hosts: 127.0.1.1 {name}"
    return "ok", f"{name} resolves", ""


@check("disk", local=True, node_hours=PASSING_H)
def disk(here: Surroundings) -> Outcome:
    folder = here.job_folder or here.runs
    if not here.is_in_job:
        # If the runs folder does not exist yet, check the nearest existing parent.
        folder = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return "problem", f"{folder}: {error.strerror}", "mount it on this node"
    found = f"{free:.0f} GiB free in {folder}, where runs and checkpoints go"
    if free < 2:
        return "problem", found, "free some: logs alone may fill it"
    if free < 50 and here.trains_for_real:
        return "warning", found, "a checkpoint of the 16B takes about 175 GiB, of the 671B 9.5 TiB"
    return "ok", found


@check("scratch", local=True, node_hours=PASSING_H)
def scratch(here: Surroundings) -> Outcome:
    """Check that /tmp and /dev/shm have space for the files of compilers and worker processes.

    NCCL uses a segment of /dev/shm per pair of ranks, but containers often have only 64 MiB there.
    """
    found = []
    for folder in (here.environment.get("TMPDIR") or "/tmp", "/dev/shm"):
        try:
            free = shutil.disk_usage(here.path(folder)).free / GIB
        except OSError as error:
            return "problem", f"{folder}: {error.strerror}", "create it"
        if free < 1:
            state: State = "problem" if here.gpus or here.is_in_job else "warning"
            return state, f"{folder}: {free:.1f} GiB free", "free some, or give the container more"
        found.append(f"{free:.0f} GiB in {folder}")
    return "ok", " and ".join(found)


@check("memory", node_hours=PASSING_H)
def memory(here: Surroundings) -> Outcome:
    text = here.text("/proc/meminfo")
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
    if len(sizes) < 2:
        return "not here", "this system does not say"
    total, free = (int(sizes[name]) / 1024**2 for name in ("MemTotal", "MemAvailable"))
    found = f"{free:.0f} of {total:.0f} GiB free"
    if free < 0.05 * total:
        remedy = "end what is left over there, or delete its files in /dev/shm and /tmp"
        return "problem", found, remedy
    return "ok", found


@check("job folder", node_hours=PASSING_H)
def job_folder(here: Surroundings) -> Outcome:
    """Check that the run's folder exists on this node and is writable."""
    if here.job_folder is None:
        return None
    try:
        with tempfile.TemporaryFile(dir=here.job_folder) as file:
            file.write(b"1")
    except OSError as error:
        found = f"cannot write to {here.job_folder}: {error.strerror}"
        return "problem", found, "mount the shared file system there"
    return "ok", str(here.job_folder)
