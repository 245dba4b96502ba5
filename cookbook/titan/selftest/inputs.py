"""Inputs that make a kernel's faults visible: scales that differ, uneven groups, empty experts.

All of them come from generators of their own. A proof must not move the random numbers that a
training starts with.
"""

from __future__ import annotations

import torch

BLOCK = 32


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def uneven_values(rows: int, columns: int, device: str, seed: int) -> torch.Tensor:
    """(rows, columns), BF16; rows and blocks of 32 columns differ in size by powers of two.

    A scale that is applied to another row or block than its own then makes a large error. With
    equal sizes it would make none.
    """
    random = generator(device, seed)
    values = torch.randn(rows, columns, device=device, generator=random)
    by_row = torch.randint(-3, 4, (rows, 1), device=device, generator=random)
    blocks = -(-columns // BLOCK)
    by_block = torch.randint(-1, 2, (1, blocks), device=device, generator=random)
    sizes = by_row + by_block.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return (values * torch.exp2(sizes.float())).bfloat16()


def uneven_counts(experts: int, rows: int) -> list[int]:
    """Rows of each expert, about `rows` in all: some have none, one, or one more than a tile.

    The first and the last expert are among the unusual ones. The last one has rows, so that a
    kernel which stops early is seen.
    """
    unusual = (0, 1, 31, 33, 129, 7)
    counts = [max(1, rows // experts)] * experts
    for place, count in enumerate(unusual[:experts]):
        counts[place * experts // min(len(unusual), experts)] = count
    counts[-1] = min(127, max(3, rows // experts - 1))
    if experts > 2:
        counts[1] += max(0, rows - sum(counts))
    return counts


def random_routing(
    tokens: int, experts: int, top_k: int, device: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and scores of each token, (tokens, top k); the experts 1 and experts - 2 get none.

    Expert 0 gets more than its share. Scores lie between 0.25 and 1, so that no copy is negligible.
    """
    random = generator(device, seed)
    preference = torch.rand(tokens, experts, device=device, generator=random)
    preference[:, 0] += 0.3
    if experts >= top_k + 2:
        preference[:, [1, experts - 2]] = -1
    chosen = preference.topk(top_k, dim=1).indices
    scores = 0.25 + 0.75 * torch.rand(tokens, top_k, device=device, generator=random)
    return chosen, scores
