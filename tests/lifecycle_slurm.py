"""A stand-in for Slurm that a test drives, with the words and the order of the real one.

Slurm's commands and torchrun are one short program on PATH. It asks this process over a socket what
to say, so that a history of a job costs a second. Nodes are `worker-0` and so on.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.programs import write_program
from tests.started import lives

AWAY = {
    "slurmctld": "Unable to contact slurm controller (connect failure)",
    "munge": "Munge encode failed: Failed to access munge.socket.2: No such file or directory",
}
# What a job that Slurm stops finds in its log, and its state once its processes are gone.
STOPS = {
    "requeue": (" DUE TO JOB REQUEUE", "PENDING"),
    "preempt": (" DUE TO PREEMPTION", "PENDING"),
    "node failure": (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "PENDING"),
    "cancel": ("", "CANCELLED"),
}
_CLIENT = """\
import json, os, signal, socket, subprocess, sys, time
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
asked = [os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]
link.sendall(json.dumps(asked).encode() + b"\\n")
out, err, code, nodes, command = json.loads(link.makefile().readline())
sys.stdout.write(out), sys.stderr.write(err)
# As with slurmstepd, none outlives its step.
command = ["setpriv", "--pdeathsig", "KILL", *command]
tasks = {{
    node: subprocess.Popen(command, env=dict(os.environ, SLURMD_NODENAME=node)) for node in nodes
}}
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks.values()])
while tasks:
    for node, task in list(tasks.items()):
        if task.poll() is not None:
            del tasks[node]
        if task.returncode:
            code = abs(task.returncode)
            sys.stderr.write(f"srun: error: {{node}}: task 0: Exited with exit code {{code}}\\n")
            [other.kill() for other in tasks.values()]
    time.sleep(0.01)
