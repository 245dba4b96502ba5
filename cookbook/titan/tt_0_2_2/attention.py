"""Models with a choice of attention: that of their flavor, or FlashAttention-4.

TorchTitan builds the model class, asks it for masks and splits it over pipeline stages like its
own. Under FlashAttention-4 (`common/varlen_attention.py`) the mask is the end of each document, by
the rule of the mask that it replaces. Everything else of a layer is TorchTitan's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torchtitan.models.attention import FlexAttentionWrapper, ScaledDotProductAttentionWrapper
from torchtitan.protocols.model import ModelProtocol

from cookbook.titan.common import varlen_attention
from cookbook.titan.common.varlen_attention import (
    AttendedLength,
    bounds_capacity,
    cumulative_lengths,
    document_bounds,
    document_ends,
)
from cookbook.titan.tt_0_2_2.versions import refuse

FLAVOR = "flavor"
FLASH_ATTENTION_4 = varlen_attention.FLASH_ATTENTION_4

# (queries and keys, values) of the families. FlashAttention-4 has other head dimensions, whose
# gradients have been wrong on some GPUs; none of them was compared with a reference here.
_HEAD_DIMS = ((192, 128), (128, 128))

# The names of TorchTitan's own kinds of attention, by their module.
_OWN = {FlexAttentionWrapper: "flex", ScaledDotProductAttentionWrapper: "sdpa"}

# Filled while the model trains: TorchTitan's own attention that ran, and the mask it ran with.
_ran: set[str] = set()
_attended = AttendedLength()


def observe_attention() -> tuple[frozenset[str], float | None]:
    """Return the kinds of attention in this rank's first step, and the mean attended length.

    Wait for the GPU, and stop counting.
    """
    return frozenset(_ran | varlen_attention.ran), _attended.close()


def chosen_attention(model_parts: Iterable[nn.Module]) -> frozenset[str]:
    """Return the kinds of attention of a model that has not run."""
    kinds = {**_OWN, DocumentAttentionKernel: FLASH_ATTENTION_4}
    modules = (module for part in model_parts for module in part.modules())
    return frozenset(kinds[type(module)] for module in modules if type(module) in kinds)


def choose_attention(model_args: Any, job_config: Any) -> None:
    """Apply `model.attention` before a model is built, or end the run where it cannot be."""
    model_args.attention = job_config.model.attention
    if model_args.attention == FLAVOR:
        return
    if job_config.parallelism.context_parallel_degree > 1:
        raise refuse(
            f"model.attention={FLASH_ATTENTION_4} computes a sequence on one rank, and "
            "parallelism.context_parallel_degree > 1 cuts it over several; set it to 1"
        )
    reason = varlen_attention.why_not()
    if model_args.head_dims not in _HEAD_DIMS:
        *allowed, found = ("/".join(map(str, dims)) for dims in (*_HEAD_DIMS, model_args.head_dims))
        reason = (
            f"it is for heads of {' or '.join(allowed)} (queries and keys/values), this model has "
            f"{found}"
        )
    if reason:
        raise refuse(
            f"model.attention={FLASH_ATTENTION_4}: {reason}; leave it out, or set "
            f"model.attention={FLAVOR}"
        )
    # TorchTitan asks only models of this type for masks.
    model_args.attn_type = "flex"


class DocumentAttentionKernel(nn.Module):
    """Replaces TorchTitan's FlexAttentionWrapper, where its TP plan makes q, k and v local."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Take and return (batch, heads, length, head_dim), as FlexAttentionWrapper does."""
        batch, _, length, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = varlen_attention.varlen_attention(q, k, v, cu_seqlens, length, scale)
        return out.unflatten(0, (batch, length)).transpose(1, 2)


class AttentionChoice(ModelProtocol):
    """Mixed into a TorchTitan model, which gets the attention that its arguments name.

    Attributes:
        document_attention: the family's attention layer for cumulative lengths.
        op_sac_save_list: TorchTitan's list of operators that selective recomputation saves.
    """

    document_attention: type[nn.Module]
    op_sac_save_list: set[Any]

    def __init__(self, model_args: Any) -> None:
        super().__init__(model_args)
        self.flash_attention_4 = getattr(model_args, "attention", FLAVOR) == FLASH_ATTENTION_4
        self.own_attention = _OWN[type(self.layers["0"].attention.inner_attention)]
        if not self.flash_attention_4:
            return
        for block in self.layers.values():
            block.attention = self.document_attention(model_args)
        # Selective recomputation saves its output; TorchTitan adds DeepEP's operators like this.
        self.op_sac_save_list.add(torch.ops.cookbook.varlen_attention.default)

    def get_attention_masks(
        self,
        input_batch: torch.Tensor,
        tokenizer: Any,
        extra_inputs: dict[str, torch.Tensor] | None = None,
    ) -> Any:
        """Return the mask of a batch (batch, length): a BlockMask, or the ends of the documents.

        The ends, (batch, documents), are split by rows for a pipeline's microbatches, on every
        stage alike.
        """
        if self.training and _attended.is_open:
            _attended.add(self._document_ends(input_batch, tokenizer))
        if not self.flash_attention_4:
            return super().get_attention_masks(input_batch, tokenizer, extra_inputs)
        ends = self._document_ends(input_batch, tokenizer)
        # This waits for the GPU, which is idle: the step began with a sum over ranks.
        documents = int(ends.sum(dim=1).max())
        return document_bounds(ends, bounds_capacity(documents, ends.shape[1]))

    def _document_ends(self, batch: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        by_document = self.model_args.attn_mask_type == "block_causal"
        assert tokenizer.eos_id is not None or not by_document
        return document_ends(batch, tokenizer.eos_id if by_document else None)

    def forward(
        self,
        tokens: torch.Tensor,
        attention_masks: Any = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run TorchTitan's forward of a whole model or of one pipeline stage."""
        if self.flash_attention_4:
            attention_masks = cumulative_lengths(attention_masks)
            # A batch with very many documents has a longer row: recompile, never dynamically.
            torch._dynamo.mark_static(attention_masks, 0)
        else:
            _ran.add(self.own_attention)
            if attention_masks is None and self.training and _attended.is_open:
                # Without a mask each sequence is one document. Under context parallelism a rank's
                # part of it attends to the parts of other ranks.
                _attended.add_whole(len(tokens), self.model_args.max_seq_len)
        return super().forward(tokens, attention_masks, positions)
