"""In: nothing. Out: what several test modules share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.slurm_cluster import SlurmCluster, require_slurm

# A shell's background job ignores interrupts, and so would all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm cluster of 32 nodes with 8 GPUs each; a test leaves it as idle as it got it."""
    require_slurm()
    with SlurmCluster.start(tmp_path_factory.mktemp("slurm"), nodes=32) as cluster:
        yield cluster
