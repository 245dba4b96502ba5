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
    """A look at one thing; `is_for_local` where runs on this machine alone need it too."""

    look: Callable[[Surroundings], Finding | list[Finding]]
    is_for_local: bool

    def findings(self, here: Surroundings) -> list[Finding]:
        found = self.look(here)
        return found if isinstance(found, list) else [found]


def check(*, local: bool) -> Callable[[Callable[[Surroundings], Finding | list[Finding]]], Check]:
    """Make a function a check. Defined in a topic of `diagnosis.TOPICS`, it is part of the doctor.

    Args:
        local: whether it is also for those who only run on this machine.
    """
    return lambda look: Check(look, local)
