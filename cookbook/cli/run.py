"""The commands `check`, `run`, `sweep` and `check-line`.

`check-line` validates an sbatch command without submitting it. It hands what the script carries to
the supervisor, as the script's last line would. No line of the script is executed.
"""

import argparse
import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, nearest, unknown_name
from cookbook.base.paths import python_path
from cookbook.base.tables import fitted, terminal_width, text_table
from cookbook.base.yamlfile import shown_path
from cookbook.check.check import check_cells
from cookbook.check.report import render_json, render_text
from cookbook.cli.follow import wait_for
from cookbook.cli.inspect import cell_request, requested_cell
from cookbook.config.cell import WARNING, Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.facts import Facts
from cookbook.config.options import command_line_settings
from cookbook.config.recipe import names_in
from cookbook.config.request import HANDED_OVER
from cookbook.config.resolve import cell_from_record
from cookbook.config.sweep import (
    CellRequest,
    Sweep,
    expand_sweep,
    in_rounds,
    is_sweep,
    load_sweep,
    sweep_of_recipe,
)
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import predict_step
from cookbook.results.columns import tokens_text
from cookbook.results.recorded import UNKNOWN
from cookbook.run.excluded import read_excluded
from cookbook.run.folder import CellFolder, saved_steps
from cookbook.run.record import read_record
from cookbook.run.run import Run, find_cell, release_submit_locks, take_submit_lock
from cookbook.run.slurm import node_groups, refusal_of, submit_environment
from cookbook.run.states import cell_states
from cookbook.run.status import ENDED, FINISHED, OPEN, QUEUED, REFUSED, read_status
from cookbook.supervise.resume_point import Found, find_checkpoint


