"""Renders the script that trains a cell.

The only module that renders scripts. Templates lay out; every decision is taken in Python, and
every value passes the `shquote` filter, so that what stands in YAML reaches torchrun's argv
unchanged.
"""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import jinja2

from cookbook.base.paths import ROOT, TEMPLATES
from cookbook.config.cell import Cell, train_argv
from cookbook.config.cluster import Cluster
from cookbook.config.names import reference
from cookbook.launch.header import sbatch_lines

_PLAIN_NAME = re.compile(r"[\w.+-]+", re.ASCII)


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
    environment.filters["shquote"] = shquote
    return environment


def shquote(value: object) -> str:
    """`value` as one word of bash, quoted also where a reader could misread it (`a,b`, `=a`)."""
    text = str(value)
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and ("," in text or text[0] == "=") else quoted


def render_script(cell: Cell, root: Path = ROOT, file_name: str = "train.sh") -> str:
    """The script of one cell: `submit.py render` prints it, and the job runs the same bytes.

    It calls itself `file_name` in what it says, if that has no character which bash would read.
    """
    runner = "sbatch" if cell.cluster.scheduler == "slurm" else "bash"
    if not _PLAIN_NAME.fullmatch(file_name):
        file_name = "train.sh"
    header = [
        cell.description,
        f"precision {cell.precision.name} ({cell.precision.description}"
        + ("; EMULATED here, for numerics only)" if cell.emulated else ")"),
        f"EP backend {cell.ep_backend.name} ({cell.ep_backend.description})",
        "",
        f"  {runner} {file_name}                        # trains it",
        f"  {runner} {file_name} --training.steps=5     # TorchTitan's options at the end",
        "",
        "Reads: CELL_DIR (a run to resume), COOKBOOK_PREFLIGHT (off: no check of the nodes),",
        "COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on).",
        f"Rendered by `submit.py render` from {cell.recipe.path.name} for {cell.cluster.name}.",
    ]
    return render_template(
        cell.cluster,
        file_name=file_name,
        header=header,
        sbatch=sbatch_lines(cell),
        short_name=cell.recipe.short_name,
        cell_name=cell.name,
        recipe=reference("", cell.recipe.path),
        precision=shquote(reference("precision", cell.precision.path)),
        ep_backend=shquote(reference("ep_backend", cell.ep_backend.path)),
        root=str(root),
        hooks=cell.options.stack.hooks,
        choices=[],
        environment=list(cell.environment.items()),
        environment_from=[
            ("", name, other)
            for overlay in (cell.ep_backend, cell.precision)
            for name, other in overlay.environment_from.items()
        ],
        spare_nodes=cell.spare_nodes,
        train_args=train_argv(cell),
        cluster_args=[],
    )


def render_template(cluster: Cluster, header: list[str], **context: Any) -> str:
    """The template filled with what a cell or a launcher says, and with what its cluster does."""
    container = cluster.container
    mounts = "".join(f",{mount}" for mount in container.mounts) if container else ""
    return (
        _environment()
        .get_template("train.sbatch.j2")
        .render(
            # A description may have several lines; what stands behind one # must stay one.
            header=[" ".join(line.splitlines()) for line in header],
            scheduler=cluster.scheduler,
            cluster=reference("cluster", cluster.path),
            ranks_per_node=cluster.ranks_per_node,
            source=[
                *((file, True) for file in cluster.source),
                *((file, False) for file in cluster.source_if_exists),
            ],
            container=container,
            container_mounts=shquote(mounts) if mounts else "",
            port=cluster.rendezvous_port,
            **context,
        )
    )
