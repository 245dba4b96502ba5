"""Where an attempt continues, and which damaged checkpoints it passed over: `resume.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.run.folder import Attempt
from cookbook.run.status import read_json


@dataclass(frozen=True)
class PassedOver:
    """A damaged checkpoint, why it is one, and where it lies now."""

    checkpoint: str
    damage: str
    moved_to: str


@dataclass(frozen=True)
class Resumption:
    """Where an attempt continues.

    Attributes:
        attempt: its number.
        step: the last step of the checkpoint that it loads; None where it starts at the beginning.
        passed_over: the newer checkpoints that are damaged.
    """

    attempt: int
    step: int | None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def lines(self) -> list[str]:
        """What a person should know of it."""
        lines = [
            f"attempt {self.attempt} passed over {one.checkpoint}: {one.damage}; "
            f"moved to {one.moved_to}"
            for one in self.passed_over
        ]
        if self.step is not None:
            lines.append(f"attempt {self.attempt} continues after step {self.step}")
        elif self.passed_over:
            lines.append(f"attempt {self.attempt} starts at the beginning: no checkpoint is whole")
        return lines


def write_resumption(attempt: Attempt, resumption: Resumption) -> None:
    """Keep it in the attempt's folder."""
    write_whole(attempt.resumption, json.dumps(asdict(resumption), indent=1) + "\n")


def read_resumptions(attempts: Iterable[Attempt]) -> Iterator[Resumption]:
    """What the attempts kept, in their order; what cannot be read is left out."""
    for attempt in attempts:
        if not attempt.resumption.is_file():
            continue
        try:
            content = read_json(attempt.resumption)
            passed = tuple(PassedOver(**one) for one in content["passed_over"])
            yield Resumption(attempt.number, content["step"], passed)
        except (InputError, KeyError, TypeError):
            continue
