"""The sizes that the formulas for memory and work speak of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.config.cell import NUM_CHUNKS, ROW_KERNELS, SCORE_ACTIVATIONS, Cell

# With real routing some ranks get more tokens than others; the fullest one decides. Early in
# training, before the bias of the auxiliary-loss-free balancing has settled, a fifth more is
# common.
UNEVEN_ROUTING = 1.2
# Queries that one block of FlashAttention-4's backward takes.
FLASH_BLOCK, FLASH_BLOCK_SM90 = 128, 64
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Shapes:
    """Counts on one rank for one microbatch; `act` and `grad` are bytes of an element.

    `tokens` are those of the rank's data-parallel group member (all TP ranks work on the same
    ones), `sequence_tokens` those that one TP rank keeps between layers (sequence parallelism),
    `sent_rows` the (token, expert) pairs that it sends, `rows` those that its experts get. `saves`
    are the operators whose outputs selective recomputation saves; `loss_tokens` are those whose
    logits exist at a time, None for all. `padded_tokens` are the rows of an FP32 sum that
    FlashAttention-4's backward makes; None where TorchTitan's own attention runs. With `autocast`
    a rank alone casts its weights itself.
    """

    tokens: int
    sequence_tokens: int
    sent_tokens: int
    sent_rows: int
    rows: int
    ranks_per_token: float
    act: int
    grad: int
    dim: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_head: int
    dense_hidden: int
    expert_hidden: int
    shared_hidden: int
    num_experts: int
    top_k: int
    score_first: bool
    vocab: int
    ep: int
    deepep: bool
    scored_activations: bool
    row_kernels: bool
    autocast: bool
    compiled: bool
    saves: frozenset[str]
    loss_tokens: int | None
    loss_compiled: bool
    loss_parallel: bool
    padded_tokens: int | None


def shapes_of(cell: Cell, view: Mapping[str, Any]) -> Shapes:
    """The shapes of a DeepSeek-V3 model's rank; `view` is what `rank_view.view_rank` returned."""
    model, layout = view["model"], cell.layout

    options = cell.options
    pipelined = layout.pp > 1
    batch = options[
        "parallelism.pipeline_parallel_microbatch_size"
        if pipelined
        else "training.local_batch_size"
    ]
    tokens = batch * options["training.seq_len"] // layout.cp
    components = options["compile.components"] if options["compile.enable"] else []
    chunked = options[NUM_CHUNKS] > 0
    loss_parallel = layout.tp > 1 and not options["parallelism.disable_loss_parallel"]
    # The loss in chunks multiplies with this rank's part of the output layer in any case.
    vocab_is_cut = loss_parallel or chunked
    # EP takes ranks of TP where ETP is 1: each TP rank then sends its share of the tokens.
    shares = layout.tp if layout.ep > 1 and layout.etp == 1 else 1
    top_k, experts = model["moe_args.top_k"], model["moe_args.num_experts"]
    sent = tokens // shares
    forced = options["debug.moe_force_load_balance"]
    uneven = 1.0 if forced or layout.ep == 1 else UNEVEN_ROUTING
    expert_tp = layout.tp if layout.ep == 1 else layout.etp
    mixed = view["mixed_precision"]
    return Shapes(
        tokens=tokens,
        sequence_tokens=tokens // layout.tp,
        sent_tokens=sent,
        sent_rows=sent * top_k,
        rows=int(sent * top_k * uneven),
        ranks_per_token=destinations(experts, top_k, layout.ep, forced, groups(model)),
        act=_BYTES[options["training.mixed_precision_param"]]
        if mixed or layout.tp == layout.pp == 1
        else 4,
        grad=_BYTES[options["training.mixed_precision_reduce"]],
        dim=model["dim"],
        heads=-(-model["n_heads"] // layout.tp),
        q_lora=model["q_lora_rank"],
        kv_lora=model["kv_lora_rank"],
        nope=model["qk_nope_head_dim"],
        rope=model["qk_rope_head_dim"],
        v_head=model["v_head_dim"],
        dense_hidden=model["inter_dim"] // layout.tp,
        expert_hidden=model["moe_inter_dim"] // expert_tp,
        shared_hidden=model["moe_inter_dim"] * model["moe_args.num_shared_experts"] // layout.tp,
        num_experts=experts,
        top_k=top_k,
        score_first=model["moe_args.score_before_experts"],
        vocab=model["vocab_size"] // (layout.tp if vocab_is_cut else 1),
        ep=layout.ep,
        deepep=cell.uses_deepep,
        scored_activations=cell.uses_deepep
        and options[SCORE_ACTIVATIONS]
        and not model["moe_args.score_before_experts"],
        row_kernels=not cell.uses_deepep
        and options[ROW_KERNELS]
        and not model["moe_args.score_before_experts"],
        autocast=not mixed and layout.tp == layout.pp == 1,
        compiled="model" in components,
        saves=cell.saves,
        loss_tokens=-(-tokens // options[NUM_CHUNKS]) if options[NUM_CHUNKS] else None,
        loss_compiled="loss" in components,
        loss_parallel=loss_parallel,
        padded_tokens=padded_tokens(cell, batch) if cell.uses_flash_attention else None,
    )


def padded_tokens(cell: Cell, sequences: int) -> int:
    """The tokens of `sequences`, each document rounded up to a block.

    Every sequence has room for a fixed number of documents (`bounds_capacity` in
    titan/common/documents.py), empty ones too.
    """
    length, gpu = cell.options["training.seq_len"], cell.cluster.gpu
    documents = 1 << (max(length // 128, min(length, 16)) - 1).bit_length()
    block = FLASH_BLOCK_SM90 if gpu and gpu.compute_capability < 10 else FLASH_BLOCK
    return int(sequences * length + (sequences * documents + 1) * block)


def groups(model: Mapping[str, Any]) -> tuple[int, int] | None:
    """Into how many groups a router's experts are divided, and from how many a token may choose."""
    if model.get("moe_args.num_expert_groups") is None:
        return None
    return model["moe_args.num_expert_groups"], model["moe_args.num_limited_groups"]


def destinations(
    experts: int, top_k: int, places: int, forced: bool, limited: tuple[int, int] | None
) -> float:
    """How many of `places` (ranks, or nodes, that share the experts equally) a token is sent to.

    Forced balance deals experts out round-robin (`_debug_force_load_balance_routing`), so that a
    token's experts are neighbours and live on as few places as can be. Real routing is taken as a
    uniform choice, within the groups that the router is limited to.
    """
    if places <= 1:
        return 1.0
    per_place = experts // places
    if forced:
        # A token's experts begin at a multiple of top_k, modulo the experts.
        period = experts // math.gcd(experts, top_k)
        starts = [(token * top_k) % experts for token in range(period)]
        return sum(
            len({((start + k) % experts) // per_place for k in range(top_k)}) for start in starts
        ) / len(starts)
    share, pool = 1.0, experts
    if limited is not None and places >= limited[0]:
        share, pool = limited[1] / limited[0], experts * limited[1] // limited[0]
    unchosen = (
        math.comb(pool - per_place, top_k) / math.comb(pool, top_k) if pool > per_place else 0.0
    )
    return places * share * (1 - unchosen)
