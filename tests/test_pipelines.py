"""Where a pipeline's stages lie, and which rank knows the loss."""

from __future__ import annotations

import pytest

from cookbook.base.family import is_v_shaped, loss_rank, stages_of


@pytest.mark.parametrize(
    ("schedule", "per_rank", "stages"),
    [
        ("1F1B", 1, [[0], [1], [2]]),
        ("Interleaved1F1B", 2, [[0, 3], [1, 4], [2, 5]]),
        ("ZBVZeroBubble", 2, [[0, 5], [1, 4], [2, 3]]),
        ("DualPipeV", 2, [[0, 5], [1, 4], [2, 3]]),
        # TorchTitan takes names in any case.
        ("dualpipev", 2, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_the_rank_of_the_loss(schedule: str, per_rank: int, stages: list[list[int]]) -> None:
    found = [stages_of(schedule, rank, 3, per_rank) for rank in range(3)]
    assert found == stages
    (last,) = [rank for rank, own in enumerate(found) if 3 * per_rank - 1 in own]
    # Of 24 ranks, eight to a pipeline rank.
    assert loss_rank(schedule, 3, 24) == 8 * last
    assert is_v_shaped(schedule) == (found[0] != [0] and 5 in found[0])
