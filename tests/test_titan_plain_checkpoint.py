"""What a checkpoint holds of weights that quantize themselves: the weights, on the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan


def saved_state() -> dict[str, Any]:
    """Types in a state dict, and what loading into it changes: plain weights and sharded ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torchao.prototype.moe_training.conversion_utils import MoEScalingType
    from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor

    from cookbook.titan.tt_0_2_2.plain_checkpoint import save_plain_weights

    mesh = init_device_mesh("cpu", (1,))
    data = {name: torch.full((2, 32, 32), 3.0) for name in ("whole", "sharded")}
    quantized = {
        name: ScaledGroupedMMTensor(value, MoEScalingType.MXFP8) for name, value in data.items()
    }
    model = nn.Module()
    model.whole = nn.Parameter(quantized["whole"])
    model.sharded = nn.Parameter(DTensor.from_local(quantized["sharded"], mesh, [Shard(0)]))
    model.bf16 = nn.Parameter(torch.full((2,), 3.0))
    save_plain_weights(model)
    state = model.state_dict()
    types = {
        name: [type(value).__name__, type(getattr(value, "_local_tensor", value)).__name__]
        for name, value in state.items()
    }
    placements = state["sharded"].placements == (Shard(0),)
    # As a checkpoint is loaded: in place.
    for value in state.values():
        getattr(value, "_local_tensor", value).detach().fill_(7.0)
    found = [
        model.whole._data,
        model.sharded.to_local()._data,
        model.bf16,
    ]
    return {
        "types": types,
        "placements": placements,
        "loaded": [float(value.detach().min()) for value in found],
        "still": type(model.whole.data).__name__,
    }


def test_weights_are_saved_and_loaded_without_their_wrapper() -> None:
    (found,) = run_ranks(saved_state, 1)
    assert found["types"] == {
        "whole": ["Tensor", "Tensor"],
        "sharded": ["DTensor", "Tensor"],
        "bf16": ["Tensor", "Tensor"],
    }
    assert found["placements"]
    assert found["loaded"] == [7.0, 7.0, 7.0]
    # The model goes on quantizing.
    assert found["still"] == "ScaledGroupedMMTensor"
