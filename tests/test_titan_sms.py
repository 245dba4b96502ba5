"""How a GPU's SMs are divided: what is set and when, not what a GPU makes of it."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from tests.titan_refusal import refusal

pytestmark = pytest.mark.titan

STACK = "cookbook.titan.tt_0_2_2"
NOTHING = (None, None, "Cublas")


def set_here() -> tuple[str | None, int | None, str]:
    """What NCCL would read, what GEMMs leave free, and the library of dense ones."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    # NCCL reads the process's environment, not Python's copy of it.
    limit = getenv(b"NCCL_MAX_CTAS")
    library = torch.backends.cuda.preferred_blas_library()
    carveout = torch._C._get_sm_carveout_experimental()
    return (limit.decode() if limit else None), carveout, library.name


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """On a GPU of 132 SMs: what was set when the process group was made, and its backend."""
    import torchtitan.distributed.utils as utils

    from cookbook.titan.tt_0_2_2.sms import divide_sms_before_nccl

    groups: list[Any] = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **_: groups.append((backend, set_here()))
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(utils, "device_type", "cuda")
    monkeypatch.setattr(utils, "init_distributed", utils.init_distributed)
    with patch.dict(os.environ):
        os.environ.pop("NCCL_MAX_CTAS", None)
        divide_sms_before_nccl()
        yield groups
    torch._C._set_sm_carveout_experimental(None)
    torch.backends.cuda.preferred_blas_library("cublas")


def start(*options: str, config_module: str = f"{STACK}.job_config") -> int:
    """Let TorchTitan's Trainer make the process group of a job; the size of its world."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    argv = [f"--job.custom_config_module={config_module}", "--comm.trace_buf_size=0", *options]
    trainer: Any = SimpleNamespace(job_config=ConfigManager().parse_args(argv))
    return int(Trainer.init_distributed(trainer).world_size)


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of SMs."""
    found = (one.getMessage() for one in caplog.records)
    return [text for text in found if "num_sms" in text or "NCCL_MAX_CTAS" in text]


def test_sms_are_divided_before_the_process_group_is_made(
    made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        world = start("--comm.num_sms=24", "--training.enable_cpu_offload")
    assert world == 4
    # TorchTitan's other arguments arrive, too.
    assert made == [("cuda:nccl,cpu:gloo", ("24", 24, "Cublaslt"))]
    assert texts(caplog) == [
        "cookbook: comm.num_sms=24: a collective of NCCL takes at most 24 of 132 SMs, GEMMs the "
        "other 108"
    ]


@pytest.mark.parametrize(
    ("options", "config_module"),
    [
        ((), f"{STACK}.job_config"),
        (("--comm.num_sms=0",), f"{STACK}.job_config"),
        # TorchTitan's own options have no such one; the refusal that says so comes later.
        ((), ""),
    ],
)
def test_without_the_option_all_is_as_it_was(
    options: tuple[str, ...],
    config_module: str,
    made: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        start(*options, config_module=config_module)
    assert made == [("nccl", NOTHING)]
    assert not texts(caplog)
    os.environ["NCCL_MAX_CTAS"] = "8"
    start(*options, config_module=config_module)
    assert made[1] == ("nccl", ("8", None, "Cublas"))


@pytest.mark.parametrize(("exported", "is_told"), [("8", True), ("24", False)])
def test_the_option_wins_over_the_environment_and_says_so(
    exported: str, is_told: bool, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["NCCL_MAX_CTAS"] = exported
    with caplog.at_level(logging.WARNING):
        start("--comm.num_sms=24")
    assert made == [("nccl", ("24", 24, "Cublaslt"))]
    warned = "ENV[NCCL_MAX_CTAS] = 8 will be overridden to 24 by comm.num_sms"
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert told.count(warned) == is_told
    assert len([text for text in told if "NCCL_MAX_CTAS" in text]) == is_told


@pytest.mark.parametrize("num_sms", [-1, 132, 200])
def test_gemms_need_an_sm(num_sms: int, made: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    reason = refusal(lambda: start(f"--comm.num_sms={num_sms}"), caplog)
    assert reason == f"comm.num_sms: found {num_sms}, allowed with 132 SMs: 0 to 131"
    assert not made and set_here() == NOTHING


def test_one_sm_is_enough_for_gemms(made: list[Any]) -> None:
    start("--comm.num_sms=131")
    assert made == [("nccl", ("131", 131, "Cublaslt"))]


def test_what_is_set_is_observed_whoever_set_it(made: list[Any]) -> None:
    from cookbook.titan.tt_0_2_2.sms import observe_sms

    assert observe_sms() == set()
    os.environ["NCCL_MAX_CTAS"] = "8"
    assert observe_sms() == {"NCCL_MAX_CTAS 8"}
    start("--comm.num_sms=24")
    assert observe_sms() == {"NCCL_MAX_CTAS 24", "carveout 24"}
    del os.environ["NCCL_MAX_CTAS"]
    torch._C._set_sm_carveout_experimental(0)
    assert observe_sms() == {"carveout 0"}


def test_a_rank_reports_what_is_set(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2 import first_step

    # It ends the counting for the whole process.
    monkeypatch.setattr(first_step, "observe_attention", lambda: None)
    start("--comm.num_sms=24")
    report: Any = first_step.FirstStepReport.__new__(first_step.FirstStepReport)
    report.model_parts = [nn.ModuleDict({"layers": nn.ModuleDict()})]
    report.parallel_dims = SimpleNamespace(get_optional_mesh=lambda name: None)
    assert report._observe().num_sms == {"NCCL_MAX_CTAS 24", "carveout 24"}
