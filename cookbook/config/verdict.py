"""The verdict of a cell: by the rules, as TorchTitan builds it, and in this environment."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, WARNING, Finding
from cookbook.config.validate import validation_errors
from cookbook.config.validate.here import missing_here


@dataclass(frozen=True)
class Verdict:
    """Why a cell may not run, in three parts; a part that nobody looked at is None.

    Attributes:
        rules: errors that hold anywhere.
        built: errors of the model that TorchTitan builds on the CPU.
        here: what this environment lacks: errors where the job would run in it, else warnings.
    """

    rules: tuple[Finding, ...]
    built: tuple[Finding, ...] | None = None
    here: tuple[Finding, ...] | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them."""
        return (*self.rules, *(self.built or ()), *(self.here or ()))

    @property
    def errors(self) -> list[Finding]:
        """What refuses the cell."""
        return [finding for finding in self.findings if finding.level == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """What this environment lacks where the job runs elsewhere."""
        return [finding for finding in self.findings if finding.level == WARNING]

    @property
    def refused(self) -> str | None:
        """Why the cell may not run; None where it may."""
        return str(self.errors[0]) if self.errors else None

    @property
    def parts(self) -> str:
        """Which parts were looked at, and which not."""
        parts = {"the rules": self.rules, "TorchTitan's build": self.built}
        parts["this environment"] = self.here
        seen = [name for name, part in parts.items() if part is not None]
        unseen = [name for name, part in parts.items() if part is None]
        return f"looked at: {', '.join(seen)}" + (f"; not: {', '.join(unseen)}" if unseen else "")


def judge(cell: Cell, *, is_submitted: bool = False) -> Verdict:
    """The verdict before anything is built; `check` adds what TorchTitan builds."""
    rules = tuple(validation_errors(cell))
    # A layout that does not divide, or another wrong value, is all there is to say.
    here = () if any(one.is_input for one in rules) else tuple(missing_here(cell, is_submitted))
    return Verdict(rules, here=here)
