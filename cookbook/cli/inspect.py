"""Resolve cells from the command line, and run the verbs `list`, `show`, `render` and `new`."""

import argparse
import contextlib
import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

from cookbook.base.errors import InputError, named_at, unknown_name
from cookbook.base.files import write_whole
from cookbook.base.paths import RECIPES, own_recipes
from cookbook.base.tables import terminal_width, text_table
from cookbook.base.yamlfile import shown_path
from cookbook.config.cell import Cell
from cookbook.config.cluster import default_cluster, load_cluster
from cookbook.config.facts import Facts
from cookbook.config.options import Settings, command_line_settings
from cookbook.config.recipe import KINDS, check_name, find_file, load_overlay, load_recipe, names_in
from cookbook.config.sweep import CellRequest, expand_sweep, load_sweep, sweep_of_recipe


def requested_cell(arguments: argparse.Namespace, settings: Settings | None = None) -> Cell:
    """Return the cell that the command line asks for; its `--set` options override `settings`."""
    request = cell_request(arguments)
    request = replace(request, overrides={**(settings or {}), **request.overrides})
    (cell,) = expand_sweep(sweep_of_recipe(arguments.recipe), request)
    return cell


def cell_request(arguments: argparse.Namespace) -> CellRequest:
    for key in ("precision", "ep_backend"):
        names = getattr(arguments, key) or ""
        if "," in names and not names.endswith((".yaml", ".yml")):
            remedy = f"write --vary {key}={names}"
            if arguments.verb != "plan":
                listed = f"`{key}: [{names.replace(',', ', ')}]` (python submit.py new NAME --from "
                remedy = f"a sweep's file lists several: {listed}matrix)"
            place = f"--{key.replace('_', '-')}"
            raise InputError(place, f"found {names!r}, allowed: one name", remedy)
    with named_at("--cluster" if arguments.cluster else "COOKBOOK_CLUSTER"):
        cluster = load_cluster(arguments.cluster or default_cluster())
    return CellRequest(
        cluster=cluster,
        precision=arguments.precision,
        ep_backend=arguments.ep_backend,
        nodes=arguments.nodes,
        overrides=command_line_settings(arguments.set),
    )


def write_output(option: str, name: str, content: str, mode: int = 0o644) -> None:
    """Write `content` to the file `name`: atomically, or in place if it is a device or a pipe."""
    path = Path(name)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content.encode())
        else:
            write_whole(path.resolve(), content, mode)  # replace a symlink's target, not the link
    except OSError as error:
        raise InputError(f"{option} {name}", f"cannot be written: {error.strerror}") from None


_TRY = {
    "": "run {name} --dry-run",
    "precision": "run debug --precision {name} --dry-run",
    "ep_backend": "run debug --ep-backend {name} --dry-run",
    "cluster": "sweep matrix --cluster {name} --dry-run",
    "sweep": "sweep {name} --dry-run",
}


def list_all(arguments: argparse.Namespace) -> int:
    problems: dict[str, None] = {}
    for kind, (title, _) in KINDS.items():
        rows = []
        for name in names_in(kind):
            try:
                rows.append([f"{name:28}", _description(kind, name)])
            except InputError as error:
                problems[str(error)] = None  # one unreadable file must not hide the others
        print("\n".join([f"{title}s:", text_table(rows, width=terminal_width(), indent=2)]))
    for problem in problems:
        print(f"submit.py: left out: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _description(kind: str, name: str) -> str:
    if kind in ("precision", "ep_backend"):
        return load_overlay(kind, name).description
    if kind == "cluster":
        is_default = False
        with contextlib.suppress(InputError):
            is_default = name == default_cluster()
        return load_cluster(name).description + (" (default here)" if is_default else "")
    return (load_sweep(name) if kind else load_recipe(name)).description


def show_cell(arguments: argparse.Namespace) -> int:
    cell = requested_cell(arguments)
    record = cell.record()
    if arguments.origins:
        settings = cell.options.settings.items()
        places = {name: {"value": one.value, "from": one.origin} for name, one in settings}
        if cell.facts.checkpoints and Facts.last_save_model_only not in places:
            origin = "the cookbook's default (TorchTitan's is true)"
            places[Facts.last_save_model_only] = {
                "value": cell.facts.last_save_model_only,
                "from": origin,
            }
        record = replace(record, options=places)
    print(record.as_yaml(), end="")
    return 0


def render_cell(arguments: argparse.Namespace) -> int:
    """Print the cell's script or write it to a file; return 1 if the rules refuse the cell."""
    cell = requested_cell(arguments)
    if cell.stand_in_for:
        remedy = f"name the cluster that the script is for, or render {cell.recipe.name}"
        found = f"would train {cell.recipe.name} in place of {cell.stand_in_for}"
        raise InputError(f"--cluster {cell.cluster.name}", found, remedy)
    if cell.refused:
        print(f"submit.py: {cell.name} is refused: {cell.refused}", file=sys.stderr)
    status = 1 if cell.refused else 0
    # Import lazily: `list` must not wait for Jinja.
    from cookbook.launch.script import render_script

    if arguments.output in (None, "-"):
        print(render_script(cell), end="")
        return status
    path = Path(arguments.output)
    write_output("--output", arguments.output, render_script(cell, file_name=path.name), mode=0o755)
    print(f"wrote {path}: {cell.name} for {cell.cluster.name}", file=sys.stderr)
    return status


def new(arguments: argparse.Namespace) -> int:
    kind = _kind(arguments.source)
    *folders, name = re.sub(r"\.ya?ml$", "", arguments.name).split("/")
    if folders:
        remedy = f"write {name}: the copy goes to {shown_path(own_recipes() / kind)}"
        raise InputError("NAME", f"found {arguments.name!r}, a path", remedy)
    check_name("NAME", name)
    target = own_recipes() / kind / f"{name}.yaml"
    if name in names_in(kind):
        raise InputError(shown_path(find_file(kind, name)), "exists already", "choose another name")
    text = find_file(kind, arguments.source).read_text(encoding="utf-8")
    if kind == "":
        # Quote the new name: without quotes, YAML would read the name `true` as a boolean.
        text = re.sub(r"(?m)^name:.*$", f'name: "{name}"', text, count=1)
    # `published` is true of the original file only: drop it and its comments.
    block = r"(?m)^(?:#[^\n]*\n)*published:[^\n]*\n(?:[ \t]+[^\n]*\n|-[^\n]*\n)*"
    try:
        write_whole(target, re.sub(block, "", text, count=1))
    except OSError as error:
        remedy = "set COOKBOOK_RECIPES to a folder of your own"
        found = f"cannot be written: {error.strerror}"
        raise InputError(shown_path(target), found, remedy) from None
    print(f"wrote {shown_path(target)}; edit it, then:")
    print(f"  python submit.py {_TRY[kind].format(name=name)}")
    return 0


def _kind(source: str) -> str:
    path, folders = Path(source), [shown_path(RECIPES / kind) for kind in KINDS]
    if is_file := path.suffix in (".yaml", ".yml"):
        folder, roots = path.resolve().parent, (RECIPES, own_recipes().resolve())
        found = [kind for kind in KINDS if folder in (root / kind for root in roots)]
    else:
        found = [kind for kind in KINDS if source in names_in(kind)]
    if not (found or is_file):
        raise unknown_name("--from", "name", source, {*chain(*map(names_in, KINDS))})
    if len(found) != 1:
        names = "is the name of several files" if found else "does not tell its kind"
        remedy = f"name a file in {', '.join(folders)}"
        raise InputError("--from", f"{source!r} {names}", remedy)
    return found[0]
