"""Packings of documents to try attention with: where in each sequence of a batch one ends."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import cycle

import torch

# Around the tiles of FlashAttention-4's kernels (64, 96 and 128 rows) and their common multiples,
# and as short as can be.
_EDGES = (
    *(1, 1, 2, 63, 64, 65, 95, 96, 97, 127, 128, 129, 1, 191, 192, 193),
    *(255, 256, 257, 383, 384, 385, 3, 511),
)

# Median and standard deviation of the logarithm of lengths in tokens. C4: 430 on average. Long, as
# the local corpus of Python's sources: 5,500 on average.
_LOG_NORMAL = {"short": (260, 1.0), "long": (2600, 1.224)}

PACKINGS = ("short", "long", "edges", "whole")


def document_ends_of(
    packing: str, batch: int, length: int, most: int | None = None
) -> torch.Tensor:
    """(batch, length), bool: the last token of each document, the same in every process.

    Documents follow one another through the whole batch and are cut where a sequence ends.

    Args:
        most: documents of a sequence; the last of them takes what is left of it.
    """
    ends = torch.zeros(batch * length, dtype=torch.bool)
    if packing != "whole":
        position = -1
        for document in _lengths(packing):
            position += document
            if position >= len(ends):
                break
            ends[position] = True
    ends = ends.view(batch, length)
    if most is not None:
        ends &= ends.cumsum(dim=1) < most
    ends[:, -1] = True
    return ends


def _lengths(packing: str) -> Iterator[int]:
    if packing == "edges":
        yield from cycle(_EDGES)
    median, deviation = _LOG_NORMAL[packing]
    generator = random.Random(0)
    while True:
        yield math.ceil(generator.lognormvariate(math.log(median), deviation))
