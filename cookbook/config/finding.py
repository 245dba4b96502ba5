"""Findings about a cell, the rules that yield them, and the public sources of their facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ERROR, WARNING, HINT = "error", "warning", "hint"

# Public sources, at the versions of the stack.
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan"
TORCHAO = "https://github.com/pytorch/ao/blob/v0.16.0/torchao"
DEEPEP = "https://github.com/deepseek-ai/DeepEP/blob/29d31c095796f3c8ece47ee9cdcc167051bbeed9"
FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute"
PIPELINING = (
    "https://github.com/pytorch/pytorch/blob/v2.10.0/torch/distributed/pipelining/schedules.py"
)


@dataclass(frozen=True)
class Finding:
    """One thing to know about a cell before it runs: an error refuses it, the others inform.

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
        """For JSON."""
        keys = ("level", "rule", "option", "reason", "remedy", "reference")
        return {key: getattr(self, key) for key in keys}

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

    The rule has the generator's name, and its arguments: a cell, and what else its list is given.
    """

    def register(problems: Callable[..., Problems]) -> Rule:
        name = problems.__name__

        def findings(*arguments: Any) -> Iterator[Finding]:
            for option, reason, remedy in problems(*arguments):
                yield Finding(level, name, option, reason, remedy, reference, is_input)

        rules.append(findings)
        return findings

    return register
