"""Inject random faults into a run on a real Slurm cluster and check that nothing is lost.

    python -m bench.stress.chaos [--faults 20] [--seed 1]       (make chaos)

Two CPU nodes train TorchTitan's debug model. Every step must have the loss of an undisturbed run to
the last printed digit, and a fault may cost at most one checkpoint interval, or two if it spoils a
checkpoint.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.stress.chaos_faults import FAULTS, SPOILING
from bench.stress.chaos_run import INTERVAL, Run, chaos_cluster, start_run, until
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table
from cookbook.run.folder import Attempt
from cookbook.run.status import read_attempt_end

_ATTEMPT_S = 300.0


@dataclass(frozen=True)
class Planned:
    """A fault, and how many new steps the run makes before it."""

    name: str
    steps: int


@dataclass(frozen=True)
class Survived:
    """What a fault cost: seconds until it was seen, and from then to the next torchrun."""

    name: str
    step: int
    seen: float | None
    overhead: float | None
    repeated: int
    cause: str


def plan(count: int, seed: int) -> list[Planned]:
    """Return faults in a random order, each kind once before any repeats."""
    chance = random.Random(seed)
    names: list[str] = []
    while len(names) < count:
        names += chance.sample(sorted(FAULTS), len(FAULTS))
    # At least an interval, so that there is a checkpoint to lose.
    return [Planned(name, INTERVAL + chance.randrange(INTERVAL)) for name in names[:count]]


def survive(run: Run, planned: Planned, chance: random.Random) -> Survived:
    """Wait for the planned step, inject the fault, and wait until the run trains again."""
    goal = run.furthest() + planned.steps
    until(lambda: run.furthest() >= goal, _ATTEMPT_S, f"step {goal}, before: {planned.name}")
    until(lambda: len(run.whole_checkpoints()) > 0, 60, "a checkpoint")
    fault, attempt = FAULTS[planned.name], run.attempt
    injected = fault.inject(run, chance)
    newest = int(run.whole_checkpoints()[0].name.removeprefix("step-"))
    last = max(run.losses(attempt))
    if not fault.ends_attempt:
        until(lambda: max(run.losses(attempt)) > last + 2, _ATTEMPT_S, planned.name)
        assert run.attempt.number == attempt.number
        return Survived(planned.name, last, None, None, 0, "-")

    def trained() -> list[Attempt]:
        # On a full disk an attempt may end before its first step.
        return [one for one in run.cell.attempts()[attempt.number + 1 :] if run.losses(one)]

    until(lambda: bool(trained()), 2 * _ATTEMPT_S, f"a step after: {planned.name}")
    following, end = trained()[0], read_attempt_end(attempt)
    # A full disk may have no room to record the end.
    if end is None and planned.name != "disk full in a save":
        raise TimeoutError(f"{planned.name}: attempt {attempt.number} has no end in its folder")
    last, first = max(run.losses(attempt)), min(run.losses(following))
    if first <= newest:
        raise TimeoutError(
            f"{planned.name}: step-{newest} was whole, and step {first} came after it"
        )
    # Slurm's own time passes before it starts the job again.
    noticed, ended = (end.seen, end.ended) if end else (None, None)
    seen = run.started() if fault.by_slurm else noticed or ended
    launched = max(path.stat().st_mtime for path in following.path.glob("ranks/*/attempt_0"))
    return Survived(
        planned.name,
        last,
        None if fault.by_slurm or noticed is None else noticed - injected,
        None if seen is None else launched - seen,
        last - first + 1,
        f"{end.cause}: {end.reason}" if end else "not recorded: the disk was full",
    )


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk to fill; nodes see it only if it is mounted before they start."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "chaos", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def check(run: Run, steps: int, expected: dict[int, str], faults: Sequence[Survived]) -> list[str]:
    """Return violations: lost or changed steps, repeated ones, an unfinished run."""
    wrong = []
    kept: dict[int, str] = {}
    for attempt in run.cell.attempts():
        for step, loss in run.losses(attempt).items():
            if step in kept and kept[step] != loss:
                wrong.append(f"step {step}: {loss} in attempt {attempt.number}, was {kept[step]}")
            kept[step] = loss
    wrong += [f"step {step} is missing" for step in range(1, steps + 1) if step not in kept]
    for step, loss in expected.items():
        if kept.get(step) != loss:
            wrong.append(f"step {step}: loss {kept.get(step)}, undisturbed {loss}")
    for one in faults:
        # A fault that spoils a checkpoint costs one more interval.
        most = INTERVAL * (2 if one.name in SPOILING else 1)
        if one.repeated > most:
            wrong.append(f"{one.name}: repeated {one.repeated} steps, more than {most}")
    words = (sys.executable, str(ROOT / "submit.py"), "report", str(run.folder), "--format=json")
    (cell,) = json.loads(run.cluster.run(*words, env={"VENV": sys.prefix}).stdout)["cells"]
    if cell["status"] != "finished" or cell["steps"] != steps:
        wrong.append(f"report: {cell['status']} at step {cell['steps']}: {cell['reason']}")
    return wrong


def table(survived: Sequence[Survived]) -> str:
    head = ["fault", "at step", "seen after s", "restart s", "steps repeated", "said"]
    rows = []
    for one in survived:
        times = [_seconds(one.seen), _seconds(one.overhead)]
        rows.append([one.name, str(one.step), *times, str(one.repeated), one.cause[:70]])
    return markdown_table(head, rows, "lrrrrl")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def chaos(faults: Sequence[Planned], seed: int, folder: Path) -> tuple[list[Survived], list[str]]:
    """Run without faults and with them; return their cost and violations."""
    # The run trains on while a fault is injected and noticed.
    steps = sum(one.steps + 2 for one in faults) + 3
    chance = random.Random(seed)
    survived: list[Survived] = []
    with small_disk(folder / "disk") as disk, chaos_cluster(folder / "slurm") as cluster:
        began = time.monotonic()
        undisturbed = start_run(cluster, folder / "undisturbed", steps, saves=False)
        cluster.wait(undisturbed.job_id, limit_s=120 + 20 * steps)
        expected = undisturbed.losses(undisturbed.attempt)
        print(f"undisturbed: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)
        run = start_run(cluster, disk, steps)
        for number, planned in enumerate(faults, 1):
            survived.append(survive(run, planned, chance))
            print(f"{number}/{len(faults)} {survived[-1]}", flush=True)
        cluster.wait(run.job_id, limit_s=_ATTEMPT_S)
        return survived, check(run, steps, expected, survived)


def main() -> int:
    """Print the cost of each fault; return 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.stress.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=sorted(FAULTS), default=None)
    arguments = parser.parse_args()
    faults = plan(arguments.faults, arguments.seed)
    if arguments.only:
        faults = [Planned(name, INTERVAL + 2) for name in arguments.only]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        survived, wrong = chaos(faults, arguments.seed, Path(folder))
    print(table(survived))
    print(f"seed {arguments.seed}, {time.monotonic() - began:.0f} s")
    for one in wrong:
        print(f"WRONG: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
