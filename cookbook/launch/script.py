"""Render the scripts of cells and recipes, and a cell's sbatch options.

Python makes every decision; the templates only lay out text.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from cookbook.base.paths import ROOT, TEMPLATES
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster, OptionValue
from cookbook.config.recipe import Recipe, load_ep_backend, load_precision, names_in
from cookbook.config.request import request_text
from cookbook.config.resolve import merge_config


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
        "COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on), WANDB_PROJECT.",
        f"Rendered by `submit.py render` from {cell.recipe.path.name} for {cell.cluster.name}.",
    ]
    request = request_text(cell, command_text(cell), [cell.precision, cell.ep_backend])
    return _render(cell, header, request, file_name, sbatch_lines(cell), str(root))


def command_text(cell: Cell) -> str:
    """Return the bash lines that start torchrun for an attempt, for the cell's record."""
    container = cell.cluster.container
    mounts = "".join(f",{mount}" for mount in container.mounts) if container else ""
    return _ENVIRONMENT.get_template("command.sh.j2").render(
        scheduler=cell.cluster.scheduler,
        container=container,
        mounts=shquote(mounts) if mounts else "",
    )


def _render(
    cell: Cell, header: list[str], request: str, file_name: str, sbatch: list[str], root: str | None
) -> str:
    run = cell.recipe.short_name + ("-local" if cell.cluster.scheduler == "local" else "")
    return _ENVIRONMENT.get_template("train.sbatch.j2").render(
        header=[" ".join(line.splitlines()) for line in header],
        request=request,
        file_name=file_name,
        sbatch=sbatch,
        root=root,
        run=run,
        scheduler=cell.cluster.scheduler,
        has_memory=cell.cluster.exclusive,
    )


def sbatch_options(
    cell: Cell, job_name: str | None = None, exclude: Sequence[str] = ()
) -> dict[str, OptionValue]:
    """Return sbatch's options by long name; True marks an option without a value.

    Each node runs one task, since torchrun starts the ranks.
    `exclude`: nodes to exclude in addition to those of the cluster's profile.
    """
    cluster = cell.cluster
    return {
        "job-name": job_name or cell.name,
        "nodes": cell.nodes + cell.spare_nodes,
        "ntasks-per-node": 1,
        **cluster.slurm_options(exclude),
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
    backends = [load_ep_backend(name) for name in names_in("ep_backend")]
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
    first = merge_config(recipe, load_precision("bf16"), load_ep_backend("standard"), cluster)
    overlays = [*precisions, *backends]
    request = request_text(first, command_text(first), overlays, recipe.short_name)
    sbatch = sbatch_lines(first, job_name=recipe.short_name)
    return _render(first, header, request, file_name, sbatch, None)


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
