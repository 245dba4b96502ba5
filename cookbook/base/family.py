"""Descriptions of model families, which `submit.py` reads without importing torch.

`titan/tt_0_2_2/families` derives the descriptions from TorchTitan's model code. `make golden`
writes them to a JSON file in `config/tables`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


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
_LIMITED = "moe_args.num_limited_groups"


@dataclass(frozen=True)
class Family:
    name: str
    title: str  # the family's name in messages
    flavors: Mapping[str, Model]
    # Tensor shapes in published checkpoints. A dimension is a `Model` field's name; None means any.
    weights: Mapping[str, Sequence[str | None]]
    # TorchTitan's name of the model argument that each `Model` field is read from. Only these
    # arguments can be overridden (`model.overrides`).
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
        groups = model.num_expert_groups or None
        limited = model.num_limited_groups if groups else None
        return replace(
            model, shared_hidden=shared, num_expert_groups=groups, num_limited_groups=limited
        )

    def impossible(
        self, flavor: Model, overrides: Mapping[str, int]
    ) -> Iterator[tuple[str, str, str]]:
        """Yield (name, reason, remedy) for each of `overrides` that TorchTitan cannot build."""
        known, model = sorted({*self.sizes.values()}), self.overridden(flavor, overrides)
        is_small = False
        for name, value in overrides.items():
            least = 0 if name in _MAY_BE_ZERO else 1
            if name not in known:
                yield name, f"{self.title} has no such size", f"it has: {', '.join(known)}"
            elif value < least:
                is_small = True
                yield name, f"found {value}, allowed: {least} and up", ""
        if _LIMITED in overrides and model.num_expert_groups is None:
            yield _LIMITED, "has no effect without groups", f"set {_GROUPS}"
        for fields, reason in () if is_small else _relations(model):
            names = [self.sizes[field] for field in fields if field in self.sizes]
            # Blame a size that was overridden; the flavor's own are right.
            if name := next((name for name in names if name in overrides), ""):
                yield name, reason, ""

    def unpublished(self, model: Model) -> str:
        """Return why no published format can hold `model`'s weights; empty if one can."""
        if bool(model.num_shared_experts) != self.shares_experts:
            have = "have" if self.shares_experts else "have no"
            return f"checkpoints of {self.title} {have} shared experts"
        if (model.num_expert_groups or 1) > 1 and not model.publishes_bias:
            return "DeepSeek-V2's router ranks groups by their best expert, TorchTitan by two"
        return ""


def _relations(model: Model) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the fields of each rule that a model's sizes break, and the reason."""
    experts, top_k, dense = model.num_experts, model.top_k, model.n_dense_layers
    if dense >= model.n_layers:
        reason = f"{dense} dense layers of {model.n_layers} leave no layer with experts"
        yield ("n_dense_layers", "n_layers"), reason
    if model.heads % model.kv_heads:
        reason = f"{model.kv_heads} key and value heads do not divide {model.heads} heads"
        yield ("kv_heads", "heads"), reason
    if model.rope % 2:
        yield ("rope",), f"rotary embedding turns pairs of values, and {model.rope} is odd"
    for field in ("dim", "expert_hidden"):
        if (width := getattr(model, field)) % 8:
            yield (field,), f"{width}: grouped GEMMs need a multiple of 8 (16 bytes of BF16)"
    if top_k > experts:
        yield ("top_k", "num_experts"), f"a token cannot go to {top_k} of {experts} experts"
    if (groups := model.num_expert_groups) is None:
        return
    fields, limited = ("num_expert_groups", "num_experts"), model.num_limited_groups or 0
    if experts % groups or experts < 2 * groups:
        yield fields, f"{groups} groups need a multiple of {groups} experts, at least two a group"
    elif not 1 <= limited <= groups:
        reason = f"a token's experts may be in {limited} of {groups} groups, allowed: 1 to {groups}"
        yield ("num_limited_groups", *fields), reason
    elif top_k > (within := experts // groups * limited):
        reason = f"{limited} of {groups} groups have {within} of {experts} experts, and a token "
        reason += f"goes to {top_k}; {_GROUPS}: 0 lifts the limit"
        yield ("num_limited_groups", *fields, "top_k"), reason


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
