"""The short form of `make chaos`: real TorchTitan on a real Slurm survives a hang."""

from __future__ import annotations

import re

import pytest

from bench.chaos import Planned, chaos, plan
from bench.chaos_faults import FAULTS
from tests.slurm_installed import require_slurm


def test_a_plan_is_repeatable_and_has_every_kind() -> None:
    assert plan(20, 1) == plan(20, 1) != plan(20, 2)
    assert {one.name for one in plan(20, 3)} == set(FAULTS)
    assert len(plan(20, 3)) == 20


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.titan
def test_a_run_survives(tmp_path_factory: pytest.TempPathFactory) -> None:
    require_slurm()
    folder = tmp_path_factory.mktemp("c")
    survived, wrong = chaos([Planned("rank stopped (hang)", 5)], 1, folder, is_short=True)
    assert wrong == []
    (hang,) = survived
    # Who stood still is known by the stack that it alone did not leave.
    assert re.match(r"hang: no step for [0-9]+ s \(usual: [0-9.]+ s\) after step", hang.cause)
    assert re.search(r"; rank [01] not heard of", hang.cause)
