"""Random histories of what users and clusters do to jobs, against a model of a page.

    make lifecycle        (300 new histories; LIFECYCLE_HISTORIES=1000 for more)

A failure is shrunk to a short list of calls, to be kept in _KEPT. Slurm and torchrun are stand-ins,
so that a history costs seconds; all between them is the cookbook's own.
"""

import contextlib
import io
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from cookbook.cli.main import main
from cookbook.observe.metrics import collect_steps, read_steps
from cookbook.run import slurm
from cookbook.run.folder import CellFolder
from cookbook.run.run import find_run
from cookbook.run.states import cell_states
from cookbook.run.status import Cause, read_attempt_end, read_job, read_status
from cookbook.supervise.exits import RULES
from tests.checkout import copy_checkout
from tests.lifecycle_slurm import AWAY, Job, Scheduler
from tests.programs import write_program
from tests.saved import save
from tests.slurm_cluster import CPU_NODES
from tests.submit import ROOT, environment

STEPS = 12
# What waits for minutes in a real job waits for moments here; a hang is one where the test says so.
_SITE = """
import contextlib, os, sys
from pathlib import Path
if "cookbook.supervise" in sys.orig_argv:
    from cookbook.config.cluster import Cluster
    from cookbook.supervise import attempt, supervisor
    Cluster.late_seconds = property(lambda self: 1.5)
    attempt._POLL_S, attempt._GRACE_S = 0.05, 0.3
    supervisor._POLL_S, supervisor._PREEMPTED_S, supervisor._REQUEUE_S = 0.1, 0.1, 10.0
    nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
    faults = [Path({life!r}, f"fault-{{node}}") for node in nodes]
    def limit(clock):
        for fault in faults:
            with contextlib.suppress(OSError):
                if fault.read_text() == "hang":
                    return 0.5
        return 1e9
    attempt.StepClock.limit = property(limit)
"""
_SAYS = {"PENDING": "queued", "COMPLETED": "finished"}
_OPTIONS = ("--nodes=2", "--set", f"training.steps={STEPS}", "--set", "checkpoint.enable=true")
_FAULTS = ("rank", "hang", "nan", "disk")
_BY_SLURM = ("requeue", "preempt", "node failure")
# These need a Slurm that answers.
_ASKS = ("grace", "short grace", "TERM", "hold", "USR1", "USR2", "slow save", "kill", "cancel")
_EVENTS = [*_FAULTS, *_BY_SLURM, *_ASKS]
_RESUMES = [(), ("--nodes=1",), ("--nodes=3",), ("--set", "checkpoint.keep_latest_k=5")]
_HALF = "import a_file_that_the_pull_has_not_brought_yet\n"


