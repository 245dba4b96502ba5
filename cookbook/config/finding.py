"""One thing to know about a cell before it runs: an error refuses it, the others inform."""

from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING, HINT = "error", "warning", "hint"


@dataclass(frozen=True)
class Finding:
    """One thing to know about a cell before it runs.

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


TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan"
TORCHAO = "https://github.com/pytorch/ao/blob/v0.16.0/torchao"
DEEPEP = "https://github.com/deepseek-ai/DeepEP/blob/29d31c095796f3c8ece47ee9cdcc167051bbeed9"
FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute"
PIPELINING = (
    "https://github.com/pytorch/pytorch/blob/v2.10.0/torch/distributed/pipelining/schedules.py"
)
