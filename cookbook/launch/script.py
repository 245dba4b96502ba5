"""Render the scripts of cells and recipes, and a cell's sbatch options.

Python makes every decision; the template only lays out text. The `shquote` filter quotes text from
YAML files, so that bash passes it on unchanged.
"""

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from cookbook.base.paths import ROOT, TEMPLATES
from cookbook.config.cell import Cell, train_argv
from cookbook.config.cluster import Cluster, OptionValue
from cookbook.config.dialect.argv import argv_of, launch_argv
from cookbook.config.options import exported
from cookbook.config.recipe import (
    Overlay,
    Recipe,
    load_ep_backend,
    load_precision,
    names_in,
    reference,
)
from cookbook.config.resolve import merge_config
from cookbook.config.stack import load_stack


def shquote(value: object) -> str:
    """Quote `value` as one bash word; for readability, also quote values such as `a,b` and `=a`."""
    text = str(value)
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and ("," in text or text[0] == "=") else quoted


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters["shquote"] = shquote


def render_script(cell: Cell, root: Path = ROOT, file_name: str = "train.sh") -> str:
    """Return the text of a cell's script, which calls itself `file_name` in its messages."""
    runner = "sbatch" if cell.cluster.scheduler == "slurm" else "bash"
    # Use the default name if this one has special characters that bash would expand.
    if not re.fullmatch(r"[\w.+-]+", file_name, re.ASCII):
        file_name = "train.sh"
    parts = [
        f"{title} {overlay.name} ({overlay.description}"
        + ("; EMULATED here, for numerics only)" if overlay in cell.emulated_parts else ")")
        for title, overlay in (("precision", cell.precision), ("EP backend", cell.ep_backend))
    ]
    header = [
        cell.description,
        *parts,
        "",
        f"  {runner} {file_name}                        # trains it",
        f"  {runner} {file_name} --training.steps=5     # TorchTitan's options at the end",
        "",
        "Reads: CELL_DIR (a run to resume), COOKBOOK_PREFLIGHT (off: no check of the nodes),",
        "COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on).",
        f"Rendered by `submit.py render` from {cell.recipe.path.name} for {cell.cluster.name}.",
    ]
    return _render(
        cell,
        header,
        [cell.ep_backend, cell.precision],
        file_name=file_name,
        sbatch=sbatch_lines(cell),
        cell_name=cell.name,
        precision=shquote(reference("precision", cell.precision.path)),
        ep_backend=shquote(reference("ep_backend", cell.ep_backend.path)),
        root=str(root),
        choices=(),
        train_args=train_argv(cell),
        cluster_args=(),
    )


def _render(cell: Cell, header: list[str], overlays: Sequence[Overlay], **context: Any) -> str:
    """Render the template for one cell, or for a launcher that lets the user choose the cell."""
    cluster = cell.cluster
    mounts = cluster.container.mounts if cluster.container else ()
    needed = [(file, True) for file in cluster.source]
    optional = [(file, False) for file in cluster.source_if_exists]
    condition = '"${{{kind}}}" == {name} && ' if context["choices"] else ""
    copied = [
        (condition.format(kind=overlay.kind.upper(), name=overlay.name), name, other)
        for overlay in overlays
        for name, other in overlay.environment_from.items()
    ]
    return _ENVIRONMENT.get_template("train.sbatch.j2").render(
        context,
        hooks=cell.options.stack.hooks,
        environment=list(cell.environment.items()),
        environment_from=copied,
        spare_nodes=cell.spare_nodes,
        header=[" ".join(line.splitlines()) for line in header],
        scheduler=cluster.scheduler,
        cluster=cluster,
        cluster_name=reference("cluster", cluster.path),
        source=[*needed, *optional],
        container_mounts=shquote("".join(f",{mount}" for mount in mounts)) if mounts else "",
        short_name=cell.recipe.short_name,
        recipe=reference("", cell.recipe.path),
    )


def sbatch_options(
    cell: Cell, job_name: str | None = None, leave_out: Sequence[str] = ()
) -> dict[str, OptionValue]:
    """Return sbatch's options by long name; True marks an option without a value.

    Each node runs one task, since torchrun starts the ranks.
    `leave_out`: nodes to exclude in addition to those of the cluster's profile.
    """
    cluster = cell.cluster
    return {
        "job-name": job_name or cell.name,
        "nodes": cell.nodes + cell.spare_nodes,
        "ntasks-per-node": 1,
        **cluster.slurm_options(leave_out),
        "requeue" if cluster.requeue else "no-requeue": True,
        # Signal only the batch shell: SIGUSR1 would kill a rank's helper processes.
        "signal": f"B:USR1@{cluster.grace_seconds}",
        "open-mode": "append",  # a requeued job appends to its earlier log
    }


