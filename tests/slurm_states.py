"""Brings the jobs of runs into every state that a Slurm job can be in, side by side.

One run for each state. A shell script stands in for each training; all else is real.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cookbook.base.yamlfile import Words
from cookbook.config.cell import Cell
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.run import Run
from cookbook.run.states import cancel_run, cell_states
from cookbook.run.status import read_job
from tests.cells import Point
from tests.made_up_run import metrics_line
from tests.programs import set_command, write_program
from tests.slurm_cluster import CPU_NODES, Settings, SlurmCluster
from tests.waiting import until

LOG_LINE = metrics_line(3).strip()
# A machine with much to do needs longer than usual to start a job, and to let it say a last word.
SETTINGS = Settings(requeue_delay=300, kill_wait=60)
_LOST_NODE = "worker-2"
_SPEAKS = f"""\
mkdir -p "${{CELL_DIR}}/attempt-0"
echo '{LOG_LINE}' >"${{CELL_DIR}}/attempt-0/train.log"
step='{{"step": 3, "loss": 3.5, "grad_norm": 1.0, "time": %s}}\\n'
printf "${{step}}" "$(date +%s)" >"${{CELL_DIR}}/attempt-0/metrics.jsonl"
"""
_TRAINS = f"{_SPEAKS}exec sleep 600\n"
# What a cluster does before and after a job, which takes long for those of these names.
_SITE = {
    "PrologSlurmctld": """\
case "${SLURM_JOB_NAME}" in
  starting*) exec sleep 600 ;;
  prolog*) touch "%s/prolog-${SLURM_JOB_ID}" ;;
  completing*) touch "%s/epilog-${SLURM_JOB_ID}" ;;
esac
""",
    "Prolog": '[ ! -e "%s/prolog-${SLURM_JOB_ID}" ] || exec sleep 600\n',
    "Epilog": '[ ! -e "%s/epilog-${SLURM_JOB_ID}" ] || exec sleep 600\n',
}


@dataclass(frozen=True)
class _Plan:
    """How a state comes about: what the job runs, its sbatch options, and what is done to it."""

    body: str = _TRAINS
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)
    requeue: bool = True
    act: Callable[[SlurmCluster, Run, str], object] | None = None
    # Whether somebody asks for its state while Slurm still knows the job.
    is_seen: bool = True
    until: str = "RUNNING"


def _scancel(cluster: SlurmCluster, run: Run, job: str) -> None:
    cluster.run("scancel", job)


def _by_owner(cluster: SlurmCluster, run: Run, job: str) -> None:
    assert cancel_run(run) == [cell.name for cell in run.cells]


def _scontrol(*words: str) -> Callable[[SlurmCluster, Run, str], object]:
    return lambda cluster, run, job: cluster.run("scontrol", *(w.format(job=job) for w in words))


# Of a job that runs, Slurm takes a limit that is over already, and ends it at its next look.
_TIME_OUT = _scontrol("update", "JobId={job}", "TimeLimit=0")
_HELD: dict[str, str | bool] = {"hold": True}
_LOST: dict[str, str | bool] = {"nodelist": _LOST_NODE}
_ENDS_WELL, _ENDS_BADLY = f"{_SPEAKS}exit 0\n", f"{_SPEAKS}exit 2\n"

PLANS = {
    "timed out": _Plan(act=_TIME_OUT, until="TIMEOUT"),
    "timed out, unseen": _Plan(act=_TIME_OUT, until="TIMEOUT", is_seen=False),
    "pending": _Plan(sbatch=_HELD, until="PENDING"),
    "pending, away": _Plan(sbatch=_HELD, until="PENDING"),
    "starting": _Plan(until="CONFIGURING"),
    "prolog": _Plan(),
    "running": _Plan(),
    "running, away": _Plan(),
    "suspended": _Plan(act=_scontrol("suspend", "{job}"), until="SUSPENDED"),
    "completing, finished": _Plan(_ENDS_WELL, until="COMPLETING"),
    "completing, failed": _Plan(_ENDS_BADLY, until="COMPLETING"),
    "completing, cancelled": _Plan(act=_scancel, until="COMPLETING"),
    "requeued": _Plan(act=_scontrol("requeue", "{job}"), until="PENDING"),
    "requeued, held": _Plan(
        act=_scontrol("requeuehold", "State=SpecialExit", "{job}"), until="SPECIAL_EXIT"
    ),
    "node lost, requeued": _Plan(sbatch=_LOST, until="PENDING"),
    "node lost": _Plan(sbatch=_LOST, requeue=False, until="NODE_FAIL"),
    "node lost, unseen": _Plan(sbatch=_LOST, requeue=False, until="NODE_FAIL", is_seen=False),
    "cancelled by owner": _Plan(act=_by_owner, until="CANCELLED"),
    "cancelled by administrator": _Plan(act=_scancel, until="CANCELLED"),
    "cancelled, unseen": _Plan(act=_scancel, until="CANCELLED", is_seen=False),
    "cancelled, away": _Plan(act=_scancel, until="CANCELLED", is_seen=False),
    # Another user's.
    "cancelled before start": _Plan(
        sbatch=_HELD | {"uid": "65534"}, act=_scancel, until="CANCELLED"
    ),
    "cancelled before start, unseen": _Plan(
        sbatch=_HELD, act=_scancel, until="CANCELLED", is_seen=False
    ),
    "finished": _Plan(_ENDS_WELL, until="COMPLETED"),
    "failed": _Plan(_ENDS_BADLY, until="FAILED"),
    "failed, unseen": _Plan(_ENDS_BADLY, until="FAILED", is_seen=False),
}


def site_configuration(folder: Path) -> str:
    """The lines of slurm.conf for what the cluster does around jobs, whose programs it writes."""
    folder.mkdir()
    lines = ["DefMemPerNode=1000", "BatchStartTimeout=300"]
    for option, text in _SITE.items():
        program = folder / option
        write_program(program, f"#!/bin/sh\n{text.replace('%s', str(folder))}exit 0\n")
        lines.append(f"{option}={program}")
    return "\n".join(lines)


@dataclass
class States:
    """The runs by the name of their state, on a cluster that forgets jobs, or is away, when told.

    Attributes:
        when: "known", "gone" (Slurm has forgotten the ended jobs) or "away" (no slurmctld).
    """

    cluster: SlurmCluster
    runs: dict[str, Run]
    when: str = "known"

    def slurm_says(self, state: str) -> str:
        """Slurm's state of the job; a dash where it says nothing of it."""
        return self._all().get(self.job(state), "-") if self.when != "away" else "-"

    def job(self, state: str) -> str:
        """The job's id."""
        job = read_job(self.runs[state].cells[0])
        assert job is not None
        return job.job_id

    def bring(self, when: str) -> None:
        """Have Slurm forget what has ended, or answer no more."""
        if when == self.when:
            return
        assert when != "known", "what Slurm has forgotten does not come back"
        self.cluster.stop_controller()
        if when == "gone":
            conf = self.cluster.conf
            age = f"MinJobAge={SETTINGS.min_job_age}"
            assert age in conf.read_text()
            conf.write_text(conf.read_text().replace(age, "MinJobAge=2"))
            self.cluster.start_controller()
            ended = {"TIMEOUT", "NODE_FAIL", "CANCELLED", "COMPLETED", "FAILED"}
            until(lambda: not ended & set(self._all().values()), self._all)
        self.when = when

    def _all(self) -> dict[str, str]:
        shown = self.cluster.run("squeue", "--states=all", "--noheader", "--format=%A %T").stdout
        return dict(line.split() for line in shown.splitlines())


