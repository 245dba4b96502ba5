"""The self-check finds every fault put into a kernel, none where there is none, and ends jobs."""

from __future__ import annotations

import functools
import io
import json
import os
import socket
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cookbook.base.paths import ROOT
from tests.self_check_fault import A2A, CHUNKS, DEEPEP, FLASH, FLEX, JOB, MXFP8, TP2, WGRAD_HP
from tests.self_check_faults import FAULTS, try_faults
from tests.self_check_faults import proofs as prove
from tests.titan_ranks import run_ranks
from tests.titan_run import EP2, STANDARD, active, job, run, train

pytestmark = pytest.mark.titan


def train_with_fault(name: str, rank: int, argv: list[str], attempt: Path) -> dict[str, Any]:
    """Train with a kernel that is wrong on one rank alone."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    if dist.get_rank() != rank:
        return train(argv, attempt)
    with fault.put_in():
        return train(argv, attempt)


# The options of a job, its ranks, and what it uses besides BF16's GEMMs and linear layers.
JOBS: dict[str, tuple[tuple[str, ...], int, set[str]]] = {
    "sdpa": ((), 1, {"sdpa"}),
    "flex, mxfp8, chunks": (
        (*FLEX, *MXFP8, *CHUNKS),
        1,
        {"flex", "grouped GEMM mxfp8", "linear layer mx", "loss in chunks"},
    ),
    "wgrad_hp": (WGRAD_HP, 1, {"grouped GEMM mxfp8_wgrad_with_hp", "linear layer mx", "sdpa"}),
    "flash": ((*FLASH, *EP2), 2, {"flash_attention_4", "dispatch and combine standard"}),
    "deepep, tp": (
        (*DEEPEP, *TP2, *CHUNKS),
        2,
        {
            "sdpa",
            "rows to expert groups and back",
            "loss in chunks",
            "dispatch and combine deepep",
        },
    ),
    "standard, tp": ((*EP2, *TP2), 2, {"sdpa", "dispatch and combine standard"}),
    "a2a": (A2A, 2, {"sdpa", "dispatch and combine mxfp8_a2a"}),
    "half of a2a": (A2A[:-1], 2, {"sdpa", "dispatch and combine mxfp8_a2a"}),
}


@pytest.mark.parametrize("job", JOBS)
def test_kernels_without_a_fault_are_proved(job: str) -> None:
    options, ranks, kernels = JOBS[job]
    views: list[list[Any]] = run_ranks(prove, ranks, options)
    for found in views:
        assert [proof.fault for proof in found] == [None] * len(found)
        expected = kernels | {"linear layer bf16"}
        expected |= {"grouped GEMM bf16"} if not any("GEMM" in name for name in kernels) else set()
        assert {proof.kernel for proof in found} == expected
        for proof in found:
            # Not only within their bounds: each has an output and gradients, and rounding shows.
            assert len(proof.errors) >= 3
            assert all(error.part > 0 for error in proof.errors)
    # The worst of all ranks, on every rank.
    assert len({tuple(proof.share for proof in found) for found in views}) == 1


# Kernels that no CPU has are tried on GPUs alone, by `python -m tests.self_check_faults` there.
ON_A_CPU = [fault for fault in FAULTS if not fault.gpu_only]


@functools.cache
def found_with(ranks: int) -> dict[str, list[str]]:
    names = [fault.name for fault in FAULTS if fault.ranks == ranks]
    found: dict[str, list[str]] = run_ranks(try_faults, ranks, names, seconds=300)[0]
    return found


@pytest.mark.parametrize("fault", ON_A_CPU, ids=lambda fault: fault.name)
def test_a_fault_in_a_kernel_is_found(fault: Any) -> None:
    said = found_with(fault.ranks)[fault.name]
    assert said, "nothing is said to be wrong"
    # It is the faulty kernel that is named.
    assert all(text.startswith(f"{fault.kernel}: ") for text in said), said
    assert all("Error" not in text or "group" in text for text in said), said


def test_there_are_faults_of_every_kernel() -> None:
    kernels = {kernel for _, _, used in JOBS.values() for kernel in used}
    kernels |= {"grouped GEMM bf16", "linear layer bf16"}
    assert {fault.kernel for fault in ON_A_CPU} == kernels
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_every_fault_was_found_on_gpus() -> None:
    file = ROOT / "docs/evidence/numerics/self-check-faults-h200.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    found, missed = content["found"], content["missed"]
    assert found and not missed and all(found.values())
    # They are faults that CI puts in, by their names of today.
    assert set(found) <= {fault.name for fault in FAULTS}


class TestJob:
    @pytest.mark.parametrize(
        ("fault", "kernel", "avoid"),
        [
            ("last rows of dq not written", "flash_attention_4", "set model.attention=flavor"),
            (
                "received rows in another order",
                "dispatch and combine standard",
                "EP backend deepep does without it",
            ),
        ],
    )
    def test_a_wrong_kernel_of_one_rank_refuses_the_job(
        self, fault: str, kernel: str, avoid: str, assets: Path, tmp_path: Path
    ) -> None:
        attempt = tmp_path / "attempt-0"
        argv = job(assets, tmp_path / "out", *EP2, *STANDARD, *FLASH)
        results = run_ranks(train_with_fault, 2, fault, 1, argv, attempt, seconds=200)
        for result in results:
            assert result["ended"] and not result["losses"]
        reasons = {text for result in results for text in result["said"] if "refuses" in text}
        (reason,) = reasons
        # Kernel, shape, error, and the option that does without it, in one line.
        sequences = "2 x " if kernel == "flash_attention_4" else "3 x "
        assert reason.startswith(f"cookbook refuses: self-check: {kernel} at {sequences}")
        assert " off by " in reason and ", allowed 0.0" in reason and avoid in reason
        assert "\n" not in reason
        file = json.loads((attempt / "self_check.json").read_text())
        assert not file["ok"]
        assert {proof["kernel"] for proof in file["proofs"] if not proof["ok"]} == {kernel}
        assert not (attempt / "environment.json").exists()

    def test_a_job_trains_the_same_with_and_without_it(self, assets: Path, tmp_path: Path) -> None:
        options = (*EP2, *STANDARD, *FLASH)
        checked = run(assets, tmp_path / "a", 2, *options)
        unchecked = run(assets, tmp_path / "b", 2, *options, "--cookbook.no_self_check")
        # To the last bit: no random number was drawn, nothing was noted or set otherwise.
        assert checked["losses"] == unchecked["losses"]
        assert checked["grad_norms"] == unchecked["grad_norms"]
        one, other = active(checked), active(unchecked)
        assert one.pop("self_check")["kernels"] == 4
        assert other.pop("self_check") is None
        assert one == other


# --- `doctor --numerics`' ranks: several cells.

CELLS = [("quantized", [*JOB, *MXFP8]), ("plain", [*JOB]), ("plain again", [*JOB])]


def check_cells(folder: Path, fault: str) -> dict[str, Any]:
    """The status and the lines of a rank alone, and what it wrote, with a fault or without."""
    from torchtitan.models.moe import utils

    from cookbook.titan.tt_0_2_2 import self_check_main

    dist.destroy_process_group()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    (folder / "cells.json").write_text(json.dumps(CELLS))
    said = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(said))
        for one in FAULTS:
            if one.name == fault:
                stack.enter_context(one.put_in())
        status = self_check_main.main(
            [str(folder / "cells.json"), "-o", str(folder / "proofs.json")]
        )
    return {
        "status": status,
        "lines": said.getvalue().splitlines(),
        "file": json.loads((folder / "proofs.json").read_text()),
        "alignment": utils.TOKEN_GROUP_ALIGN_SIZE_M,
    }


def test_what_two_cells_share_is_proved_once(tmp_path: Path) -> None:
    (found,) = run_ranks(check_cells, 1, tmp_path, "")
    assert found["status"] == 0 and found["file"]["ok"]
    proofs = [(proof["kernel"], proof["shape"]) for proof in found["file"]["proofs"]]
    assert len(set(proofs)) == len(proofs)
    assert {kernel for kernel, _ in proofs} == {
        *("sdpa", "grouped GEMM mxfp8", "linear layer mx", "linear layer bf16"),
        "grouped GEMM bf16",
    }
    assert [line.split(":")[0] for line in found["lines"]] == [
        f"ok     {kernel}" for kernel, _ in proofs
    ]
    # The last cell's groups are not padded as those of MXFP8.
    assert found["alignment"] == 8


def test_a_wrong_kernel_is_told_with_its_cell(tmp_path: Path) -> None:
    (found,) = run_ranks(check_cells, 1, tmp_path, "an output row lost")
    assert found["status"] == 1 and not found["file"]["ok"]
    wrong = [line for line in found["lines"] if line.startswith("WRONG")]
    assert wrong and all(
        line.startswith("WRONG  plain: grouped GEMM bf16 at ")
        and line.endswith("; no option does without it; another torch may")
        for line in wrong
    )
    # The others are proved all the same.
    assert any("grouped GEMM mxfp8" in line for line in found["lines"] if line not in wrong)


def laid_out(words: list[str]) -> dict[str, int]:
    from cookbook.titan.tt_0_2_2.self_check_main import cell_of

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=48)
    found = vars(cell_of(words, "cpu").dims)
    dist.destroy_process_group()
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size")
    return {name: found[name] for name in names}


def test_a_cell_is_laid_out_as_its_words_say() -> None:
    degrees = {"tensor": 2, "pipeline": 3, "context": 4, "expert": 8, "expert_tensor": 2}
    words = [f"--parallelism.{name}_parallel_degree={one}" for name, one in degrees.items()]
    (found,) = run_ranks(laid_out, 1, [*JOB, *words])
    expected = {"tp": 2, "pp": 3, "cp": 4, "ep": 8, "etp": 2, "world_size": 48}
    assert found == expected | {"dp_replicate": 1, "dp_shard": 2}