def sbatch_lines(cell: Cell, job_name: str | None = None) -> list[str]:
    """Return the options for `#SBATCH` lines; the log goes to the folder where sbatch is called."""
    if cell.cluster.scheduler != "slurm":
        return []
    options = sbatch_options(cell, job_name) | {"output": "%x-%j.log"}
    return [option_word(name, value) for name, value in options.items()]


def option_word(name: str, value: OptionValue) -> str:
    """Format one option (`--nodes=32`, or `--exclusive` for True), quoted for `#SBATCH` lines."""
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def render_launcher(recipe: Recipe, cluster: Cluster, file_name: str) -> str:
    """Render one script for all cells of a recipe, selected by PRECISION and EP_BACKEND.

    Unlike a cell's script, it has no absolute paths, so it can be checked in to the repository.
    """
    precisions = [load_precision(name) for name in names_in("precision")]
    if cluster.gpu:
        fp8 = load_precision("fp8", cluster.gpu)
        own = replace(fp8, synonyms=(*fp8.synonyms, "fp8"))
        precisions = [own if one.name == fp8.name else one for one in precisions]
    backends = [load_ep_backend(name) for name in names_in("ep_backend")]
    first = merge_config(recipe, load_precision("bf16"), load_ep_backend("standard"), cluster)
    choices = [
        _choice("number format of the GEMMs", "${RECIPE:-bf16}", precisions),
        _choice("how tokens travel to their experts", "standard", backends),
    ]
    header = [
        recipe.description,
        "",
        *_examples(recipe, file_name),
        "",
        f"PRECISION: {' | '.join(overlay.name for overlay in precisions)};",
        "  or, as the published scripts have it, RECIPE: mxfp8_default | mxfp8_wgrad_hp",
        f"EP_BACKEND: {' | '.join(overlay.name for overlay in backends)}",
        "CELL_DIR: the run's folder, to resume it; by default runs/<recipe>/<cell>",
        "COOKBOOK_PREFLIGHT: full (default) | nodes | off: the check of the nodes before training",
        "COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns Weights & Biases on), WANDB_PROJECT",
        f"Rendered by `make golden` from {recipe.path.name} for {cluster.name}; edit a copy.",
    ]
    stack, title = first.options.stack, recipe.description.partition(":")[0]
    return _render(
        first,
        header,
        [*precisions, *backends],
        file_name=file_name,
        sbatch=sbatch_lines(first, job_name=recipe.short_name),
        cell_name=None,
        precision='"${PRECISION}"',
        ep_backend='"${EP_BACKEND}"',
        root=None,
        choices=choices,
        train_args=[*launch_argv(stack, title), *argv_of(stack, recipe.settings)],
        cluster_args=argv_of(stack, cluster.settings),
    )


def _examples(recipe: Recipe, file_name: str) -> list[str]:
    examples = {f"sbatch {file_name}": "BF16, PyTorch's all-to-all"}
    for pair in recipe.published_numbers:
        precision, _, backend = pair.partition("+")
        if pair != "bf16+standard":
            command = f"PRECISION={precision} EP_BACKEND={backend} sbatch {file_name}"
            examples[command] = f"published: {pair}"
    examples[f"sbatch --nodes=16 {file_name} --training.steps=50"] = "fewer nodes, more steps"
    width = max(map(len, examples))
    return [f"  {command:<{width}}  # {meaning}" for command, meaning in examples.items()]


def _choice(summary: str, default: str, overlays: Sequence[Overlay]) -> dict[str, Any]:
    stack, values = load_stack(), []
    for overlay in overlays:
        text = " ".join(map(shquote, argv_of(stack, {**overlay.expect, **overlay.settings})))
        value = {
            "name": overlay.name,
            "patterns": [overlay.name, *overlay.synonyms],
            "lines": textwrap.wrap(text, 94, break_long_words=False, break_on_hyphens=False),
            "environment": exported(overlay.environment).items(),
        }
        values.append(value)
    variable = overlays[0].kind.upper()
    return {"variable": variable, "summary": summary, "default": default, "overlays": values}
