"""In: the shapes of one microbatch. Out: the bytes that a layer saves, keeps under recomputation,
and needs.

Counted from `torchtitan/models/deepseek_v3/model/model.py` and `torchtitan/models/moe/moe.py`: a
tensor counts where a backward formula holds it, or a local variable does while the layer runs.
Where the model is compiled, what Inductor fuses and computes again (norms, activations, rotary
embedding) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.check.shapes import Shapes


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one microbatch.

    `saved` is all that backward needs beyond the layer's input; `selected` is what selective
    recomputation of operations keeps instead, `selected_of_saved` how much of `saved` that spares;
    `temporary` is what is needed besides at the fullest moment.
    """

    input: float
    saved: float
    selected: float
    selected_of_saved: float
    temporary: float


def layer_bytes(shapes: Shapes, moe: bool) -> LayerBytes:
    """A layer with routed experts, or a dense one."""
    attention = _attention(shapes)
    feed_forward = _moe(shapes) if moe else _dense(shapes)
    return LayerBytes(
        input=shapes.sequence_tokens * shapes.dim * shapes.act,
        saved=attention.saved + feed_forward.saved,
        selected=attention.selected + feed_forward.selected,
        selected_of_saved=attention.selected_of_saved + feed_forward.selected_of_saved,
        temporary=max(attention.temporary, feed_forward.temporary),
    )


def _attention(s: Shapes) -> LayerBytes:
    """Multi-head latent attention, the residual behind it, and both norms' outputs."""
    head = s.nope + s.rope
    latent = s.q_lora + s.kv_lora + s.rope
    if not s.compiled:
        # The normed latents are kept too.
        latent += s.q_lora + s.kv_lora
    queries = s.heads * head
    # Keys are copied together from two parts; values are a view into what keys were cut from.
    keys, values = s.heads * head, s.heads * (s.nope + s.v_head)
    out = s.heads * s.v_head
    elements = s.tokens * (2 * s.dim + latent + queries + keys + values + 2 * out)
    elements += s.sequence_tokens * s.dim
    softmax = 4.0 * s.tokens * s.heads
    # Selective recomputation sees only what is not compiled: every second matrix product and the
    # attention itself.
    matrix_products = latent + queries + values + s.dim
    selected = 0.0 if s.compiled else s.act * s.tokens * (matrix_products / 2 + out) + softmax
    return LayerBytes(
        input=0,
        saved=s.act * elements + softmax,
        selected=selected,
        selected_of_saved=selected,
        temporary=s.act * s.tokens * (2 * queries + values + out),
    )


def _activations(s: Shapes) -> int:
    """How many tensors of the hidden size SwiGLU saves: gate and up; eager also SiLU and the
    product.
    """
    return 2 if s.compiled else 4


def _dense(s: Shapes) -> LayerBytes:
    hidden = float(s.act * s.tokens * s.dense_hidden)
    selected = hidden if s.compiled else 1.5 * hidden
    return LayerBytes(
        input=0,
        saved=_activations(s) * hidden + s.act * s.sequence_tokens * s.dim,
        selected=selected,
        selected_of_saved=selected,
        temporary=3 * hidden,
    )


def _moe(s: Shapes) -> LayerBytes:
    """Router, dispatch, grouped GEMMs, combine and the shared expert."""
    router = s.tokens * (2 * 4 * s.num_experts + 3 * 8 * s.top_k)
    shared = s.act * s.tokens * (_activations(s) * s.shared_hidden + s.dim)
    experts = s.act * s.rows * (s.dim + _activations(s) * s.expert_hidden)
    # One row a (token, expert) pair; under TP the standard path fills rows for all tokens.
    sent = float(s.act * s.sent_rows * s.dim)
    all_rows = float(s.tokens * s.top_k * s.dim)
    if s.deepep:
        received = s.act * s.sent_tokens * s.ranks_per_token * s.dim
        grouped = float(s.act * s.rows * s.dim)
        return LayerBytes(
            input=0,
            # The experts' outputs are kept for the gradient of their scores.
            saved=router + shared + experts + grouped,
            selected=received + s.act * s.sent_tokens * s.dim,
            selected_of_saved=0,
            temporary=max(
                2 * received + s.act * s.tokens * s.dim,
                2 * grouped + 3 * s.act * s.rows * s.expert_hidden,
            ),
        )
    if s.score_first:
        weighted = 4.0 * s.sent_rows * s.dim
        forward = 2 * sent + s.act * all_rows
        backward = weighted + s.act * all_rows
    else:
        # Outputs are put back in the tokens' order and weighted in FP32, by a batched product that
        # keeps its operand.
        weighted = 4.0 * all_rows
        # `routed_input`, `routed_output` and the unsorted rows live to the end of MoE.forward.
        forward = 2 * sent + s.act * all_rows + 4 * s.tokens * s.dim
        backward = (4 + s.act) * all_rows + 4 * s.tokens * s.dim
    exchanged = s.act * (s.rows + s.sent_rows) * s.dim if s.ep > 1 else 0.0
    return LayerBytes(
        input=0,
        saved=router + shared + experts + weighted,
        selected=exchanged + (0 if s.compiled else shared / 4),
        selected_of_saved=0 if s.compiled else shared / 4,
        temporary=max(forward, backward),
    )
