"""Plays a pipeline schedule's own list of actions through, with a time for each action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cookbook.predict.pipeline_schedule import Action

# What an action needs of its neighbour: a forward the stage before, a backward the stage behind.
_BACKWARDS = ("B", "I")


@dataclass(frozen=True)
class Played:
    """When the ranks were done, and how long each of them worked; milliseconds."""

    end_ms: float
    busy_ms: tuple[float, ...]

    @property
    def busiest(self) -> int:
        """The rank that works longest."""
        return max(range(len(self.busy_ms)), key=self.busy_ms.__getitem__)

    @property
    def bubble_ms(self) -> float:
        """What the busiest rank waits: the rest is its work."""
        return self.end_ms - self.busy_ms[self.busiest]


def play(
    actions: Sequence[Sequence[Action]],
    times_ms: Mapping[tuple[int, str], float],
    last_stage: int,
    transfer_ms: float,
) -> Played:
    """Let every rank do its actions in order, each as soon as what it needs has arrived.

    Args:
        actions: of every rank: (stage, kind, microbatch).
        times_ms: of an action, by stage and kind.
        transfer_ms: between two stages; the sender goes on meanwhile.
    """
    owner = {stage: rank for rank, own in enumerate(actions) for stage, _, _ in own}
    done: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * len(actions)
    busy = [0.0] * len(actions)
    at = [0] * len(actions)
    waiting = set(range(len(actions)))
    while waiting:
        went_on = False
        for rank in sorted(waiting):
            own = actions[rank]
            while at[rank] < len(own):
                stage, kind, microbatch = own[at[rank]]
                needed = _needed(stage, kind, microbatch, last_stage)
                ready = 0.0
                if needed is not None:
                    if needed not in done:
                        break
                    moved = owner[needed[0]] != rank
                    ready = done[needed] + (transfer_ms if moved else 0.0)
                time_ms = times_ms[stage, kind]
                clock[rank] = max(clock[rank], ready) + time_ms
                busy[rank] += time_ms
                # Both halves that hand on a gradient are one to whoever waits for it.
                done[stage, "B" if kind in _BACKWARDS else kind, microbatch] = clock[rank]
                at[rank] += 1
                went_on = True
            if at[rank] == len(own):
                waiting.discard(rank)
        assert went_on or not waiting, "the schedule waits for itself"
    return Played(max(clock), tuple(busy))


def _needed(stage: int, kind: str, microbatch: int, last_stage: int) -> tuple[int, str, int] | None:
    """The action that must be done before, beyond those of the same rank."""
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage else None
    if kind in _BACKWARDS and stage < last_stage:
        return (stage + 1, "B", microbatch)
    return None
