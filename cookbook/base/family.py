"""Descriptions of model families, which `submit.py` reads without importing torch.

`titan/tt_0_2_2/families` derives the descriptions from TorchTitan's model code. `make golden`
writes them to `options.json` in the stack's package.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A layer's sizes, either in the full model or in one TP rank's shard of it."""

    dim: int
    heads: int
    kv_heads: int  # key/value heads; equal to `heads` with multi-head latent attention (MLA)
    qk_norm: bool = False  # whether each head's queries and keys are normalized
    q_lora: int = 0  # width of the query latent; 0 if queries are projected directly
    kv_lora: int = 0  # width of the key/value latent; 0 without MLA
    nope: int = 0  # width of the part of a query or key head that has no rotary embedding
    rope: int  # width of the part of a query or key head that has rotary embedding
    v_head: int
    dense_hidden: int
    expert_hidden: int
    shared_hidden: int
    num_experts: int
    top_k: int
    vocab: int
    gate_bias: bool


@dataclass(frozen=True, kw_only=True)
class Model(Sizes):
    """One flavor of a model family: its sizes, layers, expert groups and attention."""

    n_layers: int
    n_dense_layers: int = 0
    num_shared_experts: int
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


_GROUPS = "moe_args.num_expert_groups"
_MAY_BE_ZERO = ("n_dense_layers", "q_lora_rank", "moe_args.num_shared_experts", _GROUPS)


@dataclass(frozen=True)
class Family:
    name: str
    title: str  # the family's name in messages
    flavors: Mapping[str, Model]
    # Tensor shapes in published checkpoints. A dimension is a `Model` field's name; None means any.
    weights: Mapping[str, Sequence[str | None]]
    # TorchTitan's name of the model argument that a `Model` field is read from.
    sizes: Mapping[str, str]
    reads_quantized: bool  # whether TorchTitan can dequantize checkpoints published in FP8
    extra_layers: int = 0  # how many multi-token prediction layers published checkpoints have
    has_pipelines: bool = True  # whether TorchTitan can split the model into pipeline stages
    shares_experts: bool = True  # whether published checkpoints have shared experts

    def overridden(self, model: Model, overrides: Mapping[str, int]) -> Model:
        """Return `model` with the sizes in `overrides`, which are keyed by TorchTitan's names."""
        found: dict[str, Any] = {
            field: overrides[name] for field, name in self.sizes.items() if name in overrides
        }
        if not found:
            return model
        model = replace(model, **found)
        shared = model.expert_hidden * model.num_shared_experts
        none: dict[str, Any] = dict.fromkeys(("num_expert_groups", "num_limited_groups"))
        return replace(model, shared_hidden=shared, **({} if model.num_expert_groups else none))

    def impossible(self, model: Model, overrides: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield (name, reason) for each of `overrides` that makes `model` impossible."""
        if (limited := "moe_args.num_limited_groups") in overrides and not model.num_expert_groups:
            yield limited, f"has no effect without groups ({_GROUPS})"
        for name, size in overrides.items():
            if name not in self.sizes.values():
                yield name, f"{self.title} has no such size"
            elif size < (least := 0 if name in _MAY_BE_ZERO else 1):
                yield name, f"found {size}, allowed: {least} and up"
                return
        for fields, is_right, reason in _relations(model):
            # Blame a size that is overridden: the flavor's own are right.
            blamed = [n for n in map(self.sizes.get, fields) if n in overrides and not is_right]
            yield from [(name, reason) for name in blamed[:1] if name]

    def unpublished(self, model: Model) -> str:
        """Return why no published format can hold `model`'s weights; empty if one can."""
        if bool(model.num_shared_experts) != self.shares_experts:
            no = "" if self.shares_experts else "no "
            return f"checkpoints of {self.title} have {no}shared experts"
        if (model.num_expert_groups or 1) > 1 and not model.publishes_bias:
            return "DeepSeek-V2's router ranks groups by their best expert, TorchTitan by two"
        return ""


def _relations(model: Model) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield each rule about sizes: their fields, whether they keep it, and the reason if not."""
    experts, top_k = model.num_experts, model.top_k
    layers = f"{model.n_dense_layers} dense layers of {model.n_layers} leave none with experts"
    yield ("n_dense_layers", "n_layers"), model.n_dense_layers < model.n_layers, layers
    heads = f"{model.kv_heads} key and value heads do not divide {model.heads} heads"
    yield ("kv_heads", "heads"), model.heads % model.kv_heads == 0, heads
    for field in ("dim", "expert_hidden"):
        width = getattr(model, field)
        yield (field,), width % 8 == 0, f"{width}: grouped GEMMs need a multiple of 8 in BF16"
    chosen = f"a token cannot go to {top_k} of {experts} experts"
    yield ("top_k", "num_experts"), top_k <= experts, chosen
    if groups := model.num_expert_groups:
        fields, limited = ("num_expert_groups", "num_experts"), model.num_limited_groups or 0
        sizes = f"{experts} experts do not make {groups} equal groups of at least two"
        yield fields, experts % groups == 0 and experts >= 2 * groups, sizes
        within = experts // groups * limited
        limit = f"{limited} of {groups} groups have {within} experts, and a token goes to {top_k}; "
        is_right = top_k <= within and limited <= groups
        yield (("num_limited_groups", *fields, "top_k"), is_right, f"{limit}{_GROUPS}: 0 lifts it")


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
