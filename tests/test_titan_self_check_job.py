"""The self-check of a job: kernels at its shapes, faults that are found, a job that is refused."""

import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cookbook.base.paths import ROOT
from tests.self_check_fault import A2A, CHUNKS, DEEPEP, FLOAT8, JOB, MXFP8, ROW_KERNELS, WGRAD_HP
from tests.self_check_faults import FAULTS, try_faults
from tests.self_check_faults import proofs as prove
from tests.titan_ranks import free_port, run_ranks
from tests.titan_run import EP2, FLASH, FLEX, STANDARD, TP2, active, job, run, train

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
        {"sdpa", "rows to expert groups and back", "loss in chunks", "dispatch and combine deepep"},
    ),
    "rows": (
        ROW_KERNELS,
        1,
        {
            "sdpa",
            "rows to expert groups and back",
            "scored SwiGLU",
            "experts' weights side by side",
        },
    ),
    "fp8": (
        FLOAT8,
        1,
        {
            *("sdpa", "grouped GEMM fp8", "experts fp8", "linear layer fp8", "scored SwiGLU"),
            *("rows to expert groups and back", "experts' weights side by side"),
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
            if proof.kernel != "experts' weights side by side":
                assert len(proof.errors) >= 3
                assert all(error.part > 0 for error in proof.errors)
    # The worst of all ranks, on every rank.
    assert len({tuple(proof.share for proof in found) for found in views}) == 1


# Kernels that no CPU has are tried on GPUs alone, by `python -m tests.self_check_faults` there.
ON_A_CPU = [fault for fault in FAULTS if not fault.gpu_only]


@pytest.fixture(scope="module")
def said_of() -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    for ranks in {fault.ranks for fault in ON_A_CPU}:
        names = [fault.name for fault in FAULTS if fault.ranks == ranks]
        said |= run_ranks(try_faults, ranks, names)[0]
    return said


@pytest.mark.parametrize("fault", ON_A_CPU, ids=lambda fault: fault.name)
def test_a_fault_in_a_kernel_is_found(fault: Any, said_of: dict[str, list[str]]) -> None:
    said = said_of[fault.name]
    assert said, "nothing is said to be wrong"
    # It is the faulty kernel that is named; those of FP8 have functions in common.
    assert any(text.startswith(f"{fault.kernel}: ") for text in said), said
    same = fault.kernel.rpartition(" ")[2] if fault.options == FLOAT8 else fault.kernel
    assert all(text.partition(":")[0].endswith(same) for text in said), said
    assert all("Error" not in text or "group" in text for text in said), said


def test_there_are_faults_of_every_kernel() -> None:
    kernels = {kernel for _, _, used in JOBS.values() for kernel in used}
    kernels |= {"grouped GEMM bf16", "linear layer bf16"}
    assert {fault.kernel for fault in ON_A_CPU} == kernels
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_every_fault_was_found_on_gpus() -> None:
    file = ROOT / "docs/evidence/numerics/self-check-faults-h100.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    found, missed = content["found"], content["missed"]
    assert found and not missed and all(found.values())
    # Found on a CPU alone: those of FP8's own kernels, and the youngest.
    young = {fault.name for fault in FAULTS if fault.options == FLOAT8}
    young.add("the last microbatch's gradient alone")
    assert set(found) == {fault.name for fault in FAULTS} - young


class TestJob:
    def test_a_wrong_kernel_of_one_rank_refuses_the_job(self, assets: Path, tmp_path: Path) -> None:
        kernel, attempt = "flash_attention_4", tmp_path / "attempt-0"
        argv = job(assets, tmp_path / "out", *EP2, *STANDARD, *FLASH)
        fault = "last rows of dq not written"
        results = run_ranks(train_with_fault, 2, fault, 1, argv, attempt)
        for result in results:
            assert result["ended"] and not result["losses"]
        (reason,) = {text for result in results for text in result["said"] if "refuses" in text}
        # Kernel, shape, error, and the option that avoids it, in one line.
        assert reason.startswith(f"cookbook refuses: self-check: {kernel} at 2 x ")
        assert " off by " in reason and ", allowed 0.0" in reason and "\n" not in reason
        assert "set model.attention=flavor" in reason
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


# Of `doctor --numerics`' ranks.
CELLS = [("quantized", [*JOB, *MXFP8]), ("plain", [*JOB]), ("plain again", [*JOB])]


def check_cells(folder: Path, fault: str) -> tuple[int, list[str], int]:
    """The status and the lines of a rank alone with a fault, and the alignment that it leaves."""
    from torchtitan.models.moe import utils

    from cookbook.titan.tt_0_2_2 import self_check_main

    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    (folder / "cells.json").write_text(json.dumps(CELLS))
    (put_in,) = (one.put_in for one in FAULTS if one.name == fault)
    said = io.StringIO()
    with redirect_stdout(said), put_in():
        status = self_check_main.main([f"{folder}/cells.json", "-o", f"{folder}/proofs.json"])
    return status, said.getvalue().splitlines(), utils.TOKEN_GROUP_ALIGN_SIZE_M


def test_what_two_cells_share_is_proved_once_and_a_wrong_kernel_is_told_with_its_cell(
    tmp_path: Path,
) -> None:
    ((status, lines, alignment),) = run_ranks(check_cells, 1, tmp_path, "an output row lost")
    file = json.loads((tmp_path / "proofs.json").read_text())
    assert status == 1 and not file["ok"]
    proofs = [(proof["kernel"], proof["shape"]) for proof in file["proofs"]]
    assert len(set(proofs)) == len(proofs) == len(lines)
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert wrong and all(
        line.startswith("WRONG  plain: grouped GEMM bf16 at ")
        and line.endswith("; no option avoids it; try another torch")
        for line in wrong
    )
    # The others are proved all the same.
    right = {line.split(":")[0] for line in lines if line not in wrong}
    others = ("sdpa", "grouped GEMM mxfp8", "linear layer mx", "linear layer bf16")
    assert right == {f"ok     {kernel}" for kernel in others}
    # The last cell's groups are not padded as those of MXFP8.
    assert alignment == 8


Uses = list[tuple[str, str, bool]]


def degrees(**given: int) -> tuple[str, ...]:
    return tuple(f"--parallelism.{name}_parallel_degree={given[name]}" for name in given)


LONG = ("--training.seq_len=8192", "--training.local_batch_size=4")
# The options, the ranks, the device, and what is proved: all of it, or of linear layers some.
CASES: dict[str, tuple[tuple[str, ...], int, str, dict[str, list[str]]]] = {
    "16B, TP 2, EP 8, on GPUs": (
        ("--model.flavor=16B", *LONG, *degrees(tensor=2, expert=8), "--loss.num_chunks=8"),
        *(8, "cuda"),
        {
            # 16 heads over two ranks; as many sequences as 2**31 scores have room for.
            "flex": [
                "4 x 8,192 tokens, 8 heads of 192/128, documents: edges, values as trained",
                "4 x 8,192 tokens, 8 heads of 192/128, documents: whole, random values",
            ],
            # 64 experts over 8 ranks, 512 rows each.
            "grouped GEMM bf16": [
                "8 experts of 1408 x 2048, about 4,096 rows",
                "8 experts of 2048 x 1408, about 4,096 rows",
                "9 experts of 384 x 256, about 700 rows",
            ],
            "loss in chunks": ["2,047 tokens of 2048, 102,400 words, 8 chunks"],
            "dispatch and combine standard": [
                "3 x 2,730 tokens of 2048 a rank, 64 experts over 8 ranks, top 6, TP 2"
            ],
        },
    ),
    "Qwen3-MoE 235B, long sequences, on GPUs": (
        (*("--model.name=qwen3", "--model.flavor=235B-A22B", *FLASH), "--training.seq_len=32768"),
        *(1, "cuda"),
        {
            # As short as the reference has room for: 16 query heads are compared at a time. The
            # kernel is told of the documents of all sequences.
            "flash_attention_4": [
                "2 x 8,192 tokens, 64 heads of 128/128, 16 to a key, documents: edges in room for "
                "512, values as trained",
                "2 x 8,192 tokens, 64 heads of 128/128, 16 to a key, documents: whole in room for "
                "512, random values",
            ],
            "grouped GEMM bf16": [
                "128 experts of 1536 x 4096, about 32,768 rows",
                "128 experts of 4096 x 1536, about 32,768 rows",
                "9 experts of 384 x 256, about 700 rows",
            ],
        },
    ),
    "CP 2, TP 2, without EP, on a CPU": (
        degrees(context=2, tensor=2),
        *(8, "cpu"),
        {
            # Half of each sequence; SDPA knows no documents.
            "sdpa": ["2 x 32 tokens, 2 heads of 192/128, documents: whole, values as trained"],
            # The hidden size of 256 is cut over TP.
            "grouped GEMM bf16": [
                "8 experts of 128 x 256, about 384 rows",
                "8 experts of 256 x 128, about 384 rows",
            ],
        },
    ),
    "DeepEP, TP 2, EP 2, on a CPU": (
        (*DEEPEP, *degrees(tensor=2), "--deepep.score_activations"),
        *(4, "cpu"),
        {
            "sdpa": ["2 x 64 tokens, 2 heads of 192/128, documents: whole, values as trained"],
            "grouped GEMM bf16": [
                "4 experts of 256 x 256, about 384 rows",
                "4 experts of 256 x 256, about 384 rows",
            ],
            "rows to expert groups and back": [
                "96 tokens of 256, 4 experts, top 3, scores on the activations"
            ],
            "dispatch and combine deepep": [
                "3 x 32 tokens of 256 a rank, 8 experts over 2 ranks, top 3, TP 2"
            ],
        },
    ),
}


def uses(cases: dict[str, tuple[tuple[str, ...], int, str]]) -> dict[str, Uses]:
    """Kernel, shape, and whether all ranks prove it together, as the first of so many ranks."""
    from cookbook.titan.tt_0_2_2.self_check_cases import kernel_cases
    from cookbook.titan.tt_0_2_2.self_check_main import cell_of

    dist.destroy_process_group()
    found = {}
    for name, (options, world, device) in cases.items():
        dist.init_process_group("fake", rank=0, world_size=world)
        cell = cell_of([*JOB, *options], device)
        found[name] = [(one.kernel, one.shape, one.collective) for one in kernel_cases(cell)]
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Uses]:
    cases = {name: case[:3] for name, case in CASES.items()}
    (first,) = run_ranks(uses, 1, cases)
    of_all_cases: dict[str, Uses] = first
    return of_all_cases


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_proved_at_the_cells_own_shapes(case: str, found: dict[str, Uses]) -> None:
    shapes: dict[str, list[str]] = {}
    for kernel, shape, together in found[case]:
        shapes.setdefault(kernel, []).append(shape)
        # What sends something waits for other ranks; a loss over TP ranks does.
        assert together == (kernel.startswith("dispatch") or kernel == "loss in chunks")
    assert shapes.pop("linear layer bf16")
    assert shapes == CASES[case][3]


def test_every_kind_of_linear_layer_is_proved(found: dict[str, Uses]) -> None:
    """Of the 16B: attention, the dense layer, shared experts, the router; not the output."""
    of_16b = [shape for kernel, shape, _ in found["16B, TP 2, EP 8, on GPUs"] if "linear" in kernel]
    assert [shape.removeprefix("4,096 rows, ") for shape in of_16b] == [
        *("64 x 2048", "576 x 2048", "4096 x 512", "2048 x 2048", "2816 x 2048", "2048 x 2816"),
        *("3072 x 2048", "10944 x 2048", "2048 x 10944"),
    ]
    # A CPU proves the smallest, for the code around it.
    on_a_cpu = [
        shape for kernel, shape, _ in found["DeepEP, TP 2, EP 2, on a CPU"] if "linear" in kernel
    ]
    assert on_a_cpu == ["96 rows, 8 x 256"]
