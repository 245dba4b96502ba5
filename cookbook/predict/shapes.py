"""The sizes of one rank's tensors, from which memory, work and time are computed."""

import functools
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from cookbook.base.family import Model, Sizes
from cookbook.config.cell import Cell
from cookbook.predict import operators
from cookbook.predict.rank import model_of

# How many tokens the fullest EP rank gets under real routing, as a multiple of the mean. This is
# typical of early training, before the bias of auxiliary-loss-free balancing has settled.
UNEVEN_ROUTING = 1.2
# How many tokens `destinations` simulates for group-limited routing; the result is within 0.1%.
_TOKENS = 16_384
# The number of queries per block in FlashAttention-4's backward.
FLASH_BLOCK, FLASH_BLOCK_SM90 = 128, 64


@dataclass(frozen=True)
class Shapes(Sizes):
    """The sizes that one rank handles for one microbatch; `num_experts` is the whole model's."""

    tokens: int  # tokens of the data-parallel rank, shared by its TP ranks
    sequence_tokens: int  # tokens that a TP rank keeps between layers (sequence parallelism)
    sent_tokens: int  # tokens that this rank dispatches
    sent_rows: int  # (token, expert) pairs that this rank dispatches
    rows: int  # (token, expert) pairs that this rank's experts receive
    ranks_per_token: float  # mean number of EP ranks that a token is sent to
    nodes_per_token: float  # mean number of nodes that a token is sent to
    act: int  # bytes per element of an activation
    grad: int  # bytes per element of a reduced gradient
    ep: int
    deepep: bool
    scored_activations: bool
    row_kernels: bool
    keeps_narrow_gradients: bool  # whether a rank alone has the experts' gradients in BF16
    quantized: bool  # whether the routed experts' GEMMs are quantized
    mixed_precision: bool  # whether FSDP casts the parameters
    keeps_gathered: bool  # whether FSDP keeps gathered parameters from the forward to the backward
    autocast: bool  # whether autocast casts the weights: only if none of FSDP, TP, PP is used
    compiled: bool
    saves: frozenset[str]  # operators whose outputs are saved if recomputation is selective
    loss_tokens: int | None  # tokens whose logits exist at the same time; None means all
    loss_compiled: bool
    loss_parallel: bool
    padded_tokens: int | None  # token count padded for FlashAttention-4; None for other kernels

    @property
    def casts_at_each_use(self) -> bool:
        """Whether every operator makes autocast copies of its FP32 inputs and weights."""
        return self.autocast and not self.compiled

    @property
    def hidden_bytes(self) -> float:
        """The bytes of a microbatch's hidden states between two layers."""
        return float(self.act * self.sequence_tokens * self.dim)


