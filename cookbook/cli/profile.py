"""The command `profile`: show where the time of a training step goes, from a recipe or traces."""

import argparse
import contextlib
import sys
from pathlib import Path

from cookbook.base.errors import InputError, JobError, unknown_name
from cookbook.base.tables import fitted, terminal_width
from cookbook.base.yamlfile import shown_path
from cookbook.cli.follow import watch_run
from cookbook.cli.inspect import requested_cell
from cookbook.cli.run import start_run
from cookbook.config.facts import Facts
from cookbook.config.options import Setting, command_line_settings
from cookbook.config.recipe import names_in
from cookbook.profile.profile import (
    cell_traces,
    choose_ranks,
    folder_traces,
    make_profile,
    render_json,
    render_text,
)
from cookbook.run.folder import CellFolder
from cookbook.run.run import find_cell, is_run, run_names
from cookbook.run.states import cell_states
from cookbook.run.status import FINISHED

# Out of every `profile_freq` steps, TorchTitan's profiler skips some, warms up, and records the
# last ones. By then, compilation is over and the allocator has stopped growing.
_SETTINGS = {
    Facts.profiles: True,
    Facts.profile_freq: 8,
    Facts.profile_warmup: 3,
    Facts.profile_active: 2,
    Facts.steps: 8,
    # Log every step: reading the loss keeps the host from running ahead into the next step.
    Facts.log_freq: 1,
    # TorchTitan's profiler counts a validation as part of the step before it.
    Facts.validates: False,
}
# Turn checkpoints off, and clear the options that are not allowed without checkpoints.
_NO_CHECKPOINTS = {
    Facts.checkpoints: False,
    Facts.initial_load_in_hf: False,
    Facts.initial_load_path: None,
    Facts.last_save_in_hf: False,
}
# These options choose what to train, so they are rejected if the target is a trace.
_OF_RECIPES = (
    *("precision", "ep_backend", "cluster", "nodes"),
    *("set", "dry_run", "no_check", "detach"),
)


def profile(arguments: argparse.Namespace) -> int:
    name = arguments.target
    if name.endswith((".yaml", ".yml")) or name in names_in(""):
        arguments.recipe = name
        # Keep the progress of training out of the JSON on stdout.
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            cell = _trained(arguments)
        if isinstance(cell, int):
            return cell
        source, traces = f"{cell.path.parent.name}/{cell.name}", cell_traces(cell)
        if not traces:
            raise JobError(f"{shown_path(cell.path)}: the profiler left no trace; see its log")
    else:
        source, traces = _left_traces(name)
        for option in filter(vars(arguments).get, _OF_RECIPES):
            place = f"--{option.replace('_', '-')}"
            raise InputError(place, f"{name} is no recipe", "it is trained already")
        if arguments.ranks and Path(name).is_file():
            raise InputError("--ranks", f"{name} is one rank's trace", "name its folder")
    found = make_profile(source, choose_ranks(traces, arguments.ranks))
    text = render_json(found) if arguments.json else fitted(render_text(found, terminal_width()))
    print(text, end="", flush=True)
    return 0


def _trained(arguments: argparse.Namespace) -> CellFolder | int:
    asked = command_line_settings(arguments.set)
    saves = asked.get(Facts.checkpoints)
    options = _SETTINGS if saves and saves.value else _SETTINGS | _NO_CHECKPOINTS
    settings = {name: Setting(value, "profile") for name, value in options.items()}
    if steps := asked.get(Facts.steps):
        # Make the profiler's cycle as long as the run, so that it traces the run's last steps.
        settings[Facts.profile_freq] = steps
    cell = requested_cell(arguments, settings)
    frequency = cell.facts.profile_freq
    needed = cell.facts.profile_warmup + cell.facts.profile_active
    # Check the upper limit only: the option rules have checked the lower one.
    if frequency > cell.steps:
        found = f"found {frequency}, allowed: {needed} to {cell.steps}"
        remedy = "TorchTitan's profiler warms up and then traces the last steps"
        raise InputError(f"--set {Facts.profile_freq}", found, remedy)
    run = start_run(f"{cell.recipe.short_name}-profile", [cell], arguments)
    if isinstance(run, int):
        return run
    if not watch_run(run):
        print(f"When it has ended: python submit.py profile {run.name}")
        return 130
    (state,) = cell_states(run)
    if state.state != FINISHED:
        reason = f": {state.reason}" if state.reason else ""
        log = f"python submit.py logs {run.name}/{state.cell}"
        raise JobError(f"{run.name}/{state.cell} {state.state}{reason}; its log: {log}")
    return run.cell(state.cell)


def _left_traces(name: str) -> tuple[str, dict[int, Path]]:
    path = Path(name)
    if path.is_file():
        return shown_path(path), {0: path}
    if path.is_dir() and not is_run(path):
        return shown_path(path), cell_traces(CellFolder(path)) or folder_traces(path)
    if not path.is_dir() and not {name, name.rpartition("/")[0]} & {*run_names()}:
        raise unknown_name("profile", "recipe, run or trace", name, [*names_in(""), *run_names()])
    run, named = find_cell(name)
    cells = run.cells if named is None else [named]
    traced = {cell.name: traces for cell in cells if (traces := cell_traces(cell))}
    if not traced:
        place = f"{run.name}/{named.name}" if named else run.name
        remedy = "its profiler was off: python submit.py profile RECIPE turns it on"
        raise InputError(place, "left no trace", remedy)
    if len(traced) > 1:
        raise InputError(run.name, f"several cells left traces: {', '.join(traced)}", "name one")
    ((cell_name, traces),) = traced.items()
    return f"{run.name}/{cell_name}", traces
