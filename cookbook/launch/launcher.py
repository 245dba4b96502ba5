"""Renders `train_671b.sh` and `train_16b.sh`: one script for every cell of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cookbook.config.cell import launch_argv, overlay_argv
from cookbook.config.cluster import Cluster
from cookbook.config.names import names_in, reference
from cookbook.config.options import argv_of, exported
from cookbook.config.overlay import Kind, Overlay, load_ep_backend, load_precision
from cookbook.config.recipe import Recipe
from cookbook.config.resolve import merge_config
from cookbook.config.stack import load_stack
from cookbook.launch.header import sbatch_lines
from cookbook.launch.script import render_template, shquote

_WIDTH = 94


@dataclass(frozen=True)
class _Value:
    """One value of a choice: the words that select it, and what it adds."""

    name: str
    patterns: list[str]
    train_lines: list[str]
    environment: list[tuple[str, str]]
    environment_from: list[tuple[str, str]]


@dataclass(frozen=True)
class _Choice:
    variable: str
    summary: str
    default: str
    values: list[_Value]


def render_launcher(recipe: Recipe, cluster: Cluster, file_name: str) -> str:
    """One script for every cell of a recipe, chosen by PRECISION and EP_BACKEND.

    It names no absolute path, so that it can be checked in; otherwise it is `render_script`'s text.
    """
    stack = load_stack()
    precisions = [load_precision(name) for name in names_in("precision")]
    backends = [load_ep_backend(name) for name in names_in("ep_backend")]
    bf16, standard = load_precision("bf16"), load_ep_backend("standard")
    first = merge_config(recipe, bf16, standard, cluster)
    choices = [
        _choice("precision", "number format of the GEMMs", "${RECIPE:-bf16}", precisions),
        _choice("ep_backend", "how tokens travel to their experts", "standard", backends),
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
    return render_template(
        cluster,
        file_name=file_name,
        header=header,
        sbatch=sbatch_lines(first, job_name=recipe.short_name),
        short_name=recipe.short_name,
        cell_name=None,
        recipe=reference("", recipe.path),
        precision='"${PRECISION}"',
        ep_backend='"${EP_BACKEND}"',
        root=None,
        hooks=stack.hooks,
        choices=choices,
        environment=list(exported(cluster.environment).items()),
        environment_from=[
            (f'"${{{choice.variable}}}" == {value.name} && ', name, other)
            for choice in choices
            for value in choice.values
            for name, other in value.environment_from
        ],
        spare_nodes=recipe.spare_nodes,
        train_args=[
            *launch_argv(stack, recipe.description.partition(":")[0]),
            *argv_of(stack, recipe.settings),
        ],
        cluster_args=argv_of(stack, cluster.settings),
    )


def _examples(recipe: Recipe, file_name: str) -> list[str]:
    examples = [(f"sbatch {file_name}", "BF16, PyTorch's all-to-all")]
    for pair in recipe.published_numbers:
        precision, _, backend = pair.partition("+")
        if pair != "bf16+standard":
            command = f"PRECISION={precision} EP_BACKEND={backend} sbatch {file_name}"
            examples.append((command, f"published: {pair}"))
    examples.append(
        (f"sbatch --nodes=16 {file_name} --training.steps=50", "fewer nodes, more steps")
    )
    width = max(len(command) for command, _ in examples)
    return [f"  {command:<{width}}  # {meaning}" for command, meaning in examples]


def _choice(kind: Kind, summary: str, default: str, overlays: Sequence[Overlay]) -> _Choice:
    stack = load_stack()
    values = [
        _Value(
            name=overlay.name,
            patterns=[overlay.name, *overlay.synonyms],
            # The script names the overlay itself.
            train_lines=_filled(
                [*overlay_argv(stack, overlay)[1:], *argv_of(stack, overlay.settings)]
            ),
            environment=list(exported(overlay.environment).items()),
            environment_from=[
                (name, str(other)) for name, other in overlay.environment_from.items()
            ],
        )
        for overlay in overlays
    ]
    return _Choice(kind.upper(), summary, default, values)


def _filled(words: Sequence[str]) -> list[str]:
    """Return the quoted words in lines: who edits a choice replaces it as a whole."""
    lines: list[str] = []
    for word in map(shquote, words):
        if lines and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
