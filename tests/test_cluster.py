"""Cluster profiles are read, or refused with one message that names file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cookbook.base.gpus import visible_gpus
from cookbook.config.cluster import default_cluster, load_cluster
from tests.cells import CLUSTER_FILES, CLUSTERS
from tests.stand_in_gpus import stand_in_gpus

HEAD = "description: mine\nscheduler: slurm\n"


def _write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_profile_is_read_and_explained(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.description and cluster.ranks_per_node >= 1 and cluster.nodes >= 1
    assert cluster.device == ("cuda" if cluster.gpu else "cpu")
    assert cluster.path.read_text(encoding="utf-8").startswith("# ")


def test_everything_a_profile_may_say() -> None:
    (path,) = [path for path in CLUSTER_FILES if path.stem == "container"]
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node) == ("container", 32, 8)
    assert cluster.gpu is not None and cluster.gpu.compute_capability == 10.0
    assert cluster.time == "04:00:00"
    assert cluster.exclude == ("worker-7", "worker-9")
    assert cluster.sbatch["spread-job"] is True
    assert cluster.container is not None
    assert cluster.container.mounts == ("/mnt/data:/mnt/data", "/mnt/with space:/data")
    assert cluster.settings["comm.train_timeout_seconds"].value == 300
    assert not cluster.requeue


H200: dict[str, Any] = {"name": "NVIDIA H200"}


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
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
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


def test_the_default_is_local_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COOKBOOK_CLUSTER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert default_cluster() == "local"
    monkeypatch.setenv("COOKBOOK_CLUSTER", "h200-node")
    assert default_cluster() == "h200-node"
