"""Prints the actions of pipeline schedules, using torch's schedule classes.

    python -m cookbook.titan.common.schedules

Each line of standard input is a JSON object: the arguments of `list_actions`. For each, one line of
JSON is printed: the `stages`, `in_flight` and `actions` of every rank, or the text of an exception.

An action is a list [stage, kind, microbatch]. The kinds are F (forward), B (full backward),
I (backward for inputs) and W (backward for weights).
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from cookbook.base.family import stages_of

_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def list_actions(name: str, ranks: int, per_rank: int, microbatches: int) -> list[dict[str, Any]]:
    """Return schedule `name`'s actions, by rank, for `ranks` ranks with `per_rank` stages each."""
    schedule_class: Any = get_schedule_class(name)
    num_stages = ranks * per_rank
    of_ranks = [stages_of(name, rank, ranks, per_rank) for rank in range(ranks)]
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for index in of_ranks[0]
    ]
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    if is_single:
        order = schedule_class(stages[0], n_microbatches=microbatches)._get_pipeline_order()
    else:
        # Skip the sends and receives: they are not needed, and slow to add to long schedules.
        schedule_class._prepare_schedule_with_comms = lambda self, actions, format="": None
        order = schedule_class(stages, n_microbatches=microbatches).pipeline_order
    actions = [rank_actions(order[rank], is_single) for rank in range(ranks)]
    return [
        {"stages": own, "in_flight": in_flight(done, own), "actions": done}
        for own, done in zip(of_ranks, actions, strict=True)
    ]


def rank_actions(order: list[Any], is_single: bool) -> list[list[Any]]:
    """Return a rank's computations in execution order, each as [stage, kind, microbatch].

    Schedules with one stage per rank get their microbatches numbered here, because torch 2.10's
    `Schedule1F1B._get_pipeline_order` numbers the last rank's forwards from 1.
    """
    counts = dict.fromkeys(_KINDS.values(), 0)
    found: list[list[Any]] = []
    for action in order:
        for part in (action.sub_actions or (action,)) if action else ():
            if (kind := _KINDS.get(part.computation_type.name)) is not None:
                microbatch = counts[kind] if is_single else part.microbatch_index
                found.append([part.stage_index, kind, microbatch])
                counts[kind] += 1
    return found


def in_flight(actions: list[list[Any]], stages: list[int]) -> list[list[int]]:
    """Return, for each moment when a rank's memory may peak, the microbatches held per stage."""
    live = dict.fromkeys(stages, 0)
    seen: set[tuple[int, ...]] = set()
    for stage, kind, _ in actions:
        # If the backward is split, its W half frees the microbatch's activations.
        live[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        if kind == "F":
            seen.add(tuple(live.values()))

    def is_exceeded(counts: tuple[int, ...]) -> bool:
        others = (zip(other, counts, strict=True) for other in seen - {counts})
        return any(all(a >= b for a, b in pairs) for pairs in others)

    largest = sorted(counts for counts in seen if not is_exceeded(counts))
    return [list(counts) for counts in largest] or [[1] * len(stages)]


def main() -> None:
    for line in sys.stdin:
        answer: Any
        try:
            answer = list_actions(**json.loads(line))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
