"""The convergence experiment: tries it out, times it, runs it, and judges it. docs/convergence.md

    python -m bench.gpu_convergence plan                               # the rule's power and errors
    python -m bench.gpu_convergence rehearse OUT --text T --results R  # how many steps fit
    python -m bench.gpu_convergence session OUT --text T --results R   # the next runs
    python -m bench.gpu_convergence collect R/convergence.tar.gz       # into docs/convergence
    python -m bench.gpu_convergence judge                              # when all runs are there

T is a folder with Python sources, R one for what is brought home. `session` starts the training in
the background, waits for --seconds and packs what is finished; called again, it waits on. On one
GPU the ranks of an arm that needs two `--share` it; `--beside` is how many ranks a GPU has. With
`--trial --data FOLDER` before the command's name, each tries itself out with a debug model, also
on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench import convergence_first, convergence_page, convergence_power
from bench.convergence_curves import DATA, FIRST, Curves, read_arms, write_arms
from bench.convergence_plan import ARMS, REGISTERED, TRIAL, Experiment, run_name
from bench.convergence_rehearsal import STEPS_FILE, choose_steps, rehearse, write_steps
from bench.convergence_runs import (
    CURVES,
    FINISHED,
    RECORD,
    Place,
    done_in,
    read_curve,
    read_records,
    train,
)
from bench.convergence_text import make_text
from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT

ARCHIVE = "convergence.tar.gz"
_TRAINER = "trainer.pid"
_LOG = "trainer.log"
_OF_LONGEST = 0.7


def chosen_steps(data: Path) -> dict[str, Any]:
    """What the rehearsal chose, as committed."""
    path = data / STEPS_FILE
    if not path.is_file():
        raise InputError(str(path), "is not there", "run: rehearse, and commit what it writes")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def time_steps(
    experiment: Experiment, place: Place, besides: Sequence[int], seconds: float, results: Path
) -> None:
    """Write how many steps fit to `results`."""
    try:
        found = {n: rehearse(experiment, replace(place, beside=n), seconds) for n in besides}
    finally:
        _pack_logs(place.out, results)
    if experiment is REGISTERED and (
        lacking := {one.name for one in ARMS} - set(found[besides[0]])
    ):
        raise InputError("rehearse", f"{', '.join(sorted(lacking))} cannot run here")
    chosen = choose_steps(experiment, found, max(1, len(place.gpus))) | {"text": place.text}
    write_steps(chosen, results / STEPS_FILE)
    print({key: value for key, value in chosen.items() if key != "paces"})


def _pack_logs(out: Path, results: Path) -> None:
    """What the trainings said, where one failed: its machine may be gone soon."""
    logs = sorted(out.glob("runs/*/attempt-*/train.log"))
    results.mkdir(parents=True, exist_ok=True)
    with tarfile.open(results / "logs.tar.gz", "w:gz") as archive:
        for log in logs:
            archive.add(log, log.relative_to(out))


def make_runs(
    experiment: Experiment,
    out: Path,
    text: Path | None,
    data: Path,
    seconds: float,
    *,
    beside: int | None = None,
    shares: bool = False,
) -> None:
    """Make the next runs in their order.

    Args:
        beside: ranks a GPU; as many as in the rehearsal where None.
        shares: ranks of a run share a GPU where there are too few.
    """
    chosen = chosen_steps(data)
    place = Place.here(out, make_text(out / "assets", text), beside or chosen["beside"], shares)
    if place.text != chosen["text"]:
        raise InputError(
            str(text or "Python's own sources"),
            "are not those of the rehearsal",
            f"give the folder that {data / STEPS_FILE} was made with",
        )
    # The last runs of a session have the GPUs to themselves, and are faster than they were timed.
    least = min(_OF_LONGEST * chosen["longest_run"], seconds)
    left = train(experiment.plan(chosen["steps"]), place, data, seconds, least)
    print(f"{left} runs left", flush=True)


def session(out: Path, words: Sequence[str], results: Path, seconds: float) -> None:
    """See that the trainer runs, wait for it, and pack what is finished.

    Args:
        words: this program's, for `train`, which goes on between the commands of a machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    pid = out / _TRAINER
    if not _is_alive(pid):
        command = [sys.executable, "-m", "bench.gpu_convergence", *words]
        with (out / _LOG).open("ab") as log:
            # A session of its own, which the end of this command leaves alone.
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        write_whole(pid, f"{process.pid} {psutil.Process(process.pid).create_time()}")
    until = time.monotonic() + seconds
    while _is_alive(pid) and time.monotonic() < until:
        time.sleep(1)
    pack(out, results)
    running = "goes on" if _is_alive(pid) else "has ended"
    print((out / _LOG).read_text(encoding="utf-8", errors="replace"), end="")
    print(f"{len(done_in(out))} runs finished; the training {running}")


