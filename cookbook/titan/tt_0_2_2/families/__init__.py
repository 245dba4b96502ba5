"""The model families that the cookbook trains.

Each family's file holds everything specific to it, in a `FamilyParts` (see `parts.py`).
"""

from cookbook.titan.tt_0_2_2.families.deepseek_v3 import DEEPSEEK_V3
from cookbook.titan.tt_0_2_2.families.parts import FamilyParts
from cookbook.titan.tt_0_2_2.families.qwen3 import QWEN3

FAMILIES: dict[str, FamilyParts] = {parts.name: parts for parts in (DEEPSEEK_V3, QWEN3)}
# TorchTitan's model families that the cookbook refuses, each with the reason.
REFUSED = {
    "gpt_oss": "TorchTitan's GPT-OSS has no pipelines, compilation or DeepEP, and its experts have "
    "biases, which the converters of grouped GEMMs would wrap like weights",
}
