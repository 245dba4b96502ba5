"""Write the configuration of a Slurm cluster on this machine."""

import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.config.cluster import Cluster

MUNGE_SOCKET = "munge.socket"
# Below the rendezvous ports of jobs (`rendezvous_port` and the next 1,000): a job whose port slurmd
# has would wait in vain.
PORTS = range(15000, Cluster.rendezvous_port)


@dataclass(frozen=True)
class Settings:
    """The nodes' sizes and the cluster's timeouts in seconds, shorter than Soperator's 180."""

    gpus_per_node: int = 8
    cpus_per_node: int = 128
    memory_mib_per_node: int = 1_792_000
    min_job_age: int = 300
    kill_wait: int = 5
    slurmd_timeout: int = 60
    # The lifetime of credentials, for which a requeued job waits; Slurm turns less than 5 into 120.
    requeue_delay: int = 5
    # More lines of slurm.conf.
    extra_conf: str = ""


def _first_job() -> int:
    """Return an id that keeps clusters apart: a job's rendezvous port follows from its id.

    Each of up to five workers of pytest has a fifth of the 1,000 ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    return 1 + (zlib.crc32(run.encode()) + 200 * worker) % 1000


def write_configuration(folder: Path, node_names: Sequence[str], settings: Settings) -> None:
    """Write slurm.conf, gres.conf, munge's key, the GPUs' files and the nodes' /etc/hosts."""
    (folder / "state").mkdir()
    (folder / "devices").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    # Slurm wants device files, whose names end in the GPU's number.
    for index in range(settings.gpus_per_node):
        (folder / "devices" / f"nvidia{index}").symlink_to("/dev/null")
    gpus = f"{folder}/devices/nvidia[0-{settings.gpus_per_node - 1}]"
    (folder / "gres.conf").write_text(f"Name=gpu Type=nvidia_b200 File={gpus}\n")
    nodes = [f"{_address(index)} {name}" for index, name in enumerate(node_names)]
    hosts = [*Path("/etc/hosts").read_text().splitlines(), "127.0.0.1 controller-0", *nodes]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    (folder / "slurm.conf").write_text(_slurm_conf(folder, node_names, settings))


def _slurm_conf(folder: Path, node_names: Sequence[str], settings: Settings) -> str:
    controller_port, *node_ports = _free_ports(1 + len(node_names))
    shape = (
        f"CPUs={settings.cpus_per_node} "
        f"Sockets=2 CoresPerSocket={settings.cpus_per_node // 4} ThreadsPerCore=2 "
        f"RealMemory={settings.memory_mib_per_node} "
        f"Gres=gpu:nvidia_b200:{settings.gpus_per_node}"
    )
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr={_address(index)} Port={port} {shape}"
        for index, (name, port) in enumerate(zip(node_names, node_ports, strict=True))
    )
    # Soperator's settings, as far as this version of Slurm and one machine allow: no cgroups, no
    # accounting. Sockets in the spool folder need short paths, hence /dev/shm.
    return f"""\
ClusterName=throwaway
SlurmctldHost=controller-0(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/{MUNGE_SOCKET},cred_expire={settings.requeue_delay}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile=/dev/shm/slurmd.pid
SlurmdSpoolDir=/dev/shm/slurmd
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
JobRequeue=1
FirstJobId={_first_job()}
KillOnBadExit=1
KillWait={settings.kill_wait}
MinJobAge={settings.min_job_age}
SlurmdTimeout={settings.slurmd_timeout}
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,batch_sched_delay=0
{settings.extra_conf}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _address(index: int) -> str:
    return f"127.1.{(index + 1) // 250}.{(index + 1) % 250 + 1}"


def _free_ports(count: int) -> list[int]:
    free: list[int] = []
    start = os.getpid() * 97 % len(PORTS)
    for offset in range(len(PORTS)):
        port = PORTS[(start + offset) % len(PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"no {count} free ports from {PORTS.start} to {PORTS.stop}")
