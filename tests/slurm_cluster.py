"""Start a real Slurm cluster on this machine for the time of a test.

Each node has its own process namespace, host name, /etc/hosts and /dev/shm. So node names resolve
in jobs, killing a node kills its processes, and all nodes end with the process that started them.
With 32 nodes on two cores a start takes 1 to 2 s, a stop 0.1 s, and 100 sbatch calls 1 to 2 s.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.slurm_conf import MUNGE_SOCKET, Settings, write_configuration
from tests.slurm_installed import search_path
from tests.waiting import HANG_S

__all__ = ["CPU_NODES", "Settings", "SlurmCluster", "SlurmError"]

# A profile of nodes of the cluster, to which tests add their number.
CPU_NODES = """
description: CPU nodes of the test cluster
scheduler: slurm
ranks_per_node: 1
emulate: true
cpus_per_task: 2
exclusive: false
partition: main
time: "00:10:00"
environment: {OMP_NUM_THREADS: 1}
"""
FINISHED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})
FINISHED |= {"OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

# Process 1 of a machine: $1 is its name, $2 its /etc/hosts, then the daemon's command. The shell
# stays to reap orphans; when the daemon ends, all end.
_MACHINE = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
shift 2
"$@" &
wait
"""


class SlurmError(Exception):
    """The cluster failed a request; the message has its log."""


