"""Cluster profiles are read, or refused with one message that names file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cookbook.base.gpus import visible_gpus
from cookbook.config.cluster import load_cluster
from tests.cells import CLUSTERS
from tests.stand_in_gpus import stand_in_gpus


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_profile_is_read_and_explained(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.description and cluster.ranks_per_node >= 1 and cluster.nodes >= 1
    assert cluster.device == ("cuda" if cluster.gpu else "cpu")
    assert cluster.path.read_text(encoding="utf-8").startswith("# ")


H200: dict[str, Any] = {"name": "NVIDIA H200"}


def test_time_limits_of_sbatch_are_taken(tmp_path: Path) -> None:
    for time in ("90", "1-12", "UNLIMITED", "infinite"):
        path = tmp_path / f"{time}.yaml"
        path.write_text(f'description: mine\nscheduler: slurm\ntime: "{time}"\n')
        assert load_cluster(str(path)).time == time


@pytest.mark.parametrize(
    ("gpus", "chosen", "ranks", "device"),
    [
        ([H200] * 4, None, 4, "cuda"),
        ([H200] * 4, "1,3", 2, "cuda"),
        ([H200] * 4, "", 2, "cpu"),
        # Unlike ones would run at the pace of the slowest.
        ([H200, {"name": "NVIDIA T4", "capability": [7, 5], "mib": 15360}], None, 1, "cuda"),
        ([], None, 2, "cpu"),
        ([{"mib": None}], None, 1, "cuda"),
    ],
)
def test_the_local_profile_is_filled_in_from_the_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[dict[str, Any]],
    chosen: str | None,
    ranks: int,
    device: str,
) -> None:
    stand_in_gpus(monkeypatch, tmp_path, gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    visible_gpus.cache_clear()
    load_cluster.cache_clear()
    try:
        cluster = load_cluster("local")
        assert (cluster.ranks_per_node, cluster.device) == (ranks, device)
        found = (cluster.gpu.name, cluster.gpu.memory_gib) if cluster.gpu else None
        gib = 0.0 if gpus == [{"mib": None}] else 140.4
        assert found == (("NVIDIA H200", gib) if device == "cuda" else None)
    finally:
        visible_gpus.cache_clear()
        load_cluster.cache_clear()
