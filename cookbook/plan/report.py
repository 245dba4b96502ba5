"""The candidates of a search: a table for people, or one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cookbook.base.tables import text_table
from cookbook.config.cell import ATTENTION, LAYERS_KEPT, Cell
from cookbook.plan.explain import Walk
from cookbook.plan.search import FITS, TIGHT, Candidate, Found
from cookbook.predict.documents import Documents
from cookbook.predict.step import BUBBLE

_HEAD = ["", "tokens/s/GPU", "", "layout", "batch", "recomputation", "precision+EP backend"]
_HEAD += ["GiB", "exposed", "bubble", "limited by"]
_BATCH = "training.local_batch_size"


def degrees(cell: Cell) -> str:
    """Return `TP 2, PP 2 Interleaved1F1B/4, EP 32`; other degrees where they are not 1."""
    layout = cell.layout
    pp = f"PP {layout.pp}" + (f" {_schedule(cell)}" if layout.pp > 1 else "")
    others = {"ETP": layout.etp, "CP": layout.cp, "DP replicate": layout.dp_replicate}
    words = [f"TP {layout.tp}", pp, f"EP {layout.ep}"]
    return ", ".join([*words, *(f"{name} {size}" for name, size in others.items() if size > 1)])


def _schedule(cell: Cell) -> str:
    """Return `1F1B`, or `Interleaved1F1B/4` with the layers of a stage where they are set."""
    name = cell.options["parallelism.pipeline_parallel_schedule"]
    layers = cell.options["parallelism.pipeline_parallel_layers_per_stage"]
    return f"{name}/{layers}" if layers else str(name)


def recomputation(cell: Cell) -> str:
    """Return the mode, or what selective recomputation saves; and how many layers it skips."""
    section = "activation_checkpoint"
    mode = str(cell.options[f"{section}.mode"])
    if mode == "memory_budget":
        mode += f" {cell.options[f'{section}.memory_budget']:g}"
    elif cell.saves:
        mode = f"saves {', '.join(sorted(cell.saves))}"
    elif mode == "selective":
        mode = f"1 layer in {cell.options[f'{section}.selective_ac_option']}"
    kept = cell.options[LAYERS_KEPT]
    return f"{mode}; keeps {kept} layers" if kept else mode


def as_mapping(candidate: Candidate, base: Candidate | None = None) -> dict[str, Any]:
    """Return a layout for programs; an unknown value is null. Units are in the names."""
    cell, step = candidate.cell, candidate.step
    layout = cell.layout
    return {
        "precision": cell.precision.name,
        "ep_backend": cell.ep_backend.name,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "pipeline_parallel_schedule": _schedule(cell) if layout.pp > 1 else None,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.etp,
        "data_parallel_replicate_degree": layout.dp_replicate,
        "local_batch_size": cell.options[_BATCH],
        "recomputation": recomputation(cell),
        "attention": cell.options[ATTENTION],
        "verdict": candidate.verdict,
        "memory_gib": round(candidate.memory.total, 1),
        "memory_largest": candidate.memory.largest,
        "step_ms": round(step.step_ms, 1) if step else None,
        "tokens_per_step": round(step.tokens_per_gpu * cell.world) if step else None,
        "tokens_per_second_per_gpu": round(candidate.speed, 1) if step else None,
        "times_the_recipe": candidate.times(base),
        "exposed_ms": round(step.exposed_ms, 1) if step else None,
        "bubble_ms": round(step.terms_ms.get(BUBBLE, 0.0), 1) if step else None,
        "limited_by": step.largest if step else None,
        "terms_ms": {name: round(ms, 1) for name, ms in step.terms_ms.items()} if step else None,
        "unknown": candidate.unknown or None,
    }


def render_json(
    found: Found,
    base: Cell,
    recipe: Candidate | None,
    best: int,
    walk: Walk | None,
    rejected: Sequence[str] = (),
) -> str:
    """Return `{"layouts", "left_out", "recipe", "best", "front", "walk"}`, and where they run.

    Args:
        rejected: values that were asked for and no layout has, with the reason.
    """
    content = {
        "cluster": base.cluster.name,
        "nodes": base.nodes,
        "interrupted": found.interrupted,
        "layouts": _counts(found),
        "left_out": [*rejected],
        "recipe": as_mapping(recipe) if recipe else None,
        "best": [as_mapping(one, recipe) for one in found.ranked()[:best]],
        "front": [as_mapping(one, recipe) for one in found.front()],
        "walk": walk.as_mapping() if walk else None,
    }
    return json.dumps(content, indent=2) + "\n"


def render_text(
    found: Found,
    base: Cell,
    recipe: Candidate | None,
    best: int,
    documents: Documents,
    total: int,
) -> str:
    """Return the best layouts, below the recipe's own."""
    counts, ranked = _counts(found), found.ranked()
    cut = " (interrupted)" if found.interrupted else ""
    rows = [_HEAD, *([_row("recipe", recipe, None)] if recipe else [])]
    rows += [_row(str(place), one, recipe) for place, one in enumerate(ranked[:best], 1)]
    lines = [
        f"{base.recipe.short_name} on {base.nodes} node(s) x {base.cluster.ranks}: "
        f"{counts['looked_at']:,} of {total:,} layouts{cut}; {counts['fit']:,} fit, "
        f"{counts['tight']:,} are tight, {counts['too_large']:,} do not fit",
        f"documents of {documents.mean_tokens:,.0f} tokens on average; "
        "predicted, not measured (docs/evidence/prediction.md)",
        "",
        text_table(rows, align="rrrlrllrrrl"),
    ]
    if not ranked and not counts["fit"]:
        lines.append("no layout fits; use more nodes, or vary what --set holds")
    unknown = {one.unknown for one in found.candidates if one.unknown}
    lines += [f"left out, since {reason}" for reason in sorted(unknown)]
    return "\n".join(lines) + "\n"


def _counts(found: Found) -> dict[str, int]:
    fit, tight = found.count(FITS), found.count(TIGHT)
    too_large = found.looked_at - fit - tight
    return {"looked_at": found.looked_at, "fit": fit, "tight": tight, "too_large": too_large}


def _row(place: str, one: Candidate, base: Candidate | None) -> list[str]:
    step, cell, ratio = one.step, one.cell, one.times(base)
    row = [
        place,
        f"{one.speed:,.0f}" if step else "-",
        f"{ratio:.2f}x" if ratio else "",
        degrees(cell),
        str(cell.options[_BATCH]),
        recomputation(cell),
        cell.pair,
        f"{one.memory.total:.0f}",
    ]
    if step is None:
        return [*row, "-", "-", one.unknown or one.verdict]
    shares = (step.exposed_ms, step.terms_ms.get(BUBBLE, 0.0), step.terms_ms[step.largest])
    exposed, bubble, largest = (f"{ms / step.step_ms:.0%}" for ms in shares)
    return [*row, exposed, bubble, f"{step.largest} ({largest})"]


def published_lines(base: Cell, best: Sequence[Candidate]) -> list[str]:
    """Return how far the best is from what was published for the recipe, pair by pair."""
    if not best or not best[0].step:
        return []
    return [
        f"published {pair}: {number:,.0f} tokens/s/GPU; the first is predicted at "
        f"{best[0].speed / number:.2f}x"
        for pair, number in base.recipe.published_numbers.items()
    ]