def shapes_of(cell: Cell) -> Shapes:
    model, layout, facts = model_of(cell), cell.layout, cell.facts
    batch = facts.microbatch if layout.pp > 1 else facts.local_batch
    tokens = batch * facts.seq_len // layout.cp
    has_own_layer, num_chunks = facts.exchange.has_own_layer, facts.loss_chunks
    loss_parallel = layout.tp > 1 and not facts.is_loss_parallel_off
    # With ETP 1, EP includes the TP ranks, and each TP rank dispatches its share of the tokens.
    sent = tokens // (layout.tp if layout.ep > 1 and layout.etp == 1 else 1)
    routing = facts.routing
    uneven = UNEVEN_ROUTING if routing == "trained" and layout.ep > 1 else 1.0
    nodes = max(layout.ep * layout.etp // cell.cluster.ranks_per_node, 1)
    sizes = asdict(model) | {
        "heads": -(-model.heads // layout.tp),
        "kv_heads": -(-model.kv_heads // layout.tp),
        "dense_hidden": model.dense_hidden // layout.tp,
        "expert_hidden": model.expert_hidden // (layout.tp if layout.ep == 1 else layout.etp),
        "shared_hidden": model.shared_hidden // layout.tp,
        # The chunked loss shards the output layer over TP even without loss parallelism.
        "vocab": model.vocab // (layout.tp if loss_parallel or num_chunks else 1),
    }
    return Shapes(
        **{field.name: sizes[field.name] for field in fields(Sizes)},
        tokens=tokens,
        sequence_tokens=tokens // layout.tp,
        sent_tokens=sent,
        sent_rows=sent * model.top_k,
        rows=int(sent * model.top_k * uneven),
        ranks_per_token=destinations(model, layout.ep, routing),
        nodes_per_token=destinations(model, nodes, routing),
        act=operators.BYTES[facts.param_dtype],
        grad=operators.BYTES[facts.mixed_precision_reduce],
        ep=layout.ep,
        deepep=has_own_layer,
        scored_activations=has_own_layer and facts.score_activations,
        row_kernels=not has_own_layer and facts.row_kernels,
        keeps_narrow_gradients=facts.row_kernels
        and layout.world == 1
        and facts.optimizer == "fused"
        and cell.cluster.gpu is not None,
        quantized=cell.precision.expects("grouped_gemms") != "bf16",
        mixed_precision=layout.has_fsdp,
        # If there is a pipeline, TorchTitan's FSDP does not reshard after the forward by default.
        keeps_gathered=layout.pp > 1 or facts.fsdp_reshard == "never",
        autocast=layout.tp * layout.pp == 1 and not layout.has_fsdp,
        compiled=facts.is_compiled,
        saves=facts.saves,
        loss_tokens=-(-tokens // num_chunks) if num_chunks else None,
        loss_compiled=facts.is_loss_compiled,
        loss_parallel=loss_parallel,
        padded_tokens=padded_tokens(cell, batch) if facts.uses_flash_attention else None,
    )


def padded_tokens(cell: Cell, sequences: int) -> int:
    """Return the number of tokens in `sequences` sequences if documents are padded to whole blocks.

    Every sequence has a fixed number of slots for documents (`bounds_capacity` in
    titan/common/varlen_attention.py). Even an empty slot adds one block.
    """
    length, gpu = cell.facts.seq_len, cell.cluster.gpu
    documents = 1 << (max(length // 128, min(length, 16)) - 1).bit_length()
    block = FLASH_BLOCK_SM90 if gpu and gpu.compute_capability < 10 else FLASH_BLOCK
    return int(sequences * length + (sequences * documents + 1) * block)


@functools.cache
def destinations(model: Model, places: int, routing: str) -> float:
    """Return the mean number of `places` (EP ranks or nodes) that a token is sent to."""
    if places <= 1:
        return 1.0
    experts, top_k, per_place = model.num_experts, model.top_k, model.num_experts // places
    if routing == "round_robin":
        # `_debug_force_load_balance_routing` sends token t to `top_k` consecutive experts, starting
        # with number t * top_k modulo the number of experts.
        starts = [token * top_k % experts for token in range(experts // math.gcd(experts, top_k))]
        visited = [{(one + k) % experts // per_place for k in range(top_k)} for one in starts]
        return sum(map(len, visited)) / len(visited)
    if model.num_expert_groups is None:
        return places * (1 - math.comb(experts - per_place, top_k) / math.comb(experts, top_k))
    chosen = _chosen_experts(model) // per_place
    return float(sum((chosen == place).any(axis=1).mean() for place in range(places)))


@functools.cache
def _chosen_experts(model: Model) -> Any:
    """Simulate TorchTitan's group-limited router; return chosen experts, shape (tokens, top_k)."""
    import numpy as np

    groups, limited = model.num_expert_groups or 1, model.num_limited_groups or 1
    scores = np.random.default_rng(42).random((_TOKENS, groups, model.num_experts // groups))
    # A group's score is the sum of its two best experts' scores. Exclude all but the best groups.
    sums = np.sort(scores, axis=2)[:, :, -2:].sum(axis=2)
    refused = np.argsort(sums, axis=1)[:, : groups - limited]
    np.put_along_axis(scores, refused[:, :, None], -1.0, axis=1)
    return np.argpartition(scores.reshape(_TOKENS, -1), -model.top_k, axis=1)[:, -model.top_k :]


def spared_products(cell: Cell, s: Shapes, moe: bool) -> list[operators.Operator]:
    """Return a layer's large BF16 GEMMs whose outputs are kept because the save list has `mm`."""
    # Only the cookbook's save list affects compiled code; TorchTitan's own list does not.
    if not (moe and s.compiled and cell.facts.saves and "mm" in cell.facts.ac_save_list):
        return []
    found = [*operators.attention(s), *operators.feed_forward(s, moe)]
    large = (one for one in found if one.is_product and one.shape[-1] >= s.dim)
    return [one for one in large if not operators.gemm_format(cell, one)]
