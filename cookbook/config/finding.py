"""Findings about a cell, the rules that yield them, and the verdict that they add up to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cookbook.base.errors import nearest

ERROR, WARNING, HINT = "error", "warning", "hint"


@dataclass(frozen=True)
class Finding:
    """One finding about a cell before it runs: an error refuses it, the others inform.

    Attributes:
        rule: the name of the rule that found it.
        option: the TorchTitan option to look at; empty where it is none.
        reference: public: a TorchTitan, TorchAO, DeepEP or PyTorch source file, or a page.
        is_input: whether the input is wrong (exit status 2), rather than the cell refused here.
    """

    level: str
    rule: str
    option: str
    reason: str
    remedy: str = ""
    reference: str = ""
    is_input: bool = False

    def as_mapping(self) -> dict[str, str]:
        """Return the finding for JSON."""
        return {key: value for key, value in asdict(self).items() if key != "is_input"}

    def __str__(self) -> str:
        place = f"{self.option}: " if self.option else ""
        return f"{place}{self.reason}" + (f"; {self.remedy}" if self.remedy else "")


# Option, reason, remedy.
Problems = Iterator[tuple[str, str, str]]
Rule = Callable[..., Iterator[Finding]]


def rule(
    rules: list[Rule], *, level: str = ERROR, reference: str = "", is_input: bool = False
) -> Callable[[Callable[..., Problems]], Rule]:
    """Append a generator of (option, reason, remedy) to `rules`, as one that yields findings.

    The rule has the generator's name and arguments: a cell, and further ones of its list.
    """

    def register(problems: Callable[..., Problems]) -> Rule:
        name = problems.__name__

        def findings(*arguments: Any) -> Iterator[Finding]:
            for option, reason, remedy in problems(*arguments):
                yield Finding(level, name, option, reason, remedy, reference, is_input)

        rules.append(findings)
        return findings

    return register


def unknown(option: str, found: str, known: Collection[str]) -> tuple[str, str, str]:
    """Return the problem of a value that is not in `known`."""
    close = nearest(found, known)
    remedy = f"did you mean {close[0]!r}?" if close else "choose one of these"
    return option, f"found {found!r}, allowed: {', '.join(known)}", remedy


@dataclass(frozen=True)
class Verdict:
    """Why a cell may not run, in three parts; a part that was not looked at is None.

    Attributes:
        rules: errors that hold anywhere.
        built: errors of the model that TorchTitan builds on the CPU.
        here: packages and files that this environment lacks: errors where the job would run in it,
            else warnings.
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
        """The findings that refuse the cell."""
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
        seen = ", ".join(name for name, part in parts.items() if part is not None)
        unseen = ", ".join(name for name, part in parts.items() if part is None)
        return f"looked at: {seen}" + (f"; not: {unseen}" if unseen else "")