def tail(path: Path) -> str:
    """Return a file's last lines under its name, for a failure message."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join([f"-- {path.name}:", *text.splitlines()[-15:]])


@dataclass
class SlurmCluster:
    """A running cluster: nodes `worker-0` to `worker-N`, partition `main`, no accounting.

    Start it from the main thread: its processes end when the thread that started them ends.
    """

    folder: Path
    node_names: tuple[str, ...]
    settings: Settings
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False)

    @classmethod
    @contextmanager
    def start(
        cls, folder: Path, nodes: int = 32, settings: Settings | None = None
    ) -> Iterator[SlurmCluster]:
        """Start a cluster in `folder`, which must be empty or absent and is removed at the end."""
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SlurmError(f"{folder}: is not empty, and a cluster removes its folder at its end")
        names = tuple(f"worker-{index}" for index in range(nodes))
        cluster = cls(folder, names, settings or Settings())
        try:
            (folder / "log").mkdir()
            write_configuration(folder, names, cluster.settings)
            cluster._start_daemons()
            yield cluster
        finally:
            cluster.stop()

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def _munge_socket(self) -> Path:
        return self.folder / MUNGE_SOCKET

    @property
    def env(self) -> dict[str, str]:
        """The environment of commands on this cluster, without Slurm's inherited variables."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_"))
        }
        own = {"SLURM_CONF": str(self.conf), "PATH": search_path()}
        # The nodes have no GPUs; tests of the preflight provide some.
        return {"COOKBOOK_PREFLIGHT": "off", **inherited, **own}

    def run(
        self,
        *argv: str | Path,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node; one string is split as a shell would."""
        command = shlex.split(argv[0]) if len(argv) == 1 and isinstance(argv[0], str) else argv
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd or self.folder,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise SlurmError(f"{command}: exit status {done.returncode}: {said}")
        return done

    def submit(
        self,
        script: str | Path,
        *arguments: str,
        options: Sequence[str] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Queue a script with sbatch, `options` before it and `arguments` after; return its id."""
        said = self.run("sbatch", "--parsable", *options, script, *arguments, cwd=cwd, env=env)
        return said.stdout.strip().split(";")[0]

    def job_field(self, job_id: str, name: str) -> str | None:
        """Return a field of `scontrol show job`; None if the job or the field is unknown."""
        said = self.run("scontrol", "show", "job", job_id, check=False)
        found = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", said.stdout)
        return found.group(1) if found else None

    def wait(self, job_id: str, states: Collection[str] = FINISHED, limit_s: float = HANG_S) -> str:
        """Wait for one of `states`, by default any final one; return it."""
        seen: str | None = None

        def reached() -> bool:
            nonlocal seen
            state = self.job_field(job_id, "JobState")
            if state is None:
                raise SlurmError(f"job {job_id} is gone; last seen {seen}")
            seen = state
            return seen in states

        try:
            self._until(reached, "slurmctld", limit_s=limit_s)
        except TimeoutError as late:
            shown = self.run("scontrol", "show", "job", job_id, check=False).stdout
            output = re.search(r"StdOut=(\S+)", shown)
            shown += tail(Path(output[1])) if output else ""
            message = f"job {job_id}: {seen}, not {sorted(states)}\n{shown}\n{late}"
            raise SlurmError(message) from None
        assert seen is not None
        return seen

    def cancel_all(self) -> None:
        """Cancel every job and wait until all nodes are idle."""
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.run("scancel", *jobs, check=False)
        self.wait_idle()

    def kill_node(self, name: str) -> None:
        """Kill a node with its processes, as a power failure does, and tell Slurm."""
        self._kill(name)
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=power failure")

    def start_node(self, name: str) -> None:
        """Restart a killed node and wait until Slurm uses it."""
        self._start_node(name)
        self.wait_idle((name,))

    def stop_controller(self) -> None:
        """End slurmctld; jobs continue. Killed, it might forget a job that it just started."""
        self.run("scontrol", "shutdown", "slurmctld")
        self._processes["slurmctld"].wait(timeout=HANG_S)

    def start_controller(self) -> None:
        """Start slurmctld with its saved state."""
        self._spawn("slurmctld", self._on_machine("controller-0", "slurmctld", "-D", "-i"))
        ping = partial(self.run, "scontrol", "ping", check=False)
        self._until(lambda: ping().returncode == 0, "slurmctld")

    def start_munge(self) -> None:
        # --force: munge wants a socket that all users reach, and pytest's folders are private.
        munged = ["munged", "--force", "--foreground", f"--socket={self._munge_socket}"]
        munged += [f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munge.pid"]
        munged += [f"--seed-file={self.folder}/munge.seed", f"--log-file={self.folder}/log/munged"]
        self._spawn("munged", munged)
        self._until(self._munge_socket.exists, "munged")

    def stop_munge(self) -> None:
        self._kill("munged")
        self._munge_socket.unlink(missing_ok=True)

    def node_states(self) -> dict[str, str]:
        """Return each node's short state, such as `idle`, `alloc` or `down*`."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t").stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self, names: Collection[str] | None = None) -> None:
        """Wait until the named nodes, by default all, are idle."""

        def idle() -> bool:
            states = self.node_states()
            return all(states.get(name) == "idle" for name in names or self.node_names)

        try:
            self._until(idle, "slurmctld", *(names or self.node_names[:1]))
        except TimeoutError as late:
            raise SlurmError(f"nodes are not idle: {self.node_states()}\n{late}") from None

    def pid(self, name: str) -> int:
        """Return process 1 of a node or of `slurmctld`."""
        process = self._processes[name]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else process.pid

    def stop(self) -> None:
        """End every process of the cluster, by its id, and remove its folder."""
        for name in list(self._processes):
            self._kill(name, wait=False)
        for name in list(self._processes):
            self._processes.pop(name).wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_daemons(self) -> None:
        self.start_munge()
        self.start_controller()
        for name in self.node_names:
            self._start_node(name)
        self.wait_idle()

    def _start_node(self, name: str) -> None:
        self._spawn(name, self._on_machine(name, "slurmd", "-D", "-N", name))

    def _on_machine(self, name: str, *daemon: str) -> list[str]:
        namespaces = ["--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child"]
        first = ["sh", "-c", _MACHINE, "machine", name, f"{self.folder}/hosts"]
        return ["unshare", *namespaces, "--mount-proc", *first, *daemon]

    def _spawn(self, name: str, argv: Sequence[str]) -> None:
        with (self.folder / "log" / name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                # The node dies with the test process.
                ["setpriv", "--pdeathsig", "KILL", *argv],
                cwd=self.folder,
                env={**self.env, "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C at the terminal must not reach the daemons before the tests end.
                start_new_session=True,
            )

    def _kill(self, name: str, wait: bool = True) -> None:
        process = self._processes[name]
        if process.poll() is None:
            # Its parent returns when all of the namespace have ended.
            os.kill(self.pid(name), signal.SIGKILL)
        if wait:
            process.wait()

    def _until(self, condition: Callable[[], bool], *logs: str, limit_s: float = HANG_S) -> None:
        log, deadline = self.folder / "log", time.monotonic() + limit_s
        while not condition():
            for name, process in self._processes.items():
                if name in logs and process.poll() is not None:
                    raise SlurmError(f"{name} ended by itself\n{tail(log / name)}")
            if time.monotonic() > deadline:
                tails = "\n".join(tail(log / name) for name in logs)
                raise TimeoutError(f"waited {limit_s:.0f} s\n{tails}")
            time.sleep(0.1)