def show_check(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 if every cell may run, else 1."""
    recipe: str = arguments.recipe
    if is_sweep(recipe):
        sweep = load_sweep(recipe)
        name, cells = sweep.name, expand_sweep(sweep, cell_request(arguments))
    elif "." not in recipe and recipe not in names_in(""):
        raise unknown_name("check", "recipe or sweep", recipe, [*names_in(""), *names_in("sweep")])
    else:
        cells = [requested_cell(arguments)]
        name = cells[0].recipe.short_name
    checks = check_cells(cells, build=not arguments.rules_only)
    as_text = "" if arguments.json else render_text(name, checks, terminal_width())
    print(fitted(as_text) or render_json(checks), end="")
    return 0 if all(one.may_run for one in checks) else 1


def judged_cells(name: str, cells: Sequence[Cell], arguments: argparse.Namespace) -> list[Cell]:
    """Validate the cells and print the plan; set `refused` in the returned cells that cannot run.

    Warnings go to stderr. A trial build with TorchTitan is made only for jobs that will wait in a
    Slurm queue: a dry run must answer at once, and a local job shows TorchTitan's errors at once.
    """
    cluster, is_checked = cells[0].cluster, not arguments.no_check
    gpus = sum(cell.world for cell in cells if cell.cluster.gpu and not cell.refused)
    build = is_checked and not arguments.dry_run and gpus > 0 and cluster.scheduler == "slurm"
    if build:
        asked = f"before requesting {gpus} GPUs (--no-check skips this)"
        print(f"checking {len(cells)} cell(s) {asked} ...", file=sys.stderr, flush=True)
    checks = check_cells(cells, build=build)
    findings = [finding for one in checks for finding in one.findings if is_checked]
    for text in dict.fromkeys(str(one) for one in findings if one.level == WARNING):
        print(f"warning: {text}", file=sys.stderr)
    judged = [replace(one.cell, refused=one.judged.refused) for one in checks]
    seen = [one.judged for one in checks if not one.judged.rules] or [checks[0].judged]
    print(f"{describe_plan(name, judged)}\n  {seen[0].parts}")
    return judged


def run(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        return _resume(arguments)
    if arguments.recipe is None:
        raise InputError("run", "names no RECIPE", "name one, or: run --resume RUN")
    cell = requested_cell(arguments)
    return _train(cell.recipe.short_name, [cell], arguments, sweep_of_recipe(arguments.recipe))


def run_sweep(arguments: argparse.Namespace) -> int:
    sweep = load_sweep(arguments.sweep)
    cells = expand_sweep(sweep, cell_request(arguments))
    if arguments.repeat < 1:
        raise InputError("--repeat", f"found {arguments.repeat}, allowed: 1 and up")
    if arguments.one_allocation:
        nodes = ", ".join(map(str, sorted({cell.nodes for cell in cells})))
        if "," in nodes:
            remedy = "name one number with --nodes"
            raise InputError("--one-allocation", f"the cells ask for {nodes} nodes", remedy)
    return _train(sweep.name, cells, arguments, sweep)


def _train(name: str, cells: Sequence[Cell], arguments: argparse.Namespace, asked: Sweep) -> int:
    run = start_run(name, cells, arguments)
    if not isinstance(run, Run):
        return run
    status = wait_for(run)
    if any(cell.stand_in_for for cell in cells):
        print(fitted(f"\n{_in_full(asked)}"))
    return status


def _in_full(sweep: Sweep) -> str:
    """Return what the recipes that are too large here would do on the largest known cluster."""
    profiles = (load_cluster(one) for one in names_in("cluster"))
    cluster = max((one for one in profiles if one.gpu), key=lambda one: one.nodes)
    rows = [["", "published", "predicted", "GiB a GPU"]]
    for cell in expand_sweep(sweep, CellRequest(cluster)):
        if cell.recipe.stand_in is None or cell.refused:
            continue
        speed, peak = None, UNKNOWN
        with contextlib.suppress(InputError):  # such as of a part whose time is not modelled
            ranks = describe_ranks(cell)
            peak = f"{max(predict_memory(cell, rank).total for rank in ranks):.0f}"
            speed = predict_step(cell, ranks).tokens_per_second_per_gpu
        numbers = (tokens_text(cell.published), tokens_text(speed), peak)
        rows.append([f"{cell.name}, {cell.nodes} node(s)", *numbers])
    title = f"What was too large here, on {cluster.name} ({cluster.ranks} a node), tokens/s/GPU:"
    more = "how accurate predictions are, and why DeepEP's exceed the published: README.md"
    return f"{title}\n{text_table(rows, align='lrrr', indent=2)}\n  {more}"


def start_run(name: str, cells: Sequence[Cell], arguments: argparse.Namespace) -> Run | int:
    """Print the plan and submit the cells; return the run to watch or an exit status."""
    judged, cluster = judged_cells(name, cells, arguments), cells[0].cluster
    cells = in_rounds(judged, arguments.repeat)
    accepted = [cell.name for cell in cells if not cell.refused]
    if arguments.one_allocation and cluster.scheduler == "slurm":
        limit = f", which has {cluster.time} for all of them" if cluster.time else ""
        print(f"  one after another in one job{limit}")
    if arguments.repeat > 1:
        print(f"  each {arguments.repeat} times, in this order: {', '.join(accepted)}")
    if arguments.dry_run:
        return 0 if len(accepted) == len(cells) else 1
    if not accepted:
        print(f"{name}: no cell can run here; nothing was submitted", file=sys.stderr)
        return 1
    # Import lazily: a dry run must not wait for submitit.
    from cookbook.launch.submit import create_run, submit_run

    if cluster.scheduler == "slurm":
        # Read the exclusion list first: a mistake in it must be found before anything is written.
        for node in read_excluded():
            print(f"excluded: {node}")
    run = create_run(name, cells)
    report_jobs(run, submit_run(run, cells, arguments.one_allocation), arguments.detach)
    return 0 if arguments.detach else run


def report_jobs(run: Run, job_ids: Sequence[str], is_detached: bool) -> None:
    kind = "Slurm job" if run.scheduler == "slurm" else "process"
    shown = ", ".join(job_ids[:8]) + (", ..." if len(job_ids) > 8 else "")
    print(f"submitted as {kind} {shown}: {shown_path(run.folder)}\n", flush=True)
    if is_detached:
        print(f"follow it: python submit.py status --watch {run.name}")


def describe_plan(name: str, cells: Sequence[Cell]) -> str:
    """Return a run's plan as text: each cell's steps and layout, or why the cell is refused."""
    first = cells[0]
    nodes = f"{first.nodes} node(s) x {first.cluster.ranks}"
    lines = [f"{name} on cluster {first.cluster.name}: {nodes}"]
    stand_ins = {cell.stand_in_for: cell.recipe.name for cell in cells if cell.stand_in_for}
    for original, stand_in in stand_ins.items():
        lines.append(f"  {original} is too large here: its stand-in {stand_in} runs instead")
    if first.left_out:
        lines.append(f"  left out, meant for the large recipe: {', '.join(first.left_out)}")
    if len(cells) == 1 and first.own_pair:
        lines.append(f"  {first.recipe.name} is made for {first.own_pair}; this is {first.pair}")
    rows = []
    for cell in cells:
        layout = cell.layout
        text = f"{cell.steps} steps, TP {layout.tp} PP {layout.pp} DP {layout.dp_shard} "
        emulated = "".join(f", {one.name} emulated" for one in cell.emulated_parts)
        text += f"EP {layout.ep}{emulated}" + " (numerics only)" * bool(emulated)
        if cell.attends_by_reference:
            text += ", FlashAttention-4's reference (numerics only)"
        rows.append([cell.name, f"refused: {cell.refused}" if cell.refused else text])
    return "\n".join([*lines, text_table(rows, width=terminal_width(), indent=2)])


def _resume(arguments: argparse.Namespace) -> int:
    for name in ("recipe", "precision", "ep_backend", "cluster"):
        if given := getattr(arguments, name):
            own = f"continues with the cell's own {name.replace('_', ' ')}, found {given!r}"
            place = f"--resume {arguments.resume}"
            raise InputError(place, own, "leave that out, or start a new run")
    run, named = find_cell(arguments.resume)
    folders = run.cells if named is None else [named]
    if arguments.dry_run:
        return 0 if _resumable(run, folders, arguments) else 1
    # Hold the lock until the new jobs are recorded: two resumes at once would train a cell twice.
    take_submit_lock(run.folder)
    try:
        if not (cells := _resumable(run, folders, arguments)):
            return 1
        from cookbook.launch.submit import resume_cells

        job_ids = resume_cells(run, cells)
    finally:
        release_submit_locks()
    report_jobs(run, job_ids, arguments.detach)
    return 0 if arguments.detach else wait_for(run, [run.cell(cell.name) for cell in cells])


def _resumable(
    run: Run, folders: Sequence[CellFolder], arguments: argparse.Namespace
) -> list[Cell]:
    _refuse_running(run, folders)
    found, cells = dict[str, Found](), list[Cell]()
    for folder in folders:
        try:
            record, place = read_record(folder.record), shown_path(folder.record)
            if record.refused:
                raise InputError(f"{place}: {REFUSED}", record.refused, "start a new run")
            settings = command_line_settings(arguments.set)
            cell = cell_from_record(folder.name, record, place, arguments.nodes, settings)
            found[cell.name] = _find_checkpoint(run, folder, cell)
            cells.append(replace(cell, resumes=found[cell.name].checkpoint is not None))
        except InputError as error:
            if len(folders) == 1:
                raise
            print(f"{folder.name} is left out: {error}", file=sys.stderr)
    if cells:
        cells = judged_cells(run.name, cells, arguments)
    for cell in cells:
        for one in found[cell.name].damaged:
            print(f"  {cell.name} passes over {one.path.name}: {one.damage}")
        if checkpoint := found[cell.name].checkpoint:
            print(f"  {cell.name} continues after step {checkpoint.step} of {cell.steps}")
        elif not cell.refused:
            print(f"  {cell.name} has no whole checkpoint, and starts from step 1")
    cells = [cell for cell in cells if not cell.refused]
    if not cells:
        print(f"{run.name}: no cell can be resumed; nothing was submitted", file=sys.stderr)
    return cells


def _refuse_running(run: Run, folders: Sequence[CellFolder]) -> None:
    states = cell_states(run)
    names = {folder.name for folder in folders}
    # One job may train several cells, and a running one may still come to a cell in `folders`. So
    # resume none before these jobs have ended.
    jobs = {state.job_id for state in states if state.cell in names and state.job_id}
    for state in states:
        is_idle = state.state == QUEUED and state.job_id is None
        has_ended = is_idle or (state.state in ENDED and state.is_known)
        if has_ended or not (state.cell in names or state.job_id in jobs):
            continue
        found = f"may still run: {state.reason or 'its state is not known'}"
        remedy = "find out, and end it"
        if state.state in OPEN and state.is_known:
            found = f"is {state.state}"
            remedy = f"wait for its end, or: python submit.py cancel {run.name}"
        raise InputError(f"{run.name}/{state.cell}", found, remedy)


def _find_checkpoint(run: Run, folder: CellFolder, cell: Cell) -> Found:
    found = find_checkpoint(folder, cell.record())
    command = shlex.join(run.record.command)
    new_run = f"start a new run: {command}" if command else "start a new run"
    saved = folder.checkpoints(cell.record().options)
    if not cell.facts.checkpoints and saved_steps(saved):
        raise InputError(Facts.checkpoints, "is off, so nothing is loaded", new_run)
    if found.checkpoint is None and read_status(folder).state == FINISHED:
        reason = f"has made its steps, and left no whole checkpoint in {shown_path(saved)}"
        raise InputError(shown_path(folder.path), reason, new_run)
    if found.checkpoint is not None and found.checkpoint.step >= cell.steps:
        remedy = f"ask for more: --set {Facts.steps}={2 * cell.steps}"
        raise InputError(shown_path(folder.path), f"has made all of its {cell.steps} steps", remedy)
    return found


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Accept environment variables with these prefixes: programs that a job starts may read them.
_OF_OTHERS = re.compile("(NCCL|NVSHMEM|SLURM|WANDB)_")
_SEEN = "checked: the rules, this environment"
# Variables that a script or its supervisor reads, beside those that the script's own text names.
_READ = {"CELL_DIR", "COOKBOOK_PREFLIGHT", "COOKBOOK_RUNS", "PRECISION", "RECIPE", "EP_BACKEND"}


def check_line(arguments: argparse.Namespace) -> int:
    """Validate an sbatch command line without submitting it; return 0 if its job may run."""
    variables, runner, typed, script, words = _parse(arguments.line)
    text = script.read_text(encoding="utf-8", errors="replace")
    _, is_ours, below = text.partition(f"{HANDED_OVER}\n")
    carried, is_whole, _ = below.partition("\nCELL\n")
    if not (text.startswith("#!/bin/bash\n") and is_ours and is_whole):
        remedy = "name train_671b.sh, train_16b.sh, a script of `submit.py render`, or a copy"
        found = "is no script of the cookbook, and was not run"
        raise InputError(f"check-line: {script}", found, remedy)
    options = _options([*_header(script, text.splitlines()), *typed])
    exports = filter(_VARIABLE.match, options.export.split(","))
    variables |= dict(item.split("=", 1) for item in exports)
    known = {*re.findall(r"\$\{([A-Z_]+):?-", text), *_READ}
    for name in variables:
        is_known = name in known or _OF_OTHERS.match(name) or re.search(rf"\{{{name}\b", text)
        if not is_known and (close := nearest(name, known)):
            found = "is no variable that the script reads"
            raise InputError(name, found, f"did you mean {close[0]}?")
    nodes = options.nodes.partition("-")[0]
    if not (nodes.isdecimal() and int(nodes)):
        raise InputError("sbatch --nodes", f"found {nodes!r}, allowed: a whole number above 0")
    environment = {**submit_environment(), "PYTHONPATH": python_path()}
    environment |= {"SLURM_JOB_NUM_NODES": nodes} if runner == "sbatch" else {}
    for counted, value in options.gpus:
        if (gpus := value.rpartition(":")[2]).isdigit():
            per_node = int(gpus) // (int(nodes) if counted == "in all" else 1)
            environment["SLURM_GPUS_ON_NODE"] = str(per_node)
    door = [sys.executable, "-m", "cookbook.supervise", "--check", f"--script={script}"]
    status = subprocess.run(
        [*door, "--", *words], env=environment | variables, input=f"{carried}\n", text=True
    ).returncode
    if status:
        return status  # the reason was printed
    if runner == "bash" or not node_groups():
        print(f"{_SEEN}; not checked: TorchTitan's build, Slurm", file=sys.stderr)
        return 0
    if (refusal := refusal_of([*typed, str(script), *words], variables)) is not None:
        print(f"submit.py: sbatch refuses it: {refusal}", file=sys.stderr)
        return 1
    print(f"{_SEEN}, Slurm; not checked: TorchTitan's build", file=sys.stderr)
    return 0


def _parse(line: Sequence[str]) -> tuple[dict[str, str], str, list[str], Path, list[str]]:
    words = shlex.split(line[0]) if len(line) == 1 and not Path(line[0]).is_file() else list(line)
    variables = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    runner = words.pop(0) if words and words[0] in ("sbatch", "bash") else "sbatch"
    if words and not words[0].startswith("-") and not Path(words[0]).is_file():
        found = f"found {words[0]!r}, which is no file; allowed: sbatch or bash, options, a script"
        raise InputError("check-line", found)
    # An option's value may be a separate word, so the script is the first word that is a file.
    for position, word in enumerate(words):
        if not word.startswith("-") and Path(word).is_file():
            return variables, runner, words[:position], Path(word), words[position + 1 :]
    remedy = "write: python submit.py check-line PRECISION=mxfp8 sbatch --nodes=16 train_671b.sh"
    raise InputError("check-line", "names no script that is here", remedy)


def _header(script: Path, lines: Sequence[str]) -> list[str]:
    is_command = [bool(text.strip()) and not text.lstrip().startswith("#") for text in lines]
    command = is_command.index(True)
    for number, text in enumerate(lines[command:], command + 1):
        if text.startswith("#SBATCH "):
            found = f"sbatch does not read `{text}`: it is below the command in line {command + 1}"
            remedy = "move that command below all #SBATCH lines"
            raise InputError(f"{script}:{number}", found, remedy)
    head = [text for text in lines[:command] if text.startswith("#SBATCH ")]
    return [word for text in head for word in text.split()[1:]]


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nodes", "-N", default="1")
    parser.add_argument("--export", default="")
    gpus: dict[str, Any] = {"dest": "gpus", "action": "append", "default": []}
    parser.add_argument("--gpus", "-G", **gpus, type=lambda text: ("in all", text))
    parser.add_argument("--gpus-per-node", **gpus, type=lambda text: ("a node", text))
    parser.add_argument("--gres", **gpus, type=lambda text: ("a node", text.partition("gpu")[2]))
    return parser.parse_known_args([word.replace("'", "").replace('"', "") for word in words])[0]