sys.exit(code)
"""


@dataclass
class Job:
    """A job, or an element of an array."""

    number: int
    script: Path
    words: list[str]
    options: dict[str, str]
    environment: dict[str, str]
    folder: str
    array: tuple[int, int] | None = None
    state: str = "PENDING"
    restarts: int = 0
    nodes: list[str] = field(default_factory=list)
    batch: subprocess.Popen[bytes] | None = None
    steps: dict[str, int] = field(default_factory=dict)  # names and processes of srun
    next_state: str = ""
    preempted: bool = False
    is_held: bool = False
    kill_at: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.array[0]}_{self.array[1]}" if self.array else str(self.number)

    @property
    def pids(self) -> list[int]:
        return [*self.steps.values(), *([self.batch.pid] if self.batch else [])]

    @property
    def log(self) -> Path:
        named = self.options.get("output", "slurm-%j.log").replace("%x", "job")
        return Path(self.folder, named.replace("%j", str(self.number)))


class Scheduler(socketserver.ThreadingUnixStreamServer):
    """Runs the jobs; the test calls what users do not: `stop`, `terminate`, and sets `away`."""

    daemon_threads = True

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.nodes = [f"worker-{number}" for number in range(num_nodes)]
        self.away = ""
        self.jobs: list[Job] = []
        self._lock = threading.RLock()
        (folder / "spool").mkdir(parents=True)
        super().__init__(str(folder / "socket"), _Handler)
        client = _CLIENT.format(path=str(folder / "socket"))
        for name in ("sbatch", "scancel", "squeue", "scontrol", "sinfo", "srun"):
            write_program(self.programs / name, f"#!{sys.executable} -IS\n{client}")
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()
        self._is_open = True
        self._clock = threading.Thread(target=self._run)
        self._clock.start()

    def __str__(self) -> str:
        logs = (job.log.read_text()[-800:] if job.log.exists() else "" for job in self.jobs)
        said = zip(self.jobs, logs, strict=True)
        return "\n".join(f"{one.name} {one.state} {[*one.steps]}: {log}" for one, log in said)

    def close(self) -> None:
        """End everything that still runs."""
        self._is_open = False
        self._clock.join()
        for job in self.jobs:
            self._kill(job)
        self.shutdown()
        self.server_close()

    def job(self, name: str | None) -> Job | None:
        return next((one for one in reversed(self.jobs) if one.name == name), None)

    def stop(self, job: Job, why: str) -> None:
        """End a running job as Slurm does: a line in its log, SIGTERM to all, SIGKILL later."""
        with self._lock:
            said, job.next_state = STOPS[why]
            if job.state == "PENDING":
                job.state = job.next_state
                return
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            line = f"slurmstepd: error: *** JOB {job.number} ON {job.nodes[0]} CANCELLED AT {now}"
            with job.log.open("a") as log:
                print(f"{line}{said} ***", file=log)
            job.state, job.kill_at = "COMPLETING", time.monotonic() + 5
            for process in job.pids:
                _signal(process, signal.SIGTERM)

    def terminate(self, job: Job) -> None:
        """Send SIGTERM to what srun started, and to nothing else."""
        for pid in [*job.steps.values()]:
            for task in psutil.Process(pid).children(recursive=True):
                task.terminate()

    def answer(
        self, name: str, words: list[str], variables: dict[str, str], cwd: str, pid: int
    ) -> Any:
        """Return what a command says on each stream, its status, and what srun starts where."""
        with self._lock:
            if self.away and name != "srun":
                return "", f"{name}: error: {AWAY[self.away]}\n", 1, [], []
            said: Any = getattr(self, f"_{name}")(words, variables, cwd, pid)
            return said if isinstance(said, tuple) else (said or "", "", 0, [], [])

    def _sbatch(self, words: list[str], variables: dict[str, str], cwd: str, _: int) -> str:
        cut = next(place for place, word in enumerate(words) if not word.startswith("-"))
        script = Path(cwd, words[cut])
        lines = [*re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE), *words[:cut]]
        options = {line[2:].partition("=")[0]: line.partition("=")[2] for line in lines}
        first = len(self.jobs) + 100
        of_array = options.get("array", "")
        indices = range(int(of_array.partition("-")[2]) + 1) if of_array else range(1)
        for index in indices:
            # The last element of an array has the array's own number.
            number = first if index == indices[-1] else first + 1 + index
            array = (first, index) if of_array else None
            folder = options.get("chdir", cwd)
            rest = words[cut + 1 :]
            # As Slurm does: the submitter may remove its file at once.
            shutil.copy(script, self._spooled(number))
            self.jobs.append(Job(number, script, rest, options, variables, folder, array))
        return f"{first}\n" if "parsable" in options else f"Submitted batch job {first}\n"

    def _scancel(self, words: list[str], *_: Any) -> None:
        for name in [word for word in words if not word.startswith("-")]:
            number, dot, step = name.partition(".")
            for job in self._called(number):
                if dot:
                    for pid in [*job.steps.values()][int(step) : int(step) + 1]:
                        _signal(pid, signal.SIGKILL)
                elif job.state in ("PENDING", "RUNNING"):
                    self.stop(job, "cancel")

    def _squeue(self, words: list[str], *_: Any) -> str:
        names = [word.partition("=")[2] for word in words if word.startswith("--jobs=")]
        named = [job for name in ",".join(names).split(",") for job in self._called(name)]
        jobs = named if names else self.jobs
        if "--steps" in words:
            return "".join(f"{j.name}.{n} {s}\n" for j in jobs for n, s in enumerate(j.steps))
        lines = (
            [j.name, j.state, why, j.restarts, " ".join([str(j.script), *j.words])]
            for j in jobs
            for why in ["JobHeldUser" if j.is_held else "None"]
        )
        return "".join(f"{'|'.join(map(str, line))}|\n" for line in lines)

    def _scontrol(self, words: list[str], *_: Any) -> str | None:
        if words[:2] == ["show", "hostnames"]:
            return "\n".join(words[2].split(",")) + "\n"
        if words[:2] == ["show", "node"]:
            shown = words[-1].split(",")
            return "".join(f"NodeName={node} NodeAddr=127.0.0.1 State=IDLE\n" for node in shown)
        (job,) = self._called(
            words[2] if words[0] == "show" else words[1].partition("=")[2] or words[1]
        )
        if words[0] == "show":
            when = "2026-01-01T00:00:00" if job.preempted else "None"
            return f"JobId={job.number} PreemptTime={when} ExcNodeList=(null) CPUs/Task=1\n"
        if words[0] == "requeue":
            self.stop(job, "requeue")
        return None

    def _sinfo(self, words: list[str], *_: Any) -> str:
        form = words[-1].partition("=")[2]
        fixed = {"%P": "main*", "%G": "(null)", "%D": "1", "%T": "allocated"}
        rows = (" ".join(fixed.get(key, node) for key in form.split()) for node in self.nodes)
        return "\n".join(rows) + "\n"

    def _srun(self, words: list[str], variables: dict[str, str], _: str, pid: int) -> Any:
        job = next(one for one in self.jobs if str(one.number) == variables["SLURM_JOB_ID"])
        cut = next(place for place, word in enumerate(words) if not word.startswith("-"))
        named = {word.partition("=")[0]: word.partition("=")[2] for word in words[:cut]}
        job.steps[named["--job-name"]] = pid
        return "", "", 0, named["--nodelist"].split(","), words[cut:]

    def _called(self, name: str) -> list[Job]:
        """Return the jobs that Slurm's commands mean: of an array's number, every element."""
        return [
            job
            for job in self.jobs
            if name in (job.name, str(job.number), str(job.array and job.array[0]))
        ]

    def _run(self) -> None:
        while self._is_open:
            with self._lock:
                for job in self.jobs:
                    self._look(job)
            time.sleep(0.02)

    def _look(self, job: Job) -> None:
        for name, pid in [*job.steps.items()]:
            if not lives(pid):
                del job.steps[name]
        if job.batch is not None and job.batch.poll() is not None:
            self._kill(job)
            job.state = job.next_state or ("FAILED" if job.batch.returncode else "COMPLETED")
            job.restarts += job.state == "PENDING"
            job.batch, job.next_state, job.preempted, job.nodes = None, "", False, []
        elif job.batch is not None and job.next_state and time.monotonic() > job.kill_at:
            _signal(job.batch.pid, signal.SIGKILL)
        elif nodes := self.may_start(job):
            self._start(job, nodes)

    def may_start(self, job: Job) -> list[str]:
        """Return free nodes for a job that waits; none if they are too few."""
        busy = {node for one in self.jobs for node in one.nodes}
        free = [node for node in self.nodes if node not in busy]
        count = int(job.options.get("nodes", 1))
        may = job.state == "PENDING" and not job.is_held and len(free) >= count
        return free[:count] if may else []

    def _start(self, job: Job, nodes: list[str]) -> None:
        job.nodes, job.state, job.steps = nodes, "RUNNING", {}
        own = {"JOB_ID": job.number, "JOB_NUM_NODES": len(nodes), "JOB_NODELIST": ",".join(nodes)}
        own |= {"CPUS_ON_NODE": 2, "RESTART_COUNT": job.restarts, "SUBMIT_DIR": job.folder}
        if job.array:
            own |= {"ARRAY_JOB_ID": job.array[0], "ARRAY_TASK_ID": job.array[1]}
        variables = {f"SLURM_{name}": str(value) for name, value in own.items()}
        with job.log.open("ab") as log:
            job.batch = subprocess.Popen(
                ["bash", str(self._spooled(job.number)), *job.words],
                env=job.environment | variables,
                cwd=job.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _spooled(self, number: int) -> Path:
        return self.folder / "spool" / f"{number}.sh"

    def _kill(self, job: Job) -> None:
        for pid in job.pids:
            _signal(pid, signal.SIGKILL)
        job.steps = {}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        answer = server.answer(*json.loads(self.rfile.readline()))
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def _signal(pid: int, number: int) -> None:
    """Signal a process; one that is srun with its tasks."""
    with contextlib.suppress(ProcessLookupError, psutil.Error):
        tasks = psutil.Process(pid).children() if number == signal.SIGKILL else []
        for one in (pid, *(task.pid for task in tasks)):
            os.kill(one, number)
