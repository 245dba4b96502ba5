"""What a rendered script carries of its cells, and the cell that a job makes of it.

A script that reaches its job after days must not read recipes, overlays or profiles: they may be
renamed or half saved by then. So it carries what a job needs from them, as one YAML mapping. Keys
that `cell.yaml` has too mean the same there.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.paths import RECIPES
from cookbook.base.yamlfile import (
    Block,
    Count,
    Flag,
    Natural,
    Text,
    Texts,
    Words,
    YamlFile,
    dump_yaml,
    fill,
    mapping_at,
)
from cookbook.config.cell import PARTS, Cell
from cookbook.config.cluster import cluster_of_profile
from cookbook.config.options import Options, Setting, Settings, exported, parse_argv, read_options
from cookbook.config.recipe import Kind, Needs, Overlay, Published, Recipe
from cookbook.config.stack import load_stack
from cookbook.run.record import OF_SCRIPTS, WANDB

# The environment variables that choose an overlay, and the one that is taken without them.
CHOICES: Mapping[Kind, tuple[str, str]] = {
    "precision": ("PRECISION", "bf16"),
    "ep_backend": ("EP_BACKEND", "standard"),
}
_PLACE = "TorchTitan arguments"


@dataclass(frozen=True)
class Script:
    """The mapping that a script carries; the overlays under `precision` and `ep_backend` are read
    one at a time."""

    name: Text  # of the cell; if there is a choice, the beginning of its name
    run: Text  # the run's folder below `runs/`, unless CELL_DIR names the cell's folder
    title: Text
    recipe: Text
    cluster: Text
    stack: Text
    ranks_per_node: Count
    max_restarts: Natural
    command: Text
    emulated: Flag = False
    spare_nodes: Natural = 0
    too_few_nodes: Text = "wait"
    environment: Words = field(default_factory=Words)
    files: Words = field(default_factory=Words)
    published: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Choice:
    synonyms: Texts = ()
    emulated: Flag = False
    environment: Words = field(default_factory=Words)
    environment_from: Words = field(default_factory=Words)


_OWN = ("precision", "ep_backend", "options", "cluster_options", "profile")


def request_text(
    cell: Cell,
    command: str,
    overlays: Sequence[Overlay],
    published: Sequence[Cell],
    is_launcher: bool = False,
) -> str:
    """Return the mapping as YAML.

    A launcher carries all `overlays`, each with its options; else there is one of each kind, and
    the cell's options hold theirs already. `published`: the cells that have a published number.
    """
    record, recipe, cluster = cell.job_record(), cell.recipe, cell.cluster
    options: Settings = recipe.settings if is_launcher else cell.options.settings
    environment = exported(cluster.environment) if is_launcher else cell.environment
    files = {kind: name for kind, name in record.files.items() if not is_launcher or kind in _FIXED}
    content: dict[str, Any] = {
        "name": recipe.short_name if is_launcher else cell.name,
        "run": recipe.short_name + ("-local" if cluster.scheduler == "local" else ""),
        "title": recipe.description.partition(":")[0],
        **{name: getattr(record, name) for name in ("recipe", "cluster", "stack")},
        **{name: getattr(record, name) for name in ("ranks_per_node", "spare_nodes", "emulated")},
        "max_restarts": record.max_restarts,
        "too_few_nodes": record.too_few_nodes,
        "files": files,
        "environment": environment,
        "options": _values(options),
        "command": Block(command),
        "precision": {},
        "ep_backend": {},
        "cluster_options": _values(cluster.settings) if is_launcher else {},
        "published": {
            one.pair: {"tokens_per_second_per_gpu": one.published, "options": fingerprint(one)}
            for one in published
        },
        "profile": record.profile,
    }
    for one in overlays:
        facts: dict[str, Any] = content[one.kind]
        facts[one.name] = _facts(one, is_launcher)
    if recipe.published and content["published"]:
        content["published"] = {"source": recipe.published.source, **content["published"]}
    kept = {key: one for key, one in content.items() if one or key == "max_restarts"}
    text = dump_yaml(kept)
    for key, comment in _COMMENTS.items():
        text = re.sub(rf"(?m)^{key}:", f"# {comment}\n{key}:", text, count=1)
    return text


_COMMENTS = {
    "environment": "Exported to the ranks.",
    "options": "TorchTitan's options. Later ones win: those below, and at last those after the\n"
    "# script's name.",
    "command": "The bash of each attempt. The supervisor sets its variables, and writes it with\n"
    "# their values into the attempt's folder.",
    "precision": "What PRECISION chooses: what must be active in training, and what that needs.",
    "ep_backend": "What EP_BACKEND chooses.",
    "published": "Published for exactly these options, of which each has a digest.",
    "profile": "The cluster, for the checks of nodes and for requeues.",
}
_FIXED = ("recipe", "cluster")


def _values(settings: Settings) -> dict[str, Any]:
    return {name: setting.value for name, setting in settings.items()}


def _facts(overlay: Overlay, has_options: bool) -> dict[str, Any]:
    needs = asdict(replace(overlay.needs, settings={}))
    needs |= {"options": _values(overlay.needs.settings), "packages": list(overlay.needs.packages)}
    facts = {
        "synonyms": list(overlay.synonyms) if has_options else [],
        "expect": {name.partition(".")[2]: one.value for name, one in overlay.expect.items()},
        "needs": {key: one for key, one in needs.items() if one},
        "emulated": overlay.emulated is not None,
        "options": _values(overlay.settings) if has_options else {},
        "environment": exported(overlay.environment) if has_options else {},
        "environment_from": dict(overlay.environment_from),
    }
    return {key: one for key, one in facts.items() if one}


def fingerprint(cell: Cell) -> str:
    """Return a digest of all that a published number is for: the nodes and every option."""
    own = {*OF_SCRIPTS, WANDB}
    options = {name: cell.options[name] for name in cell.options.stack.options if name not in own}
    text = json.dumps([cell.nodes, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_script(file: YamlFile) -> Script:
    """Read what the script carries; raise InputError for what is missing or unknown."""
    script = fill(Script, file, beside=_OWN)
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
    if nodes <= script.spare_nodes:
        raise InputError(f"--nodes={nodes}", "all would be spare", "ask for more")
    own = parse_argv(words, _PLACE, stack).settings
    for name in own:
        stack.setting(_PLACE, name)
    cluster = cluster_of_profile(script.cluster, mapping_at(file, "profile"))
    if cluster.ranks_per_node != script.ranks_per_node:
        found = f"found {script.ranks_per_node}, and {script.cluster} has {cluster.ranks_per_node}"
        raise InputError(file.place("ranks_per_node"), f"{found} here", "render the script again")
    precision, ep_backend = (_overlay(file, script, kind, variables) for kind in CHOICES)
    layers = [("options",), ("ep_backend", ep_backend.name, "options")]
    layers += [("precision", precision.name, "options"), ("cluster_options",)]
    read = (read_options(file, mapping_at(file, *keys), keys) for keys in layers)
    is_chosen = any(len(mapping_at(file, kind)) > 1 for kind in CHOICES)
    name = "-".join([script.name, precision.name, ep_backend.name]) if is_chosen else script.name
    numbers = {k: one for k, one in script.published.items() if isinstance(one, dict)}
    source = str(script.published.get("source", ""))
    of_pairs = {pair: float(one["tokens_per_second_per_gpu"]) for pair, one in numbers.items()}
    recipe = Recipe(
        name=script.recipe,
        description=script.title,
        nodes=nodes - script.spare_nodes,
        settings={},
        path=_path(script, "recipe", script.recipe),
        short_name=script.run.removesuffix("-local"),
        spare_nodes=script.spare_nodes,
        too_few_nodes="stop" if script.too_few_nodes == "stop" else "wait",
        max_restarts=script.max_restarts,
        published=Published(source, of_pairs) if numbers else None,
    )
    cell = Cell(
        name=name,
        recipe=recipe,
        precision=precision,
        ep_backend=ep_backend,
        cluster=replace(
            cluster,
            path=_path(script, "cluster", script.cluster),
            environment=script.environment,
        ),
        nodes=recipe.nodes,
        options=Options(stack, {}).override(*read, own),
        hooks=stack.hooks,
        emulated=script.emulated,
    )
    known = numbers.get(cell.pair, {})
    is_published = known.get("options") == fingerprint(cell)
    return replace(cell, published=of_pairs[cell.pair] if is_published else None)


def _path(script: Script, part: str, name: str) -> Path:
    # No file is read: `reference` makes of this path what the script has.
    assert part in PARTS
    return Path(str(script.files.get(part) or RECIPES / PARTS[part] / f"{name}.yaml"))


def _overlay(file: YamlFile, script: Script, kind: Kind, variables: Mapping[str, str]) -> Overlay:
    known, (variable, default) = mapping_at(file, kind), CHOICES[kind]
    choices = {
        name: fill(_Choice, file, (kind, name), beside=("expect", "needs", "options"))
        for name in known
    }
    asked = variables.get(variable) or ""
    if len(known) > 1:
        asked = asked or (variables.get("RECIPE") or "" if kind == "precision" else "") or default
    else:
        asked = asked or next(iter(known), default)
    names = {synonym: name for name in choices for synonym in (name, *choices[name].synonyms)}
    if asked not in names:
        if len(known) == 1:
            found = f"this script trains {next(iter(known))}"
            raise InputError(f"{variable}={asked}", found, "render another one")
        raise unknown_name(variable, "value", asked, known)
    name, stack = names[asked], load_stack()
    choice, keys = choices[name], (kind, name, "needs")
    needed = read_options(file, mapping_at(file, *keys, "options"), (*keys, "options"))
    expect = {}
    for key, value in mapping_at(file, kind, name, "expect").items():
        place = file.place(kind, name, "expect", key)
        option = stack.option(place, f"cookbook.{key}")
        expect[option.name] = Setting(option.check(place, value), place)
    return Overlay(
        kind=kind,
        name=name,
        description=name,
        needs=fill(Needs, file, keys, beside=("options",), settings=needed),
        expect=expect,
        settings={},
        emulated={} if choice.emulated else None,
        path=_path(script, kind, name),
        environment=choice.environment,
        environment_from=choice.environment_from,
    )
