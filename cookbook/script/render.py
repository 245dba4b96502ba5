"""In: a cell, or a recipe and a cluster. Out: the text of a script that trains it.

The only module that uses Jinja. Templates lay out; every decision is taken here, and every value
passes the `shquote` filter, so that what stands in YAML reaches torchrun's argv unchanged.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from cookbook.base.paths import RECIPES, ROOT, TEMPLATES
from cookbook.cells.cell import Cell, resolve_cell
from cookbook.cells.cluster import Cluster
from cookbook.cells.recipe import Overlay, Recipe, load_overlay, names_in
from cookbook.script.header import sbatch_lines
from cookbook.stack.stack import Stack


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["shquote"] = _shquote
    return environment


def _shquote(value: object) -> str:
    """`value` as one word of bash, quoted also where a reader could misread it (`a,b`, `=a`)."""
    text = str(value)
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and ("," in text or text[0] == "=") else quoted


def render_script(cell: Cell, root: Path = ROOT, file_name: str = "train.sh") -> str:
    """The script of one cell: `submit.py render` prints it, and the job runs the same bytes.

    It calls itself `file_name` in what it says, if that has no character which bash would read.
    """
    runner = _runner(cell.cluster)
    if not re.fullmatch(r"[\w.+-]+", file_name):
        file_name = "train.sh"
    header = [
        f"{cell.name}: {cell.recipe.description}",
        f"precision {cell.precision.name} ({cell.precision.description}"
        + ("; EMULATED here, for numerics only)" if cell.emulated else ")"),
        f"EP backend {cell.ep_backend.name} ({cell.ep_backend.description})",
        "",
        f"  {runner} {file_name}                        # trains it",
        f"  {runner} {file_name} --training.steps=5     # TorchTitan's options at the end",
        "",
        "Reads: CELL_DIR (a run to resume), COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on).",
        f"Rendered by `submit.py render` from {cell.recipe.path.name} for {cell.cluster.name}.",
    ]
    return _render(
        cell.cluster,
        file_name=file_name,
        header=header,
        sbatch=sbatch_lines(cell),
        short_name=cell.recipe.short_name,
        cell_name=cell.name,
        recipe_name=cell.recipe.name,
        precision_name=cell.precision.name,
        ep_backend_name=cell.ep_backend.name,
        root=str(root),
        choices=[],
        refused=[],
        environment=list(cell.environment.items()),
        environment_from=[
            *cell.ep_backend.environment_from.items(),
            *cell.precision.environment_from.items(),
        ],
        train_args=train_args(cell),
        cluster_args=[],
        **_ranks(cell),
    )


def train_args(cell: Cell) -> list[str]:
    """The argv words that the cell adds to TorchTitan's, but for the folders of the run."""
    return [
        "--job.custom_config_module=cookbook.titan.stack_2026_02.job_config",
        "--experimental.custom_import=cookbook.titan.stack_2026_02",
        f"--job.description={cell.name}: {cell.recipe.description}",
        f"--cookbook.precision={_asked(cell.precision)}",
        f"--cookbook.ep_backend={_asked(cell.ep_backend)}",
        *(["--cookbook.emulated"] if cell.emulated else []),
        *cell.stack.argv(cell.options),
    ]


def _asked(overlay: Overlay) -> str:
    """What the training process holds itself to; it knows the cookbook's own names."""
    return overlay.name if RECIPES in overlay.path.resolve().parents else ""


@dataclass(frozen=True)
class _Value:
    """One value of a choice: the words that select it, and what it adds."""

    name: str
    patterns: list[str]
    train_args: list[str]
    environment: list[tuple[str, str]]
    environment_from: list[tuple[str, str]]


@dataclass(frozen=True)
class _Choice:
    variable: str
    summary: str
    default: str
    values: list[_Value]


