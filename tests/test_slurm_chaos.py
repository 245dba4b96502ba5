"""The short form of `make chaos`: real TorchTitan on a real Slurm survives a hang and a damage."""

from __future__ import annotations

import pytest

from bench.chaos import Planned, chaos, plan
from bench.chaos_faults import FAULTS
from tests.slurm_installed import require_slurm


def test_a_plan_is_repeatable_and_has_every_kind() -> None:
    assert plan(20, 1) == plan(20, 1) != plan(20, 2)
    assert {one.name for one in plan(20, 3)} == set(FAULTS)
    assert len(plan(20, 3)) == 20


@pytest.mark.slurm
@pytest.mark.titan
def test_a_run_survives(tmp_path_factory: pytest.TempPathFactory) -> None:
    require_slurm()
    faults = [Planned("rank stopped (hang)", 5), Planned("checkpoint truncated", 3)]
    hang, cut = (survived := chaos(faults, 1, tmp_path_factory.mktemp("c"), is_short=True))[0]
    assert survived[1] == []
    assert hang.cause.startswith("hang: no step for")
    assert "rank" in hang.cause
    # The checkpoint that was cut costs one interval more.
    assert cut.repeated > hang.repeated
