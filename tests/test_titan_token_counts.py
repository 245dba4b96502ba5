"""Tokens count for the balance of experts where a forward is training, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.titan


def test_only_training_counts_tokens(patches_applied: set[str]) -> None:
    from torchtitan.models.moe.moe import MoEArgs, build_moe

    from cookbook.titan.tt_0_2_2.token_counts import count_in_training_only

    args = MoEArgs(num_experts=4, num_shared_experts=0, top_k=2, use_grouped_mm=False)
    moe: Any = build_moe(args, 8, 8, "standard")
    with torch.no_grad():
        moe.init_weights(0.02, torch.device("cpu"))
    dense = SimpleNamespace(moe_enabled=False)
    block = SimpleNamespace(moe_enabled=True, moe=moe)
    count_in_training_only(SimpleNamespace(layers={"0": dense, "1": block}))
    tokens = torch.randn(1, 6, 8)
    moe(tokens)
    counted = moe.tokens_per_expert.clone()
    assert counted.sum() == 6 * 2 and not patches_applied
    with torch.no_grad():
        moe(tokens)
    assert moe.tokens_per_expert.tolist() == counted.tolist()
    assert patches_applied == {"tokens-counted-in-training-only"}
    moe(tokens)
    assert moe.tokens_per_expert.tolist() == (2 * counted).tolist()
