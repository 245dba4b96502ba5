"""What a check of the doctor is, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cookbook.doctor.surroundings import Surroundings

State = Literal["ok", "warning", "problem", "not here"]


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis; `remedy` says what to do where `state` is not ok."""

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A look at one thing.

    Attributes:
        is_for_local: runs on this machine alone need it too.
        node_hours: a job asks it of its nodes before it trains; a node with a problem is left out
            for so long. None where jobs do not ask.
    """

    look: Callable[[Surroundings], Finding | list[Finding]]
    is_for_local: bool
    node_hours: float | None = None

    def findings(self, here: Surroundings) -> list[Finding]:
        found = self.look(here)
        return found if isinstance(found, list) else [found]


def check(
    *, local: bool, node_hours: float | None = None
) -> Callable[[Callable[[Surroundings], Finding | list[Finding]]], Check]:
    """Make a function a check. Defined in a topic of `diagnosis.TOPICS`, it is part of the doctor.

    Args:
        local: whether it is also for those who only run on this machine.
        node_hours: as in `Check`.
    """
    return lambda look: Check(look, local, node_hours)
