"""Where a pipeline schedule puts its stages, and so the loss: the one place that knows it."""

from __future__ import annotations

# TorchTitan reads a schedule's name in any case.
_V_SHAPED = ("zbvzerobubble", "dualpipev")


def is_v_shaped(schedule: str) -> bool:
    """Whether stages go down the pipeline ranks and back up, two on each rank."""
    return schedule.lower() in _V_SHAPED


def stages_of(schedule: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """The stages of pipeline rank `rank` of `ranks`, each of which has `per_rank`."""
    if is_v_shaped(schedule):
        return [rank, ranks * per_rank - 1 - rank]
    return [rank + turn * ranks for turn in range(per_rank)]


def loss_rank(schedule: str, ranks: int, world: int) -> int:
    """The global rank that knows the loss: the first of the pipeline rank with the last stage.

    Args:
        ranks: the pipeline's degree, 1 for none.
        world: ranks of the job.
    """
    return 0 if is_v_shaped(schedule) else world // ranks * (ranks - 1)