def one_node_cell(folder: Path) -> Cell:
    """The debug model on one node, by a profile in `folder`."""
    profile = folder / "one-node.yaml"
    profile.write_text(f"{CPU_NODES}nodes: 1\n")
    return Point("debug", "bf16", "standard", str(profile)).cell()


def prepare(cluster: SlurmCluster, cell: Cell) -> States:
    """A run in each state of `PLANS`."""
    states = States(cluster, {name: _started(cell, name, plan) for name, plan in PLANS.items()})
    until(lambda: not _silent(states), lambda: _silent(states))
    for name, plan in PLANS.items():
        if plan.act is not None:
            plan.act(cluster, states.runs[name], states.job(name))
    cluster.kill_node(_LOST_NODE)

    def others() -> dict[str, str]:
        said = {name: states.slurm_says(name) for name in PLANS}
        return {name: word for name, word in said.items() if word != PLANS[name].until}

    until(lambda: not others(), others)
    for name, plan in PLANS.items():
        if plan.is_seen:
            cell_states(states.runs[name])
    return states


def _started(cell: Cell, state: str, plan: _Plan) -> Run:
    # No other job may be where a node is lost.
    place = {} if plan.sbatch is _LOST else {"exclude": _LOST_NODE}
    words = Words({**plan.sbatch, **place})
    cluster = replace(cell.cluster, requeue=plan.requeue, sbatch=words)
    name = state.replace(", ", "-").replace(" ", "-")
    cells = [replace(cell, name=name, cluster=cluster)]
    run = create_run(name, cells)
    set_command(run.cells[0], plan.body)
    submit_run(run, cells)
    return run


def _silent(states: States) -> list[str]:
    started = [
        name
        for name, plan in PLANS.items()
        if "hold" not in plan.sbatch and name not in ("starting", "prolog")
    ]
    return [name for name in started if not states.runs[name].cells[0].attempt(0).log.exists()]
