"""Where a pipeline schedule puts its stages, and so the loss."""

from __future__ import annotations


def is_v_shaped(schedule: str) -> bool:
    """Return whether stages go down the pipeline ranks and back up, two on each rank."""
    return schedule.lower() in ("zbvzerobubble", "dualpipev")


def stages_of(schedule: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the stages of pipeline rank `rank` of `ranks`, each of which has `per_rank`."""
    if is_v_shaped(schedule):
        return [rank, ranks * per_rank - 1 - rank]
    return [rank + turn * ranks for turn in range(per_rank)]


def loss_rank(schedule: str, ranks: int, world: int) -> int:
    """Return the first global rank of the last pipeline stage, which knows the loss."""
    return 0 if is_v_shaped(schedule) else world // ranks * (ranks - 1)
