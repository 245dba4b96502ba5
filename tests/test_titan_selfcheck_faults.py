"""The self-check finds every fault that is put into a kernel, and none where there is none."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.self_check_fault import (
    A2A,
    CHUNKS,
    DEEPEP,
    EP2,
    FLASH,
    FLEX,
    MXFP8,
    TP2,
    WGRAD_HP,
)
from tests.self_check_faults import FAULTS, try_faults
from tests.self_check_faults import proofs as prove
from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

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
