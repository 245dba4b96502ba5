"""What a training process starts early, so that it is there when it is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.titan


def job_config(**changes: Any) -> SimpleNamespace:
    asked = {"enable": True, "backend": "inductor", "mode": "default"} | changes
    return SimpleNamespace(
        compile=SimpleNamespace(enable=asked["enable"], backend=asked["backend"]),
        comm=SimpleNamespace(mode=asked["mode"]),
    )


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the start of the workers, which this torch must know, and that of the self-check."""
    import torch
    import torch._inductor.async_compile as inductor

    from cookbook.titan.tt_0_2_2 import metrics

    noted = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(inductor, "maybe_warm_pool", lambda: noted.append("workers"))
    monkeypatch.setattr(metrics, "check_kernels", lambda *_: noted.append("self-check"))
    monkeypatch.setattr(metrics, "CookbookMetrics", lambda *_: SimpleNamespace())
    return noted


def test_the_workers_that_compile_start_before_the_self_check(happened: list[str]) -> None:
    from cookbook.titan.tt_0_2_2.metrics import build_metrics_processor

    build_metrics_processor(job_config(), None)
    assert happened == ["workers", "self-check"]


@pytest.mark.parametrize("change", [{"enable": False}, {"backend": "eager"}, {"mode": "fake"}])
def test_no_workers_start_where_nothing_needs_them(
    change: dict[str, Any], happened: list[str]
) -> None:
    from cookbook.titan.tt_0_2_2.compiled_blocks import start_compiling_workers

    start_compiling_workers(job_config(**change))
    assert not happened


def test_no_workers_start_without_a_gpu(
    happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from cookbook.titan.tt_0_2_2.compiled_blocks import start_compiling_workers

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start_compiling_workers(job_config())
    assert not happened
