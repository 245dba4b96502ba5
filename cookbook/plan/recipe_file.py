"""Writes a layout as a recipe with comments on each change and on the prediction."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.config.cell import Cell
from cookbook.config.recipe import check_name
from cookbook.plan.report import degrees
from cookbook.plan.search import Candidate, recomputation

# Written anew, or (published numbers) not true of the planned recipe.
_NOT_KEPT = {"name", "short_name", "description", "nodes", "precision", "ep_backend"}
_NOT_KEPT |= {"settings", "path", "published"}


def check_target(path: Path) -> None:
    """Raise InputError for a name that recipes cannot have, or one that is taken."""
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"-o {path}", "is not the name of a YAML file", "as recipes/mine.yaml")
    check_name(f"-o {path}", path.stem)
    if path.exists():
        raise InputError(shown_path(path), "exists already", "choose another name")


def write_recipe(path: Path, candidate: Candidate, base: Cell) -> None:
    """Write `candidate` to `path`; errors are those of `check_target`."""
    check_target(path)
    write_whole(path, render_recipe(path.stem, candidate, base))


def render_recipe(name: str, candidate: Candidate, base: Cell) -> str:
    """Return the text of the file."""
    cell, step, recipe = candidate.cell, candidate.step, candidate.cell.recipe
    lines = [
        f"# {recipe.name} laid out by `submit.py plan`: {degrees(cell)}, {recomputation(cell)}.",
        "#",
        "# Predicted, not measured (docs/evidence/prediction.md). Run it with:",
        f"#     python submit.py run {name}",
    ]
    if step is not None:
        share = step.terms_ms[step.largest] / step.step_ms
        lines.append(
            f"# {candidate.speed:,.0f} tokens/s/GPU, {candidate.memory.total:.0f} GiB a GPU, "
            f"limited by {step.largest} ({share:.0%} of a step)."
        )
    lines += [
        "",
        f'name: "{name}"',
        f'description: "{recipe.short_name} as planned: {degrees(cell)}"',
        f"nodes: {cell.nodes}",
        f"precision: {cell.precision.name}",
        f"ep_backend: {cell.ep_backend.name}",
    ]
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name not in _NOT_KEPT and value != field.default:
            lines.append(f"{field.name}: {_scalar(value)}")
    theirs = {**cell.cluster.settings, **cell.ep_backend.settings, **cell.precision.settings}
    theirs |= cell.precision.emulated or {}
    sections: dict[str, list[str]] = {}
    for option, value in cell.options.values.items():
        if option in theirs or (
            value is None and cell.options.stack.options[option].default is None
        ):
            continue
        section, _, key = option.partition(".")
        own = sections.setdefault(section, ["", f"{section}:"])
        if base.options[option] != value:
            own.append(f"  # {base.recipe.name}: {_scalar(base.options[option])}")
        own.append(f"  {key}: {_scalar(value)}")
    return "\n".join([*lines, *itertools.chain(*sections.values())]) + "\n"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()
