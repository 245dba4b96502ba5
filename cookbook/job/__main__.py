"""In: what a script is about to train. Out: a check of it, and a run directory for `report`.

    python -m cookbook.job begin CELL_FOLDER --cell NAME ... -- TorchTitan's arguments
    python -m cookbook.job end CELL_FOLDER --exit-status N

Called by the rendered scripts themselves, so that one which is started by hand checks its words and
its layout before any rank starts, and can be reported like any other. Where a supervisor runs the
script, the run directory is there already, and the supervisor keeps it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.cells.cell import missing_packages
from cookbook.cells.layout_rules import layout_problems
from cookbook.cells.recipe import load_overlay, load_recipe, names_in
from cookbook.run.rundir import (
    FAILED,
    FINISHED,
    RUNNING,
    Status,
    attempts,
    read_status,
    run_record,
    write_job,
    write_run_record,
    write_status,
)
from cookbook.stack.stack import Stack, load_stack, parse_arguments


def begin(arguments: argparse.Namespace) -> None:
    """Check the arguments, and note the run where nobody else does."""
    stack = load_stack()
    options = parse_arguments(arguments.words, "TorchTitan arguments", stack)
    world = arguments.nodes * arguments.ranks_per_node
    for problem in layout_problems(stack, options, world):
        raise InputError(problem.option, problem.found, problem.remedy)
    for kind in ("precision", "ep_backend"):
        name = getattr(arguments, kind)
        if name not in names_in(kind):
            # A file of the user's own, which is known here by its name alone.
            continue
        for package in missing_packages(load_overlay(kind, name, stack)):
            raise InputError(name, f"{package} is not installed", "run: bash setup.sh")
    if not arguments.supervised:
        _write_run(arguments, options, stack)


def end(arguments: argparse.Namespace) -> None:
    """Note how the script ended."""
    status = read_status(arguments.folder)
    code = arguments.exit_status
    state, reason = (FINISHED, None) if code == 0 else (FAILED, f"exit status {code}")
    write_status(
        arguments.folder, Status(state, status.attempt, reason, code, status.started, time.time())
    )


def _write_run(arguments: argparse.Namespace, options: Mapping[str, Any], stack: Stack) -> None:
    folder: Path = arguments.folder
    write_status(folder, Status(RUNNING, len(attempts(folder)), started=time.time()))
    if job_id := os.environ.get("SLURM_JOB_ID"):
        write_job(folder, job_id)
    cell = {
        "name": arguments.cell,
        "recipe": arguments.recipe,
        "precision": arguments.precision,
        "ep_backend": arguments.ep_backend,
        "cluster": arguments.cluster,
        "stack": stack.name,
        "nodes": arguments.nodes,
        "ranks_per_node": arguments.ranks_per_node,
        "device": arguments.device,
        "emulated": bool(options.get("cookbook.emulated")),
        "stand_in_for": None,
        "refused": None,
        "published_tokens_per_second_per_gpu": _published(arguments, options, stack),
        "baseline": None,
        "environment": {},
        "options": dict(options),
    }
    write_whole(folder / "cell.yaml", yaml.safe_dump(cell, sort_keys=False, allow_unicode=True))
    if not (folder.parent / "run.json").exists():
        record = run_record(
            cluster=arguments.cluster,
            scheduler="slurm" if job_id else "local",
            stack=stack.name,
            cells=[arguments.cell],
        )
        write_run_record(folder.parent, record)


def _published(
    arguments: argparse.Namespace, options: Mapping[str, Any], stack: Stack
) -> float | None:
    """The published throughput, where the job trains just what the recipe says."""
    try:
        recipe = load_recipe(arguments.recipe, stack)
    except InputError:
        return None
    same = all(options.get(name) == setting.value for name, setting in recipe.settings.items())
    pair = f"{arguments.precision}+{arguments.ep_backend}"
    return recipe.published.get(pair) if same and arguments.nodes == recipe.nodes else None


def main(words: Sequence[str]) -> int:
    """Run one of the two commands; status 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m cookbook.job")
    commands = parser.add_subparsers(required=True)
    started = commands.add_parser("begin")
    started.set_defaults(handler=begin)
    started.add_argument("folder", type=Path)
    for name in ("cell", "recipe", "precision", "ep-backend", "cluster", "device"):
        started.add_argument(f"--{name}", required=True)
    for name in ("nodes", "ranks-per-node"):
        started.add_argument(f"--{name}", type=int, required=True)
    started.add_argument("--supervised", action="store_true")
    ended = commands.add_parser("end")
    ended.set_defaults(handler=end)
    ended.add_argument("folder", type=Path)
    ended.add_argument("--exit-status", type=int, required=True)
    # argparse would take TorchTitan's words for its own.
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    arguments = parser.parse_args(own)
    arguments.words = list(words[len(own) + 1 :])
    try:
        arguments.handler(arguments)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
