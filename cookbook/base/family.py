"""Descriptions of model families, which `submit.py` reads without importing torch.

`titan/tt_0_2_2/families` derives the descriptions from TorchTitan's model code. `make golden`
writes them to a JSON file in `config/tables`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """A layer's sizes, either in the full model or in one TP rank's shard of it."""

    dim: int
    heads: int
    kv_heads: int  # key/value heads; equal to `heads` with multi-head latent attention (MLA)
    qk_norm: bool  # whether each head's queries and keys are normalized
    q_lora: int  # width of the query latent; 0 if queries are projected directly
    kv_lora: int  # width of the key/value latent; 0 without MLA
    nope: int  # width of the part of a query or key head that has no rotary embedding
    rope: int  # width of the part of a query or key head that has rotary embedding
    v_head: int
    dense_hidden: int
    expert_hidden: int
    shared_hidden: int
    num_experts: int
    top_k: int
    vocab: int
    gate_bias: bool


@dataclass(frozen=True)
class Model(Sizes):
    """One flavor of a model family: its sizes, layers, expert groups and attention."""

    n_layers: int
    n_dense_layers: int
    num_expert_groups: int | None
    num_limited_groups: int | None  # how many groups a token's experts may be in; None for any
    attn_type: str  # TorchTitan's name for the flavor's attention
    by_document: bool  # whether tokens attend only within their document
    publishes_bias: bool  # whether published checkpoints contain a routing bias

    def is_moe(self, layer: int) -> bool:
        return layer >= self.n_dense_layers

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.nope + self.rope, self.v_head


@dataclass(frozen=True)
class Family:
    name: str
    title: str  # the family's name in messages
    flavors: Mapping[str, Model]
    # Tensor shapes in published checkpoints. A dimension is a `Model` field's name; None means any.
    weights: Mapping[str, Sequence[str | None]]
    reads_quantized: bool  # whether TorchTitan can dequantize checkpoints published in FP8
    extra_layers: int = 0  # how many multi-token prediction layers published checkpoints have
    has_pipelines: bool = True  # whether TorchTitan can split the model into pipeline stages


def is_v_shaped(schedule: str) -> bool:
    """Return whether `schedule` places stages from the first rank to the last, then back."""
    return schedule.lower() in ("zbvzerobubble", "dualpipev")


def stages_of(schedule: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the stages of pipeline rank `rank`, if each of `ranks` ranks has `per_rank` stages."""
    if is_v_shaped(schedule):
        return [rank, ranks * per_rank - 1 - rank]
    return [rank + turn * ranks for turn in range(per_rank)]


def loss_rank(schedule: str, ranks: int, world: int) -> int:
    """Return the lowest global rank with the last pipeline stage, where the loss is computed."""
    return 0 if is_v_shaped(schedule) else world // ranks * (ranks - 1)
