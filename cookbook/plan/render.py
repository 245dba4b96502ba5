"""Render layouts as a table for people or JSON for programs, with the commands that train them."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from cookbook.base.tables import text_table
from cookbook.config.cell import Cell
from cookbook.config.recipe import reference
from cookbook.config.resolve import merge_config
from cookbook.plan.search import Candidate, SearchResult, recomputation
from cookbook.predict.hardware import Documents, attended_text
from cookbook.predict.step import BUBBLE

_HEAD = ["", "tokens/s/GPU", "", "layout", "batch", "recomputation", "precision+EP backend"]
_HEAD += ["GiB", "exposed", "bubble", "limited by"]
_COMMANDS = 3  # predictions are off by some percent: more layouts than one are worth a run


def degrees(cell: Cell) -> str:
    """Describe a layout, for example as `TP 2, PP 2 1F1B, EP 32`."""
    layout, schedule = cell.layout, _schedule(cell)
    pp = f"PP {layout.pp} {schedule}" if schedule else "PP 1"
    others = {"ETP": layout.etp, "CP": layout.cp, "DP replicate": layout.dp_replicate}
    words = [f"TP {layout.tp}", pp, f"EP {layout.ep}"]
    return ", ".join([*words, *(f"{name} {size}" for name, size in others.items() if size > 1)])


def _schedule(cell: Cell) -> str | None:
    if cell.layout.pp == 1:
        return None
    name, layers = cell.facts.schedule, cell.facts.layers_per_stage
    return f"{name}/{layers}" if layers else name


def as_mapping(candidate: Candidate, base: Candidate | None = None) -> dict[str, Any]:
    """Return a layout as JSON data, with its speed relative to `base`; unknown values are None."""
    cell, layout = candidate.cell, candidate.cell.layout
    step = None if candidate.weights else candidate.step
    terms_ms = {name: round(ms, 1) for name, ms in step.terms_ms.items()} if step else None
    return {
        "precision": cell.precision.name,
        "ep_backend": cell.ep_backend.name,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "pipeline_parallel_schedule": _schedule(cell),
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.etp,
        "data_parallel_replicate_degree": layout.dp_replicate,
        "local_batch_size": cell.facts.local_batch,
        "recomputation": recomputation(cell),
        "attention": cell.facts.attention,
        "verdict": candidate.verdict,
        "memory_gib": round(candidate.memory.total, 1),
        "memory_largest": candidate.memory.largest,
        "step_ms": round(step.step_ms, 1) if step else None,
        "tokens_per_step": round(step.tokens_per_gpu * cell.world) if step else None,
        "tokens_per_second_per_gpu": round(candidate.speed, 1) if step else None,
        "times_the_recipe": candidate.times(base),
        "weighed_as": candidate.weights or None,
        "exposed_ms": round(step.exposed_ms, 1) if step else None,
        "bubble_ms": terms_ms.get(BUBBLE, 0.0) if terms_ms else None,
        "limited_by": step.largest if step else None,
        "terms_ms": terms_ms,
        "unknown": candidate.unknown or None,
        "command": command_of(cell),
    }


def render_json(
    found: SearchResult,
    base: Cell,
    recipe: Candidate | None,
    best: int,
    rejected: Sequence[str] = (),
) -> str:
    """Return the results as JSON."""
    content = {
        "cluster": base.cluster.name,
        "nodes": base.nodes,
        "layouts": found.counts(),
        "left_out": [*rejected],
        "recipe": as_mapping(recipe) if recipe else None,
        "best": [as_mapping(one, recipe) for one in found.ranked()[:best]],
    }
    return json.dumps(content, indent=2) + "\n"


def render_text(
    found: SearchResult,
    base: Cell,
    recipe: Candidate | None,
    best: int,
    documents: Documents | None,
    total: int,
    rejected: Sequence[str] = (),
) -> str:
    """Return a table of the recipe's layout and the fastest layouts, at most `best` of them."""
    counts, ranked = found.counts(), found.ranked()
    rows = [_HEAD, *([_row("recipe", recipe, None)] if recipe else [])]
    rows += [_row(str(place), one, recipe) for place, one in enumerate(ranked[:best], 1)]
    lines = [
        f"{base.recipe.short_name} on {base.nodes} node(s) x {base.cluster.ranks}: "
        f"{counts['looked_at']:,} of {total:,} layouts; {counts['fit']:,} fit, "
        f"{counts['tight']:,} are tight, {counts['too_large']:,} do not fit",
        f"attention: {attended_text(documents, base.facts.seq_len)}",
        "predicted, not measured (docs/evidence/prediction.md)" + _weighed(base, ranked),
        "",
        text_table(rows, align="rrrlrllrrrl"),
    ]
    first = enumerate(ranked[: min(best, _COMMANDS)], 1)
    lines += [f"{place}: {command_of(one.cell)}" for place, one in first]
    if not ranked and not counts["fit"]:
        lines.append("no layout fits; use more nodes, or vary what --set fixes")
    unknown = {one.unknown for one in found.candidates if one.unknown}
    lines += [f"left out, since {reason}" for reason in sorted(unknown)]
    lines += [f"left out: {one}" for one in rejected]
    published = base.recipe.published_on(base.cluster.gpu, base.world)
    for pair, number in published.items() if ranked else ():
        ratio = f"{ranked[0].speed / number:.2f}x"
        lines.append(f"published {pair}: {number:,.0f} tokens/s/GPU; the first is at {ratio}")
    return "\n".join(lines) + "\n"


def _weighed(base: Cell, ranked: Sequence[Candidate]) -> str:
    if not (ranked and ranked[0].weights and base.cluster.gpu):
        return ""
    what = f"the speed of {base.nodes} x {base.cluster.ranks} is unknown (recipes/hardware/)"
    return f"\n{what}: ordered by counted work, weighed as on {ranked[0].weights}"


def _row(place: str, one: Candidate, base: Candidate | None) -> list[str]:
    step, cell, ratio = one.step, one.cell, one.times(base)
    row = [
        place,
        f"{one.speed:,.0f}" if step and not one.weights else "-",
        f"{ratio:.2f}x" if ratio else "",
        degrees(cell),
        str(cell.facts.local_batch),
        recomputation(cell),
        cell.pair,
        f"{one.memory.total:.0f}",
    ]
    if step is None:
        return [*row, "-", "-", one.unknown or one.verdict]
    shares = (step.exposed_ms, step.terms_ms.get(BUBBLE, 0.0), step.terms_ms[step.largest])
    exposed, bubble, largest = (f"{ms / step.step_ms:.0%}" for ms in shares)
    return [*row, exposed, bubble, f"{step.largest} ({largest})"]


def command_of(cell: Cell) -> str:
    """Return the command that trains a layout, with the options that only the layout has."""
    parts = cell.recipe, cell.precision, cell.ep_backend, cell.cluster
    plain, stack = merge_config(*parts), cell.options.stack
    words = ["python", "submit.py", "run", reference("", cell.recipe.path)]
    for part in ("cluster", "precision", "ep_backend"):
        name = reference(part, getattr(cell, part).path)
        words += [f"--{part.replace('_', '-')}", name]
    if cell.nodes != plain.nodes:
        words += ["--nodes", str(cell.nodes)]
    for option in {**plain.options.settings, **cell.options.settings}:
        if (value := cell.options[option]) != plain.options[option]:
            words += ["--set", f"{option}={stack.options[option].as_text(value)}"]
    return shlex.join(words)
