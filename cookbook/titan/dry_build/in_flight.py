"""How many microbatches of a pipeline rank's stages are in flight at once."""

from __future__ import annotations

from typing import Any


def in_flight(actions: list[Any], stages: list[int]) -> list[list[int]]:
    """The largest counts of started and unfinished microbatches, a count for each stage.

    More than one list where one stage has most at one time and another at another.
    """
    live = dict.fromkeys(stages, 0)
    seen: set[tuple[int, ...]] = set()
    flat = [part for action in actions if action for part in (action.sub_actions or (action,))]
    for action in flat:
        kind = action.computation_type.name
        if kind == "FORWARD":
            live[action.stage_index] += 1
            seen.add(tuple(live[stage] for stage in stages))
        # Where the backward comes in two halves, the second one frees.
        elif kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            live[action.stage_index] -= 1
    largest = [
        counts
        for counts in seen
        if not any(
            other != counts and all(a >= b for a, b in zip(other, counts, strict=True))
            for other in seen
        )
    ]
    return [list(counts) for counts in sorted(largest)] or [[1] * len(stages)]
