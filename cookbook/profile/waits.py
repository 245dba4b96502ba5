"""How long a rank's communication waited for other ranks: the same calls, matched among ranks.

A collective ends on all its ranks at about the same time, so the rank that came last takes the
least time in it, and what another takes longer, it waited. No common clock is needed. Where few of
a group's ranks were read, this is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cookbook.profile.rank import RankProfile

# A rank that sends waits for its receiver and the other way round: no rank of the two came last.
_ONE_TO_ONE = "pp"


def waits_for_others(profiles: Sequence[RankProfile]) -> list[Mapping[str, float] | None]:
    """Of each rank's exposed communication, by category, about what it waited (ms a step).

    None for a rank of which no call could be matched with another's.
    """
    calls: dict[tuple[object, ...], dict[int, list[float]]] = {}
    for index, profile in enumerate(profiles):
        for call in profile.calls:
            key = (profile.steps, call.step, call.category, *call.key)
            calls.setdefault(key, {}).setdefault(index, []).append(call.duration)
    waited: list[dict[str, float] | None] = [None] * len(profiles)
    for key, by_rank in calls.items():
        category = str(key[2])
        # The n-th call of one is the n-th of the others, if they made equally many.
        if category == _ONE_TO_ONE or len(by_rank) < 2 or len(set(map(len, by_rank.values()))) > 1:
            continue
        least = [min(durations) for durations in zip(*by_rank.values(), strict=True)]
        for index, durations in by_rank.items():
            total = sum(own - last for own, last in zip(durations, least, strict=True))
            found = waited[index] or {}
            found[category] = found.get(category, 0.0) + total
            waited[index] = found
    return [
        _exposed(profile, found) if found is not None else None
        for profile, found in zip(profiles, waited, strict=True)
    ]


def _exposed(profile: RankProfile, waited: Mapping[str, float]) -> dict[str, float]:
    """The part of the waiting that is exposed, as much of it as of the communication as a whole."""
    ran: dict[str, float] = {}
    for call in profile.calls:
        ran[call.category] = ran.get(call.category, 0.0) + call.duration
    return {
        category: profile.counted.get(category, 0.0) * time / ran[category]
        for category, time in waited.items()
        if ran[category]
    }
