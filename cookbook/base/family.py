"""Model families, the sizes of their flavors and their pipeline stages, without importing torch.

`titan/tt_0_2_2/families` describes every family from TorchTitan. `make golden` writes the
descriptions to the stack's table, which the driver reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The widths of a layer, of the whole model or of one TP rank."""

    dim: int
    heads: int
    kv_heads: int  # heads of keys and values; equal to `heads` with multi-head latent attention
    qk_norm: bool  # whether each head's queries and keys are normalized
    q_lora: int  # latent width of queries; 0 for queries without a latent
    kv_lora: int  # latent width of keys and values; 0 without multi-head latent attention
    nope: int  # width of a head's queries and keys without rotary embedding
    rope: int  # width of the rest: with rotary embedding
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
    """A model; its router may be limited to `num_limited_groups` of `num_expert_groups`."""

    n_layers: int
    n_dense_layers: int
    num_expert_groups: int | None
    num_limited_groups: int | None
    attn_type: str  # TorchTitan's name for the flavor's attention
    by_document: bool  # whether tokens attend only within their document

    def is_moe(self, layer: int) -> bool:
        return layer >= self.n_dense_layers

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.nope + self.rope, self.v_head


@dataclass(frozen=True)
class Family:
    """A model family that the cookbook trains."""

    name: str
    title: str  # name in messages
    flavors: Mapping[str, Model]
    # Tensors of a published checkpoint, with names of sizes as dimensions; None for any size.
    weights: Mapping[str, Sequence[str | None]]
    extra_layers: int = 0  # layers that a published checkpoint may have beyond the model's
    has_pipelines: bool = True  # whether TorchTitan can split the model into pipeline stages
    publishes_bias: bool = True  # whether published checkpoints include the routing bias


def is_v_shaped(schedule: str) -> bool:
    """Return whether the stages run down the pipeline ranks and back up, two stages per rank."""
    return schedule.lower() in ("zbvzerobubble", "dualpipev")


def stages_of(schedule: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the stages of pipeline rank `rank` of `ranks`, with `per_rank` stages per rank."""
    if is_v_shaped(schedule):
        return [rank, ranks * per_rank - 1 - rank]
    return [rank + turn * ranks for turn in range(per_rank)]


def loss_rank(schedule: str, ranks: int, world: int) -> int:
    """Return the first global rank of the last pipeline stage, which knows the loss."""
    return 0 if is_v_shaped(schedule) else world // ranks * (ranks - 1)