def render_launcher(recipe: Recipe, cluster: Cluster, stack: Stack, file_name: str) -> str:
    """`train_671b.sh`: one script for every cell of a recipe, chosen by PRECISION and EP_BACKEND.

    It names no absolute path, so that it can be checked in; otherwise it is `render_script`'s text.
    """
    precisions = [load_overlay("precision", name, stack) for name in names_in("precision")]
    backends = [load_overlay("ep_backend", name, stack) for name in names_in("ep_backend")]
    base = resolve_cell(
        recipe,
        load_overlay("precision", "bf16", stack),
        load_overlay("ep_backend", "standard", stack),
        cluster,
        stack,
    )
    options = {name: setting.value for name, setting in recipe.settings.items()}
    common = [
        "--job.custom_config_module=cookbook.titan.stack_2026_02.job_config",
        "--experimental.custom_import=cookbook.titan.stack_2026_02",
        f"--job.description={recipe.description}",
        *stack.argv(options),
    ]
    header = [
        recipe.description,
        "",
        *_examples(recipe, file_name),
        "",
        "Variables it reads:",
        f"  PRECISION     {' | '.join(overlay.name for overlay in precisions)}",
        f"  EP_BACKEND    {' | '.join(overlay.name for overlay in backends)}",
        "  RECIPE        the published scripts' name for PRECISION (mxfp8_default, mxfp8_wgrad_hp)",
        "  CELL_DIR      a run to resume; new by default: runs/<recipe>-<job id>/<cell>",
        "  COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns Weights & Biases on), WANDB_PROJECT",
        "",
        f"Rendered by `make golden` from recipes/{recipe.path.name} and",
        f"recipes/cluster/{cluster.path.name}; to change it, edit a copy, or those.",
    ]
    return _render(
        cluster,
        file_name=file_name,
        header=header,
        sbatch=sbatch_lines(base, job_name=recipe.short_name),
        short_name=recipe.short_name,
        cell_name=None,
        recipe_name=recipe.name,
        root=None,
        choices=[
            _choice("PRECISION", "number format of the GEMMs", "bf16", precisions, stack),
            _choice(
                "EP_BACKEND", "how tokens travel to their experts", "standard", backends, stack
            ),
        ],
        refused=_refused(recipe, precisions, backends, cluster, stack),
        environment=list(cluster.environment.items()),
        environment_from=[],
        train_args=common,
        cluster_args=stack.argv(
            {name: setting.value for name, setting in cluster.settings.items()}
        ),
        **_ranks(base),
    )


def _examples(recipe: Recipe, file_name: str) -> list[str]:
    examples = [(f"sbatch {file_name}", "BF16, PyTorch's all-to-all")]
    for pair in recipe.published:
        precision, _, backend = pair.partition("+")
        if pair != "bf16+standard":
            examples.append(
                (
                    f"PRECISION={precision} EP_BACKEND={backend} sbatch {file_name}",
                    f"published: {pair}",
                )
            )
    examples.append(
        (f"sbatch --nodes=16 {file_name} --training.steps=50", "fewer nodes, more steps")
    )
    width = max(len(command) for command, _ in examples)
    return [f"  {command:<{width}}  # {meaning}" for command, meaning in examples]


def _choice(
    variable: str, summary: str, default: str, overlays: list[Overlay], stack: Stack
) -> _Choice:
    section = {"PRECISION": "precision", "EP_BACKEND": "ep_backend"}[variable]
    values = [
        _Value(
            name=overlay.name,
            patterns=[overlay.name, *overlay.synonyms],
            train_args=[
                f"--cookbook.{section}={overlay.name}",
                *stack.argv({name: setting.value for name, setting in overlay.settings.items()}),
            ],
            environment=list(overlay.environment.items()),
            environment_from=list(overlay.environment_from.items()),
        )
        for overlay in overlays
    ]
    shown = "${RECIPE:-bf16}" if variable == "PRECISION" else default
    return _Choice(variable, summary, shown, values)


def _refused(
    recipe: Recipe,
    precisions: list[Overlay],
    backends: list[Overlay],
    cluster: Cluster,
    stack: Stack,
) -> list[tuple[list[str], str]]:
    """Pairs that cannot run, by their reason."""
    pairs: dict[str, list[str]] = {}
    for precision in precisions:
        for backend in backends:
            cell = resolve_cell(recipe, precision, backend, cluster, stack)
            if cell.refused:
                pairs.setdefault(cell.refused, []).append(f"{precision.name}+{backend.name}")
    return [(names, reason) for reason, names in pairs.items()]


def _ranks(cell: Cell) -> dict[str, Any]:
    """The world's size, and which ranks the log shows: the first, and the one with the loss."""
    loss_rank = cell.layout.loss_rank
    local = sorted({0, loss_rank % cell.cluster.ranks_per_node})
    return {
        "world": cell.world,
        "log_ranks": ",".join(str(rank) for rank in sorted({0, loss_rank})),
        "shown_ranks": ",".join(str(rank) for rank in local),
    }


def _runner(cluster: Cluster) -> str:
    return "sbatch" if cluster.scheduler == "slurm" else "bash"


def _render(cluster: Cluster, header: list[str], **context: Any) -> str:
    variables: Mapping[str, Any] = {
        # A description may have several lines; what stands behind one # must stay one.
        "header": [" ".join(line.splitlines()) for line in header],
        "scheduler": cluster.scheduler,
        "cluster_name": cluster.name,
        "device": cluster.device,
        "ranks_per_node": cluster.ranks_per_node,
        "max_restarts": cluster.max_restarts,
        "source": cluster.source,
        "container": cluster.container,
        "container_mounts": _shquote("".join(f",{mount}" for mount in cluster.container.mounts))
        if cluster.container and cluster.container.mounts
        else "",
        "port": cluster.rendezvous_port,
        **context,
    }
    return _environment().get_template("train.sbatch.j2").render(variables)
