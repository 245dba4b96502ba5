"""The hint on how often to save: Young and Daly's interval, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cookbook.check.warnings import saving
from cookbook.config.cluster import load_cluster
from cookbook.config.finding import Finding
from tests.check_cells import cell_of, cluster_of

# A model of 16 B parameters in fp32: with Adam's moments 192 GB, 0.75 GB on each of 256 GPUs.
VIEW = {"parameters": {"total": 16_000_000_000}, "parts": [{"units": [{"bytes": 4}]}]}
ASYNC = {"checkpoint.enable": True, "checkpoint.async_mode": "async"}
SYNC = {"checkpoint.enable": True, "checkpoint.async_mode": "disabled"}
# 32 nodes, each of which fails every 320 days.
BETWEEN_S = 10 * 86_400


def hints(options: dict[str, Any], rate: float | None = None, days: float | None = 320) -> Any:
    cluster = replace(cluster_of("soperator-b200"), node_failure_days=days, write_gb_per_s=rate)
    return list(saving(cell_of("deepseek_v3_16b", options, cluster=cluster), [VIEW]))


def only(found: list[Finding]) -> Finding:
    (one,) = found
    return one


def minutes(finding: Finding) -> int:
    return int(finding.remedy.removeprefix("set it to about ").partition(" ")[0])


def test_asynchronous_saves_cost_the_copy_alone() -> None:
    # 0.75 GB at 10 GB/s.
    best = math.sqrt(2 * 0.075 * BETWEEN_S) / 60
    finding = only(hints(ASYNC | {"checkpoint.interval_minutes": 60.0}))
    assert finding.option == "checkpoint.interval_minutes"
    assert minutes(finding) == round(best) == 6
    assert "saved every 60 minutes; a save of 192 GB" in finding.reason
    assert "one of 32 nodes fails about every 10 days" in finding.reason
    assert only(hints(ASYNC | {"checkpoint.interval_minutes": 1.0}))
    for near in (3.0, 6.0, 15.0):
        assert not hints(ASYNC | {"checkpoint.interval_minutes": near})


def test_no_save_is_to_begin_before_the_last_one_is_written() -> None:
    # 192 GB at 0.1 GB/s are 32 minutes.
    assert minutes(only(hints(ASYNC | {"checkpoint.interval_minutes": 1.0}, rate=0.1))) == 32


def test_other_saves_cost_the_writing() -> None:
    best = math.sqrt(2 * 192 / 20 * BETWEEN_S) / 60
    finding = only(hints(SYNC | {"checkpoint.interval_minutes": 5.0}, rate=20))
    assert minutes(finding) == round(best) == 68
    assert "waiting for about 9.6 s" in finding.reason
    unknown = only(hints(SYNC | {"checkpoint.interval_minutes": 5.0}))
    assert unknown.option == "checkpoint.async_mode" and unknown.remedy == "set it to async"


def test_nothing_is_said_where_nothing_is_known_or_saved() -> None:
    assert not hints(ASYNC | {"checkpoint.interval_minutes": 999.0}, days=None)
    assert not hints({"checkpoint.enable": False, "checkpoint.interval_minutes": 999.0})


@pytest.mark.parametrize(
    ("time", "told"),
    [
        (None, 300),
        ("infinite", 300),
        ("04:00:00", 300),
        ("8", 120),
        ("08:00", 120),
        ("00:10:00", 150),
        ("1-0", 300),
        ("0-0:08", 120),
        ("0-00:04:00", 60),
    ],
)
def test_a_short_job_is_told_late_to_stop(time: str | None, told: int) -> None:
    cluster = replace(load_cluster("soperator-b200"), time=time)
    assert cluster.grace_seconds == told
    assert 0 < cluster.late_seconds < told
