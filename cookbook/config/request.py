"""What a rendered script carries of its cells, and the cell that a job makes of it.

A script that reaches its job after days must not read recipes, overlays or profiles: they may be
renamed or half saved by then. So it carries their content, and a job merges it as the driver does.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.paths import RECIPES
from cookbook.base.yamlfile import (
    Block,
    Count,
    Text,
    Words,
    YamlFile,
    dump_yaml,
    fill,
    mapping_at,
    read_yaml,
)
from cookbook.config.cell import PARTS, Cell
from cookbook.config.cluster import read_cluster
from cookbook.config.dialect.argv import parse_argv
from cookbook.config.options import exported, read_options
from cookbook.config.recipe import SYNONYMS, Overlay, read_overlay, read_recipe
from cookbook.config.resolve import merge_config, published_number
from cookbook.config.stack import load_stack

# How the last line of a script ends, below which is all that it carries.
HANDED_OVER = "<<'CELL'"
_PLACE = "TorchTitan arguments"
# For each kind of overlay, the variable that chooses one, and the choice without it.
CHOICES = {"precision": ("PRECISION", "bf16"), "ep_backend": ("EP_BACKEND", "standard")}


@dataclass(frozen=True)
class Script:
    """What a script carries beside the content of the files that its cells are made of."""

    name: Text  # of the cell; of a script with a choice, the beginning of the cells' names
    run: Text  # the run's folder below `runs/`, unless CELL_DIR names the cell's folder
    stack: Text
    ranks_per_node: Count
    command: Text  # the bash that each attempt runs
    files: Words = field(default_factory=Words)  # as in `CellRecord`


_COMMENTS = {
    "command": "The bash of each attempt. The supervisor sets its variables, and writes it with\n"
    "# their values into the attempt's folder.",
    "set": "Options over all others; only those after the script's name win over these.",
    "recipe": "The options. Those of EP backend, precision and cluster, below, win over them.",
    "precision": "What PRECISION chooses; `expect` must be active in training.",
    "ep_backend": "What EP_BACKEND chooses.",
}


def request_text(cell: Cell, command: str, overlays: Sequence[Overlay], name: str = "") -> str:
    """Return what a script carries, as YAML.

    A script for several cells carries all their `overlays`, and `name`, with which their names
    begin; `cell` is any of them.
    """
    record, recipe, merged = cell.record(), cell.recipe, _merged(cell)
    default, asked = cell.options.stack.options, cell.options.values
    over = {key: one for key, one in asked.items() if key not in merged or merged[key] != one}
    over |= {key: default[key].default for key in merged if key not in asked}
    parts = {kind: {part.name: _content(part.path)} for kind, part in _parts(cell).items()}
    parts["recipe"][recipe.name].pop("stand_in", None)
    known: Sequence[Any] = [*overlays, cell.cluster]
    for part in known:
        kind = part.kind if isinstance(part, Overlay) else "cluster"
        own = parts[kind].setdefault(part.name, _content(part.path))
        own |= {"environment": exported(part.environment)} if part.environment else {}
    content = {
        "name": name or cell.name,
        "run": recipe.short_name + ("-local" if cell.cluster.scheduler == "local" else ""),
        "stack": record.stack,
        "ranks_per_node": record.ranks_per_node,
        "files": {} if name else dict(record.files),
        "command": Block(command),
        "set": over,
        **parts,
    }
    text = dump_yaml({key: one for key, one in content.items() if one})
    for key, comment in _COMMENTS.items():
        text = re.sub(rf"(?m)^{key}:", f"# {comment}\n{key}:", text, count=1)
    return text


def _parts(cell: Cell) -> Mapping[str, Any]:
    return {kind: getattr(cell, kind) for kind in PARTS}


def _merged(cell: Cell) -> Mapping[str, Any]:
    recipe = replace(cell.recipe, stand_in=None)
    cluster = replace(cell.cluster, nodes=max(cell.cluster.nodes, cell.nodes + cell.spare_nodes))
    merged = merge_config(recipe, cell.precision, cell.ep_backend, cluster, cell.nodes)
    return merged.options.values


def _content(path: Path) -> dict[str, Any]:
    return dict(read_yaml(path).content)


def read_script(file: YamlFile) -> Script:
    """Read what the script carries; raise InputError for what is missing or unknown."""
    script = fill(Script, file, beside=(*PARTS, "set"))
    stack = load_stack()
    if script.stack != stack.name:
        found = f"found {script.stack}, and this is {stack.name}"
        raise InputError(file.place("stack"), found, "render the script again")
    return script


def cell_of_script(
    file: YamlFile, words: Sequence[str], variables: Mapping[str, str], nodes: int
) -> Cell:
    """Return the cell that a script trains, without validating it.

    Args:
        file: what the script carries.
        words: the TorchTitan options after the script's name; they override the script's.
        variables: the job's environment, in which PRECISION and EP_BACKEND choose overlays.
        nodes: the job's number of nodes, spare ones included.
    """
    script, stack = read_script(file), load_stack()
    own = parse_argv(words, _PLACE, stack).settings
    for name in own:
        stack.setting(_PLACE, name)
    files: dict[str, tuple[YamlFile, Path]] = {}
    for kind in PARTS:
        name = _chosen(file, kind, variables)
        path = Path(str(script.files.get(kind) or RECIPES / PARTS[kind] / f"{name}.yaml"))
        files[kind] = (file.within(kind, name), path)
    recipe, cluster = read_recipe(*files["recipe"]), read_cluster(*files["cluster"])
    if cluster.ranks_per_node != script.ranks_per_node:
        found = f"found {script.ranks_per_node}, and {cluster.name} has {cluster.ranks_per_node}"
        raise InputError(file.place("ranks_per_node"), f"{found} here", "render the script again")
    precision = read_overlay("precision", *files["precision"])
    ep_backend = read_overlay("ep_backend", *files["ep_backend"])
    over = read_options(file, mapping_at(file, "set"), ("set",))
    cell = merge_config(recipe, precision, ep_backend, cluster, overrides={**over, **own})
    if nodes <= cell.spare_nodes:
        raise InputError(f"--nodes={nodes}", "all would be spare", "ask for more")
    if not any(len(file.content[kind]) > 1 for kind in CHOICES):
        cell = replace(cell, name=script.name)
    cell = replace(cell, nodes=nodes - cell.spare_nodes)
    return replace(cell, published=published_number(cell))


def _chosen(file: YamlFile, kind: str, variables: Mapping[str, str]) -> str:
    known, (variable, default) = mapping_at(file, kind), CHOICES.get(kind, ("", ""))
    if not known:
        raise InputError(file.place(kind), "is missing", "render the script again")
    only = next(iter(known)) if len(known) == 1 else ""
    if kind == "precision" and not variables.get(variable) and variables.get("RECIPE"):
        variable = "RECIPE"  # the published scripts' name
    asked = variables.get(variable) or only or default
    name, other = SYNONYMS.get(asked, asked), variables.get("RECIPE") or asked
    if kind == "precision" and SYNONYMS.get(other, other) != name:
        raise InputError(f"RECIPE={other}", f"{CHOICES[kind][0]} is {asked}", "unset one of them")
    if name in known:
        return name
    if only:
        raise InputError(f"{variable}={asked}", f"this script trains {only}", "render another one")
    raise unknown_name(variable, "value", asked, known)
