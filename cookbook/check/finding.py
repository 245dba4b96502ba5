"""In: nothing. Out: the word for what a check found; an error refuses, the others inform."""

from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING, HINT = "error", "warning", "hint"


@dataclass(frozen=True)
class Finding:
    """One thing to know about a cell before it runs.

    `reference` is public: a TorchTitan, TorchAO, DeepEP or PyTorch source file, or a page.
    """

    level: str
    rule: str
    option: str
    reason: str
    remedy: str
    reference: str

    def as_mapping(self) -> dict[str, str]:
        """For JSON."""
        return {
            "level": self.level,
            "rule": self.rule,
            "option": self.option,
            "reason": self.reason,
            "remedy": self.remedy,
            "reference": self.reference,
        }

    def __str__(self) -> str:
        place = f"{self.option}: " if self.option else ""
        return f"{place}{self.reason}" + (f"; {self.remedy}" if self.remedy else "")
