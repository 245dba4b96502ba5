"""In: nothing. Out: what several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm_cluster import SlurmCluster, require_slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm cluster of 32 nodes with 8 GPUs each; a test leaves it as idle as it got it."""
    require_slurm()
    with SlurmCluster.start(tmp_path_factory.mktemp("slurm"), nodes=32) as cluster:
        yield cluster
