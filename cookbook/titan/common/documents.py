"""Where the documents of a batch end, as the attention mask has it.

TorchTitan's rule (`get_document_mask_mod`): an end-of-document token belongs to the document that
it ends; the next document begins after it. No document reaches into another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class AttendedLength:
    """How many keys the tokens of the first batches attended to, summed where they are.

    Attributes:
        keys: int64 scalar, on the device of the batches.
        tokens: how many tokens that was.
        is_open: whether batches are still counted.
    """

    keys: torch.Tensor | int = 0
    tokens: int = 0
    is_open: bool = True

    def add(self, ends: torch.Tensor) -> None:
        """Count a batch; nothing waits for the GPU."""
        self.keys = self.keys + attended_keys(ends)
        self.tokens += ends.numel()

    def add_whole(self, sequences: int, length: int) -> None:
        """Count sequences of one document each; nothing is computed on the GPU."""
        self.keys = self.keys + sequences * (length * (length + 1) // 2)
        self.tokens += sequences * length

    def close(self) -> float | None:
        """Keys per token, waiting for the GPU; None where nothing was counted.

        Whoever counts stops here, so that the steps that follow pay nothing.
        """
        self.is_open = False
        return int(self.keys) / self.tokens if self.tokens else None


def document_ends(tokens: torch.Tensor, eos_id: int | None) -> torch.Tensor:
    """Mark the last token of each document.

    Args:
        tokens: (batch, length), token numbers.
        eos_id: the token that ends a document; None where a sequence is one document.

    Returns:
        (batch, length), bool. The last position of a sequence always ends a document.
    """
    ends = torch.zeros_like(tokens, dtype=torch.bool) if eos_id is None else tokens == eos_id
    ends[:, -1] = True
    return ends


def attended_keys(ends: torch.Tensor) -> torch.Tensor:
    """The number of (query, key) pairs under the causal mask within documents, an int64 scalar."""
    positions = torch.arange(ends.shape[1], device=ends.device).expand_as(ends)
    after_end = torch.where(ends[:, :-1], positions[:, 1:], 0)
    starts = torch.nn.functional.pad(after_end, (1, 0)).cummax(dim=1).values
    return (positions + 1 - starts).sum()


def bounds_capacity(documents: int, length: int) -> int:
    """How many documents a sequence of `length` should have room for, a power of two.

    Every batch should get the same number, since compiled code and kernels are made for one shape.
    Documents of 128 tokens on average are shorter than any corpus of text has over a whole
    sequence; a batch with more `documents` in one of its sequences gets the next power of two.
    """
    least = max(documents, length // 128, min(length, 16))
    return 1 << (least - 1).bit_length()


def document_bounds(ends: torch.Tensor, capacity: int) -> torch.Tensor:
    """Where the documents of each sequence end; one row a sequence, so that a batch can be split.

    Args:
        ends: (batch, length), bool, from `document_ends`.
        capacity: no sequence has more documents.

    Returns:
        (batch, capacity), int32: the position after each document, ascending; the rest `length`.
    """
    length = ends.shape[1]
    after = torch.arange(1, length + 1, dtype=torch.int32, device=ends.device)
    bounds = torch.where(ends, after, length).sort(dim=1).values[:, :capacity]
    return torch.nn.functional.pad(bounds, (0, capacity - bounds.shape[1]), value=length)


def cumulative_lengths(bounds: torch.Tensor) -> torch.Tensor:
    """The bounds of all sequences of a batch, in the row of tokens that they are folded into.

    Args:
        bounds: (batch, capacity), int32, from `document_bounds`.

    Returns:
        (batch * capacity + 1,), int32, ascending from 0 to batch * length; what a sequence does not
        need of its capacity are empty documents.
    """
    # The last column is the length of a sequence, which is not read on the host.
    starts = torch.arange(len(bounds), dtype=torch.int32, device=bounds.device) * bounds[:, -1]
    return torch.nn.functional.pad((bounds + starts.unsqueeze(1)).flatten(), (1, 0))
