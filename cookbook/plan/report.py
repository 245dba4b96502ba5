"""What a search found: a table for people, or one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cookbook.base.tables import text_table
from cookbook.config.cell import Cell
from cookbook.plan.describe import as_mapping, degrees, recomputation, times
from cookbook.plan.explain import Walk
from cookbook.plan.search import FITS, TIGHT, Candidate, Found
from cookbook.predict.documents import Documents

_HEAD = ["", "tokens/s/GPU", "", "layout", "batch", "recomputation", "precision+EP backend"]
_HEAD += ["GiB", "exposed", "bubble", "limited by"]


def render_json(
    found: Found,
    base: Cell,
    recipe: Candidate | None,
    best: int,
    walk: Walk | None,
    left_out: Sequence[str] = (),
) -> str:
    """`{"layouts", "left_out", "recipe", "best", "front", "walk"}`, and where it was searched for.

    Args:
        left_out: what was asked for and no layout has, with the reason.
    """
    content = {
        "cluster": base.cluster.name,
        "nodes": base.nodes,
        "interrupted": found.interrupted,
        "layouts": _counts(found),
        "left_out": [*left_out],
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
    """The best layouts, below the recipe's own."""
    counts = _counts(found)
    ranked = found.ranked()
    lines = [
        f"{base.recipe.short_name} on {base.nodes} node(s) x {base.cluster.ranks}: "
        f"{counts['looked_at']:,} of {total:,} layouts{_cut(found)}; {counts['fit']:,} fit, "
        f"{counts['tight']:,} are tight, {counts['too_large']:,} do not fit",
        f"documents of {documents.mean_tokens:,.0f} tokens on average; "
        "predicted, not measured (docs/time.md)",
        "",
    ]
    rows = [_HEAD, *([_row("recipe", recipe, None)] if recipe else [])]
    rows += [_row(str(place), one, recipe) for place, one in enumerate(ranked[:best], 1)]
    lines.append(text_table(rows, align="rrrlrllrrrl"))
    if not ranked and not counts["fit"]:
        lines.append("no layout fits; use more nodes, or vary what --set holds")
    unknown = {one.unknown for one in found.candidates if one.unknown}
    lines += [f"left out, since {reason}" for reason in sorted(unknown)]
    return "\n".join(lines) + "\n"


def _cut(found: Found) -> str:
    return " (interrupted)" if found.interrupted else ""


def _counts(found: Found) -> dict[str, int]:
    looked_at = len(found.candidates) + found.larger
    fit, tight = found.count(FITS), found.count(TIGHT)
    return {
        "looked_at": looked_at,
        "fit": fit,
        "tight": tight,
        "too_large": looked_at - fit - tight,
    }


def _row(place: str, one: Candidate, base: Candidate | None) -> list[str]:
    step, cell = one.step, one.cell
    ratio = times(one, base)
    row = [
        place,
        f"{step.tokens_per_second_per_gpu:,.0f}" if step else "-",
        f"{ratio:.2f}x" if ratio else "",
        degrees(cell),
        str(cell.options["training.local_batch_size"]),
        recomputation(cell),
        cell.pair,
        f"{one.memory.total:.0f}",
    ]
    if step is None:
        return [*row, "-", "-", one.unknown or one.verdict]
    bubble = step.terms_ms.get("pipeline bubble", 0.0)
    return [
        *row,
        f"{step.exposed_ms / step.step_ms:.0%}",
        f"{bubble / step.step_ms:.0%}",
        f"{step.largest} ({step.terms_ms[step.largest] / step.step_ms:.0%})",
    ]


def published_lines(base: Cell, best: Sequence[Candidate]) -> list[str]:
    """How far the best is from what was published for the recipe, pair by pair."""
    published = base.recipe.published_numbers
    if not published or not best or best[0].step is None:
        return []
    speed = best[0].step.tokens_per_second_per_gpu
    return [
        f"published {pair}: {number:,.0f} tokens/s/GPU; the first is predicted at "
        f"{speed / number:.2f}x"
        for pair, number in published.items()
    ]
