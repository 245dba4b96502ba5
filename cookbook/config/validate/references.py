"""Where the rules find their facts: public sources, at the versions of the stack."""

from __future__ import annotations

TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan"
TORCHAO = "https://github.com/pytorch/ao/blob/v0.16.0/torchao"
DEEPEP = "https://github.com/deepseek-ai/DeepEP/blob/29d31c095796f3c8ece47ee9cdcc167051bbeed9"
FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute"
PIPELINING = (
    "https://github.com/pytorch/pytorch/blob/v2.10.0/torch/distributed/pipelining/schedules.py"
)
