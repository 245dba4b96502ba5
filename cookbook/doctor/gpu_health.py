"""The doctor's checks of the GPUs' health: idle, their memory whole, their links up."""

from __future__ import annotations

import re
from collections import Counter

from cookbook.base.gpus import (
    GPU_LINKS,
    GPU_PROCESSES,
    GPU_ROWS,
    GPU_STATES,
    parse_links,
    parse_rows,
)
from cookbook.doctor.check import Finding, State, check
from cookbook.doctor.surroundings import DCGM_HEALTH, KERNEL_LOG, Surroundings

# An idle B200 or H200 has less than 1 GiB in use.
_IDLE_MIB = 2048
# Errors of the hardware, by NVIDIA's catalogue. Left out are those that a program causes (13, 31,
# 43, 45) and those that were corrected (63, 92).
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
_XID_S = 24 * 3600


def _names(here: Surroundings) -> dict[str, str]:
    """`GPU 3` by UUID, of the GPUs that count here."""
    return {gpu.uuid: f"GPU {here.installed_gpus.index(gpu)}" for gpu in here.gpus}


@check(local=False, node_hours=1)
def idle(here: Surroundings) -> list[Finding]:
    names = _names(here)
    if not names:
        return []
    busy = {}
    for uuid, fields in parse_rows(here.answer(GPU_STATES).output):
        used = fields[1] if len(fields) > 1 else ""
        if uuid in names and used.isdecimal() and int(used) > _IDLE_MIB:
            busy[uuid] = f"{int(used) / 1024:.0f} GiB in use"
    for uuid, fields in parse_rows(here.answer(GPU_PROCESSES).output):
        if uuid in names and len(fields) > 1:
            busy[uuid] = f"process {fields[0]} ({fields[1]}) uses it"
    if not busy:
        return [Finding("idle", "ok", "no GPU is in use")]
    found = "; ".join(f"{names[uuid]}: {said}" for uuid, said in busy.items())
    # Outside a job somebody may well be using them.
    state: State = "problem" if here.is_in_job else "warning"
    return [Finding("idle", state, found, "end what is left over there")]


@check(local=False, node_hours=24)
def gpu_memory(here: Surroundings) -> list[Finding]:
    """Errors that ECC could not correct, and rows that wait for a reset or cannot be replaced."""
    names = _names(here)
    if not names:
        return []
    errors = []
    for uuid, fields in parse_rows(here.answer(GPU_STATES).output):
        count = fields[2] if len(fields) > 2 else ""
        if uuid in names and count.isdecimal() and int(count):
            errors.append(f"{names[uuid]}: {count} uncorrectable ECC error(s)")
    for uuid, fields in parse_rows(here.answer(GPU_ROWS).output):
        if uuid not in names or len(fields) < 2:
            continue
        pending, failed = (field.lower() in ("yes", "1") for field in fields[:2])
        if failed:
            errors.append(f"{names[uuid]}: no spare memory row is left")
        elif pending:
            errors.append(f"{names[uuid]}: a memory row waits for a reset of the GPU")
    if errors:
        return [Finding("gpu memory", "problem", "; ".join(errors), "reset the GPU, or replace it")]
    return [Finding("gpu memory", "ok", "no uncorrectable error since the driver was loaded")]


@check(local=False, node_hours=24)
def xid(here: Surroundings) -> list[Finding]:
    """The driver's errors of the last day in the kernel's log, where one may read it."""
    if not here.gpus:
        return []
    log, uptime = here.answer(KERNEL_LOG), (here.text("/proc/uptime") or "").split()
    if not log.works or not uptime:
        return [Finding("xid", "not here", "the kernel's log cannot be read here")]
    found = {}
    for seconds, bus, number in re.findall(
        r"^\[\s*([0-9.]+)\] NVRM: Xid \(PCI:([^)]+)\): ([0-9]+)", log.output, re.MULTILINE
    ):
        said = _HARDWARE_XIDS.get(int(number))
        if said and float(uptime[0]) - float(seconds) < _XID_S:
            found[bus, number] = f"GPU at {bus}: XID {number}, {said}"
    if found:
        return [Finding("xid", "problem", "; ".join(found.values()), "reset or replace the GPU")]
    return [Finding("xid", "ok", "no hardware error of a GPU in the last day")]


@check(local=False, node_hours=24)
def nvlink(here: Surroundings) -> list[Finding]:
    """A GPU with fewer active links than its neighbours; cards without NVLink have none."""
    names = _names(here)
    links = parse_links(here.answer(GPU_LINKS).output)
    counts = {uuid: links[uuid] for uuid in names if uuid in links}
    most = max(counts.values(), default=0)
    if len(names) < 2 or not most:
        return []
    few = [f"{names[uuid]}: {n} of {most} links up" for uuid, n in counts.items() if n < most]
    if few:
        remedy = "restart the fabric manager, or have it repaired"
        return [Finding("nvlink", "problem", "; ".join(few), remedy)]
    kinds = Counter(counts.values())
    return [Finding("nvlink", "ok", f"{most} links up on each of {kinds[most]} GPUs")]


@check(local=False, node_hours=24)
def dcgm(here: Surroundings) -> list[Finding]:
    """What NVIDIA's own watch over the GPUs says, where it runs and was told to watch."""
    answer = here.answer(DCGM_HEALTH)
    overall = re.search(r"Overall Health[\s|:]+(\w+)", answer.output)
    if not here.gpus or overall is None:
        return []
    if overall[1] == "Healthy":
        return [Finding("dcgm", "ok", "dcgmi health: healthy")]
    said = " ".join(re.sub(r"[|+=-]+", " ", answer.output.partition(overall[0])[2]).split())
    state: State = "warning" if overall[1].startswith("Warn") else "problem"
    return [Finding("dcgm", state, f"{overall[1]}: {said[:200]}", "dcgmi diag -r 2 says more")]
