"""Model families, the sizes of their flavors and their pipeline stages, readable without torch.

The training process describes each family (`titan/tt_0_2_2/families`), and `make golden` writes the
descriptions into the stack's table, which the driver reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The widths of a layer, of the whole model or of one TP rank."""

    dim: int
    heads: int
    kv_heads: int  # of keys and values; with multi-head latent attention as many as `heads`
    qk_norm: bool  # each head's queries and keys are normed
    q_lora: int  # ranks of multi-head latent attention; without it `kv_lora` is 0
    kv_lora: int
    nope: int  # of each query and key, the part without and the part with rotary embedding
    rope: int
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
    """A whole model; its router may choose from `num_limited_groups` of `num_expert_groups`."""

    n_layers: int
    n_dense_layers: int
    num_expert_groups: int | None
    num_limited_groups: int | None
    attn_type: str  # TorchTitan's name of the flavor's own attention
    by_document: bool  # tokens attend within their document, not their whole sequence

    def is_moe(self, layer: int) -> bool:
        return layer >= self.n_dense_layers

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.nope + self.rope, self.v_head


@dataclass(frozen=True)
class Family:
    """A model family that the cookbook trains."""

    name: str
    title: str  # its name in messages
    flavors: Mapping[str, Model]
    # Tensors of a published checkpoint, and the sizes that are their dimensions; None for any size.
    weights: Mapping[str, Sequence[str | None]]
    extra_layers: int = 0  # that a published checkpoint may have beyond the model's
    has_pipelines: bool = True  # TorchTitan cuts it into pipeline stages
    publishes_bias: bool = True  # a published checkpoint has a place for the routing bias

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Family":
        """Read a family of a stack's table; sizes that its flavors share are in `shared`."""
        shared, rest = entry["shared"], {key: one for key, one in entry.items() if key != "shared"}
        flavors = {name: Model(**shared, **own) for name, own in entry["flavors"].items()}
        return cls(**{**rest, "flavors": flavors})


def is_v_shaped(schedule: str) -> bool:
    """Return whether stages go down the pipeline ranks and back up, two on each rank."""
    return schedule.lower() in ("zbvzerobubble", "dualpipev")


def stages_of(schedule: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the stages of pipeline rank `rank` of `ranks`, each of which has `per_rank`."""
    if is_v_shaped(schedule):
        return [rank, ranks * per_rank - 1 - rank]
    return [rank + turn * ranks for turn in range(per_rank)]


def loss_rank(schedule: str, ranks: int, world: int) -> int:
    """Return the first global rank of the last pipeline stage, which knows the loss."""
    return 0 if is_v_shaped(schedule) else world // ranks * (ranks - 1)