def _is_alive(pid: Path) -> bool:
    """Whether that very process runs: its number may be another's by now."""
    try:
        number, began = pid.read_text(encoding="utf-8").split()
        process = psutil.Process(int(number))
        is_it: bool = process.create_time() == float(began)
        return is_it and bool(process.status() != psutil.STATUS_ZOMBIE)
    except (OSError, ValueError, psutil.Error):
        return False


def pack(out: Path, results: Path) -> None:
    """Curves, records and the trainer's log in one archive, since few files may come back."""
    results.mkdir(parents=True, exist_ok=True)
    with tarfile.open(results / ARCHIVE, "w:gz") as archive:
        for name in (CURVES, RECORD, _LOG):
            if (out / name).exists():
                archive.add(out / name, name)


def collect(source: Path, data: Path) -> int:
    """Add a session's runs to `data`; what is there already stays. Return how many were added.

    Args:
        source: an archive of `pack`, or the folder of the runs.
    """
    if source.is_file():
        # What came from another machine may lie in a folder that cannot be written to.
        with tempfile.TemporaryDirectory() as folder, tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
            return collect(Path(folder), data)
    records, there = read_records(data), read_arms(data)
    new = [one for one in read_records(source) if one not in records]
    if len({(one["text"], one["steps"]) for one in records + new}) > 1:
        raise InputError(str(source), "its runs have another text or number of steps")
    added: Curves = {
        key: read_curve(source / CURVES / f"{run_name(*key)}.csv")
        for one in new
        if one["result"] == FINISHED and (key := (one["arm"], one["seed"])) not in there
    }
    write_arms({**there, **added}, data)
    write_whole(data / RECORD, json.dumps(records + new, indent=1) + "\n")
    return len(added)


def main() -> int:
    """Take one step of the experiment."""
    given = _parser().parse_args()
    experiment = TRIAL if given.trial else REGISTERED
    try:
        _take(given, experiment)
    except InputError as error:
        _parser().error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trial", action="store_true", help="a debug model, to try it out")
    parser.add_argument("--data", type=Path, default=DATA, help="default: docs/convergence")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan")
    for name in ("rehearse", "train", "session"):
        command = commands.add_parser(name)
        command.add_argument("out", type=Path)
        command.add_argument("--text", type=Path)
        if name != "train":
            command.add_argument("--results", type=Path, required=True)
    commands.choices["rehearse"].add_argument("--beside", type=int, nargs="+", default=[4])
    commands.choices["rehearse"].add_argument("--seconds", type=float, default=200)
    for name in ("train", "session"):
        commands.choices[name].add_argument("--beside", type=int, metavar="RANKS")
        commands.choices[name].add_argument("--share", action="store_true")
    commands.choices["train"].add_argument("--seconds", type=float, required=True)
    commands.choices["session"].add_argument("--seconds", type=float, default=560)
    commands.choices["session"].add_argument("--until", type=float, default=1440)
    commands.add_parser("collect").add_argument("archive", type=Path)
    judged = commands.add_parser("judge")
    judged.add_argument("--closed", default="", metavar="REASON", help="judge what there is")
    return parser


def _take(given: argparse.Namespace, experiment: Experiment) -> None:
    data: Path = given.data.resolve()
    if given.command == "plan":
        write_whole(data / "power.md", convergence_power.render())
        write_whole(FIRST / "again.md", convergence_first.render())
    elif given.command == "judge":
        convergence_page.write(data, experiment.plan(chosen_steps(data)["steps"]), given.closed)
    elif given.command == "collect":
        print(f"{collect(given.archive, data)} runs added to {data}")
    elif given.command == "rehearse":
        out = given.out.resolve()
        place = Place.here(out, make_text(out / "assets", given.text), 1)
        time_steps(experiment, place, given.beside, given.seconds, given.results)
    elif given.command == "train":
        make_runs(
            experiment,
            given.out.resolve(),
            given.text,
            data,
            given.seconds,
            beside=given.beside,
            shares=given.share,
        )
    else:
        words = ["--trial"] if given.trial else []
        words += ["--data", str(data), "train", str(given.out.resolve())]
        words += ["--seconds", str(given.until), *(["--share"] if given.share else [])]
        words += ["--beside", str(given.beside)] if given.beside else []
        words += ["--text", str(given.text.resolve())] if given.text else []
        session(given.out.resolve(), words, given.results, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