def until(is_true: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := is_true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(done)


class History:
    """A user, a cluster of a few nodes, and a job of somebody else whose step is named as ours."""

    def __init__(self) -> None:
        self.life = Path(tempfile.mkdtemp(prefix="life-"))
        save(self.life, 0).rename(self.life / "template")
        self.profile = self.life / "two.yaml"
        self.profile.write_text(f"{CPU_NODES}nodes: 2\n")
        self.checkout = copy_checkout(self.life / "checkout")
        (self.checkout / "assets").symlink_to(ROOT / "assets")
        (self.life / "site").mkdir()
        (self.life / "site/sitecustomize.py").write_text(_SITE.format(life=str(self.life)))
        self.slurm = Scheduler(self.life / "slurm", num_nodes=5)
        stand_in = Path(__file__).with_name("lifecycle_torchrun.py")
        for name, words in (("python", ""), ("torchrun", f"-IS {stand_in}")):
            text = f'#!/bin/bash\nexec {sys.executable} {words} "$@"\n'
            write_program(self.life / "venv/bin" / name, text)
        own = {"LIFE": str(self.life), "VENV": str(self.life / "venv"), "COOKBOOK_PREFLIGHT": "off"}
        own |= {"PATH": f"{self.slurm.programs}:{os.environ['PATH']}"}
        own |= {"PYTHONPATH": str(self.life / "site")}
        self.variables = environment(self.life / "runs") | own
        self.kept, self.away = list[Path](), list[CellFolder]()
        self.pace(0)

    def begin(self) -> None:
        other, script = self.life / "other.sh", self.life / "train.sh"
        words = "srun --nodelist=worker-0 --job-name=attempt-0 sleep 1000"
        other.write_text(f"#!/bin/bash\n{words}\n")
        self.sbatch(str(other))
        assert until(lambda: self.slurm.jobs[0].steps)
        self.user("render", "debug", "--cluster", self.profile, *_OPTIONS, "-o", script)
        # A user's own copy, whose elements train cells of their own.
        own = 'export CELL_DIR="${COOKBOOK_RUNS}/mine/cell-${SLURM_ARRAY_TASK_ID:-0}"'
        text = script.read_text().replace("set -euo pipefail\n", f"set -euo pipefail\n{own}\n")
        script.write_text(text)

    def user(self, *words: str | Path, allowed: tuple[int, ...] = (0,)) -> str:
        """Call `submit.py WORDS`, which may end with the `allowed` statuses; what it says."""
        slurm.node_groups.cache_clear()
        with (
            io.StringIO() as out,
            patch.dict(os.environ, self.variables, clear=True),
            patch.object(sys, "prefix", self.variables["VENV"]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            status = main([str(word) for word in words])
            assert status in allowed and "Traceback" not in out.getvalue(), out.getvalue()
            return out.getvalue()

    def sbatch(self, *words: str) -> None:
        own = self.variables | {"COOKBOOK_ROOT": str(self.checkout)}
        self.slurm.answer("sbatch", [*words], own, str(self.life), 0)

    def pace(self, steps: int) -> None:
        self.allowed = steps
        (self.life / "pace").write_text(str(steps))

    @property
    def cells(self) -> list[CellFolder]:
        found = sorted((self.life / "runs").glob("[!.]*/*/cell.yaml"))
        return [CellFolder(path.parent) for path in found]

    def running(self) -> list[tuple[CellFolder, Job]]:
        known = [(cell, read_job(cell)) for cell in self.cells]
        jobs = [(cell, self.slurm.job(job.job_id)) for cell, job in known if job]
        return [(cell, job) for cell, job in jobs if job and job.state == "RUNNING" and job.steps]

    def is_settled(self) -> bool:
        """Whether each job trains as far as it may, waits for nodes or has ended."""
        trains = {job.number: cell for cell, job in self.running()}
        for job in self.slurm.jobs[1:]:
            if job.state == "RUNNING" and (cell := trains.get(job.number)):
                attempt = cell.attempts()[-1]
                loads = [int(one.read_text()) for one in attempt.path.glob("loads-*")]
                made = max([*loads, *(one.step for one in read_steps(attempt))], default=0)
                if len(loads) < len(job.nodes) or made < min(self.allowed, STEPS) or made == STEPS:
                    return False
            elif job.state in ("RUNNING", "COMPLETING") or self.slurm.may_start(job):
                return False
        return True

    def settle(self) -> None:
        if self.slurm.away:
            time.sleep(0.5)
        else:
            assert until(self.is_settled), f"no job moves:\n{self.slurm}"

    def submits_by_the_driver(self) -> None:
        if len(self.cells) < 3:
            words = ("run", "debug", "--detach", "--cluster", self.profile, *_OPTIONS)
            allowed = 1 if self.slurm.away else 0
            self.user(*words, allowed=(2 if "half" in self.profile.read_text() else allowed,))
            self.settle()

    def submits_by_sbatch(self, array: bool) -> None:
        """Submit into the same folders each time."""
        self.sbatch(*["--array=0-1"] * array, str(self.life / "train.sh"), "--metrics.log_freq=1")
        self.settle()

    def trains(self, steps: int) -> None:
        self.pace(self.allowed + steps)
        self.settle()

    def happens(self, pick: int, event: str) -> None:
        """Let something happen to a running job; what Slurm does to it counts against nobody."""
        if not (found := self.running()) or (self.slurm.away and event in _ASKS):
            return
        cell, job = found[pick % len(found)]
        attempt, batch = cell.attempts()[-1], job.batch.pid if job.batch else 0
        fault = self.life / f"fault-{job.nodes[0 if event in ('nan', 'disk') else -1]}"
        slow = self.life / "fault-save"
        if event in _FAULTS or event in _ASKS[:7]:
            self.pace(self.allowed + 1)
        if event in _FAULTS:
            fault.write_text(event)
        elif event in ("grace", "short grace", "TERM"):
            slow.write_text("slow" * (event == "short grace"))
            job.preempted = event != "TERM"
            self.slurm.terminate(job)
            if event == "short grace":
                assert until((attempt.path / "stop").exists)
                self.slurm.stop(job, "preempt")
                assert until(lambda: job.batch is None or job.state == "RUNNING")
            slow.write_text("")
        elif event in _BY_SLURM:
            self.slurm.stop(job, event)
        elif event == "hold":
            job.is_held = True
            self.slurm.stop(job, "requeue")
        elif event == "kill":
            psutil.Process(batch).children()[0].kill()
            assert until(lambda: cell.attempts()[-1] != attempt), "nobody took over"
        elif event == "cancel":
            assert cell.name in self.user("cancel", cell.path.parent)
        else:
            slow.write_text("slow" * (event == "slow save"))
            os.kill(batch, signal.SIGUSR2 if event == "USR2" else signal.SIGUSR1)
            time.sleep(2.2 * (event == "slow save"))
            slow.write_text("whole" * (event == "slow save"))  # and then slow to end
            assert until(lambda: job.restarts > 0 or job.state != "RUNNING", 10), "no requeue"
            slow.write_text("")
        assert until(attempt.end.exists), f"{attempt.path} does not end:\n{self.slurm}"
        fault.unlink(missing_ok=True)
        self.settle()
        end = read_attempt_end(attempt)
        if event in ("requeue", "preempt", "short grace", "hold", "grace", "USR1", "USR2"):
            assert end and not RULES[end.cause].is_counted, end
        if event in ("TERM", "disk"):
            cause = Cause.DISK_FULL if event == "disk" else Cause.DEAD_RANK
            assert end and end.cause in (cause, Cause.FINISHED), end
        if event in ("grace", "USR1", "USR2", "slow save"):
            assert end and end.cause in (Cause.SAVED, Cause.TOO_LATE, Cause.FINISHED), end
            assert job.state in ("RUNNING", "PENDING", "COMPLETED"), f"ends early: {job.state}"

    def slurm_is_away(self, away: str) -> None:
        self.slurm.away = away
        self.settle()

    def jobs_that_wait_are_held(self) -> None:
        for job in self.slurm.jobs:
            job.is_held = job.state == "PENDING" and not job.is_held
        self.settle()

    def half_a_pull(self) -> None:
        """Break what jobs would read of the checkout, or mend it."""
        for path in (self.profile, self.checkout / "cookbook/supervise/supervisor.py"):
            text, half = path.read_text(), f"{_HALF}half: [\n"
            path.write_text(text.removeprefix(half) if text.startswith(half) else half + text)

    def resumes(self, pick: int, how: tuple[str, ...] = ()) -> None:
        for cell in self.cells[pick : pick + 1]:
            self.user("run", "--detach", "--resume", cell.path, *how, allowed=(0, 1, 2))
            self.settle()

    def the_user_does(self, pick: int, what: str) -> None:
        """Copy or move checkpoints, delete a run, or have half of the nodes see old folders."""
        for cell in self.cells[pick : pick + 1]:
            saved = [*cell.path.glob("checkpoint/step-*[0-9]")]
            if what == "delete":
                self.deletes(cell.path.parent)
            elif what == "copy" and saved:
                copy = saved[0].with_name(f"{saved[0].name}-keep")
                self.kept.append(shutil.copytree(saved[0], copy, dirs_exist_ok=True))
            elif what == "move" and saved and cell not in [one for one, _ in self.running()]:
                saved[0].parent.rename(cell.path / "away")
                self.away.append(cell)
            elif what == "stale":
                for node in self.slurm.nodes[pick % 2 :: 2]:
                    steps = " ".join(path.name[5:] for path in saved)
                    (self.life / f"stale-{node}").write_text(steps)

    def deletes(self, run: Path) -> None:
        """Delete a run, also under its jobs, which then end."""
        self.kept = [path for path in self.kept if run not in path.parents]
        self.away = [cell for cell in self.away if run != cell.path.parent]
        while run.exists():
            shutil.rmtree(run, ignore_errors=True)
        self.pace(self.allowed + 1)
        if not self.slurm.away:
            self.settle()
        # Ranks may have saved once more.
        shutil.rmtree(run, ignore_errors=not run.exists())

    def nothing_is_wrong(self) -> None:
        wrong, other = self.life / "wrong", self.slurm.jobs[:1]
        assert not wrong.exists(), wrong.read_text()
        assert all(job.state == "RUNNING" and job.steps for job in other), "another's job ended"
        away = [cell.path / "checkpoint" for cell in self.away]
        assert all(path.exists() or path.parent in away for path in self.kept), "a copy is gone"
        for cell in self.cells:
            has_saved, loaded = False, set[str]()
            for attempt in cell.attempts():
                loaded = {path.read_text() for path in attempt.path.glob("loads-*")}
                assert len(loaded) < 2, f"{attempt.path}: nodes load the steps {loaded}"
                assert not (has_saved and loaded == {"0"}), f"{attempt.path} begins anew"
                has_saved |= attempt.log.exists() and "Finished saving" in attempt.log.read_text()
            assert not loaded or cell.latest.readlink().name == cell.attempts()[-1].path.name
            made = collect_steps(cell)
            kept = [(one.step, one.loss) for one in made if not math.isnan(one.loss or 0)]
            assert kept == [(step, float(step)) for step in range(1, len(kept) + 1)], cell
        assert self.slurm.away or until(lambda: not self.lies(), 5), self.lies()

    def lies(self) -> list[str]:
        """Where `status` says something else than Slurm."""
        runs, found = {str(cell.path.parent) for cell in self.cells}, list[str]()
        with patch.dict(os.environ, self.variables, clear=True):
            states = [one for run in runs for one in cell_states(find_run(run))]
        for one in states:
            job = self.slurm.job(one.job_id)
            if job and one.state != _SAYS.get(job.state, job.state.lower()):
                found.append(f"{one.cell} {one.state} ({one.reason}), job {job.name} {job.state}")
        for job in self.slurm.jobs[1:] if self.cells else ():
            if job.state == "PENDING" and not job.restarts and job.script.name == "train.sh":
                line = f"by sbatch {job.script} --metrics.log_freq=1: job {job.name}"
                found += [line] * (line not in self.user("status"))
        return found

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.all_goes_on()
        finally:
            self.slurm.close()
            shutil.rmtree(self.life, ignore_errors=True)

    def all_goes_on(self) -> None:
        """Heal the cluster, follow the remedy for what has ended, and see each cell finish."""
        self.slurm.away = ""
        if "half" in self.profile.read_text():
            self.half_a_pull()
        for job in self.slurm.jobs:
            job.is_held = False
        for cell in self.away:
            if (cell.path / "away").exists():
                shutil.rmtree(cell.path / "checkpoint", ignore_errors=True)
                (cell.path / "away").rename(cell.path / "checkpoint")
        self.pace(STEPS)
        self.settle()
        for cell in self.cells:
            if read_status(cell).state != "finished":
                self.user("run", "--detach", "--resume", cell.path)
        self.settle()
        self.nothing_is_wrong()
        for cell in self.cells:
            made = collect_steps(cell)
            assert (read_status(cell).state, made[-1].step) == ("finished", STEPS), cell
        assert all(job.state not in ("RUNNING", "PENDING") for job in self.slurm.jobs[1:])


Call = tuple[str, dict[str, Any]]
_PICK = range(6)
_CALLS: dict[str, dict[str, Sequence[Any]]] = {
    "submits_by_the_driver": {},
    "submits_by_sbatch": {"array": (False, True)},
    "trains": {"steps": range(1, 6)},
    "happens": {"pick": _PICK, "event": _EVENTS},
    "slurm_is_away": {"away": ("", *AWAY)},
    "jobs_that_wait_are_held": {},
    "half_a_pull": {},
    "resumes": {"pick": _PICK, "how": _RESUMES},
    "the_user_does": {"pick": _PICK, "what": ("copy", "move", "stale", "delete")},
}
_OFTEN = (4, 3, 3, 9, 1, 1, 1, 2, 3)


def history(seed: int) -> list[Call]:
    chance = random.Random(seed)
    names = chance.choices([*_CALLS], _OFTEN, k=chance.randint(3, 10))
    return [(name, {of: chance.choice(_CALLS[name][of]) for of in _CALLS[name]}) for name in names]


def play(calls: Sequence[Call]) -> None:
    state = History()
    try:
        state.begin()
        for act, words in calls:
            getattr(state, act)(**words)
            state.nothing_is_wrong()
    finally:
        state.teardown()


def fault_of(calls: Sequence[Call]) -> BaseException | None:
    try:
        play(calls)
    except Exception as fault:
        return fault
    return None


_FIRST, _COUNT = (
    int(os.environ.get(f"LIFECYCLE_{n}", d)) for n, d in (("SEED", 0), ("HISTORIES", 10))
)


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT))
def test_a_history(seed: int) -> None:
    calls = history(seed)
    if (fault := fault_of(calls)) is None:
        return
    for place in reversed(range(len(calls))):
        shorter = [*calls[:place], *calls[place + 1 :]]
        if found := fault_of(shorter):
            calls, fault = shorter, found
    raise AssertionError("\n".join(["the history that fails:", *map(str, calls)])) from fault


def _event(name: str, pick: int = 0) -> Call:
    return "happens", {"event": name, "pick": pick}


def _user(what: str) -> Call:
    return "the_user_does", {"what": what, "pick": 0}


# Short histories that show a fault each time.
_ONE, _ARRAY = ("submits_by_sbatch", {"array": False}), ("submits_by_sbatch", {"array": True})
_TRAINS = ("trains", {"steps": 4})
_KEPT: dict[str, list[Call]] = {
    "stale": [_ONE, _TRAINS, _user("stale"), _event("requeue")],
    "slow": [_ONE, _event("slow save")],
    "moved": [_ONE, _TRAINS, _event("cancel"), _user("move"), _ONE],
    "together": [_ONE, _TRAINS, _ONE],
    "killed": [_ONE, _TRAINS, _event("kill")],
    "asked": [_ONE, _TRAINS, _event("USR2")],
    "grace": [_ONE, _TRAINS, _event("grace"), _event("short grace"), _event("TERM")],
    "held": [_ONE, _TRAINS, _event("hold"), ("jobs_that_wait_are_held", {})],
    "full": [_ONE, _TRAINS, _event("disk")],
    "pulled": [_ONE, _TRAINS, ("half_a_pull", {}), _event("requeue"), _ONE],
    "deleted": [_ARRAY, _TRAINS, _user("delete"), _ARRAY],
    "resized": [_ONE, _TRAINS, _event("cancel"), ("resumes", {"pick": 0, "how": _RESUMES[2]})],
    "copied": [_ONE, _event("USR2"), _user("copy")],
    "array": [_ARRAY, _TRAINS, _event("hang", pick=1)],
    "pending": [_ARRAY, _ONE],
    "cancelled": [_ONE, _event("cancel")],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", _KEPT)
def test_a_history_once_more(name: str) -> None:
    play(_KEPT[name])
