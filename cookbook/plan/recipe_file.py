"""Writes a layout as a recipe with comments on each change and on the prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.config.cell import Cell
from cookbook.config.names import check_name
from cookbook.config.recipe import Recipe
from cookbook.plan.report import degrees, recomputation
from cookbook.plan.search import Candidate

_WIDTH = 100


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
        *_own_keys(recipe),
    ]
    for section, content in _sections(cell).items():
        lines += ["", f"{section}:", *_lines(section, content, base, 1)]
    return "\n".join(lines) + "\n"


# Written anew, or (published numbers) not true of the planned recipe.
_NOT_KEPT = {"name", "short_name", "description", "nodes", "precision", "ep_backend"}
_NOT_KEPT |= {"settings", "path", "published"}


def _own_keys(recipe: Recipe) -> Iterator[str]:
    """Return the recipe's keys beside TorchTitan's options, where they are not the default."""
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name not in _NOT_KEPT and value != field.default:
            yield f"{field.name}: {_scalar(value)}"


def _sections(cell: Cell) -> dict[str, dict[str, Any]]:
    """Return the recipe's own options, nested as in a file; overlays and cluster add theirs."""
    theirs = {
        **cell.cluster.settings,
        **cell.ep_backend.settings,
        **cell.precision.settings,
        **(cell.precision.emulated or {}),
    }
    nested: dict[str, dict[str, Any]] = {}
    for name, value in cell.options.values.items():
        if name in theirs or (value is None and cell.options.stack.options[name].default is None):
            continue
        at = nested
        *sections, key = name.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = value
    return nested


def _lines(place: str, content: Mapping[str, Any], base: Cell, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for key, value in content.items():
        name = f"{place}.{key}"
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(name, value, base, depth + 1)
            continue
        if base.options[name] != value:
            yield f"{indent}# {base.recipe.name}: {_scalar(base.options[name])}"
        yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=_WIDTH * 10)
    return text.removesuffix("...\n").strip()
