"""`doctor --numerics`' ranks: several cells' kernels, each proved once, and a wrong one told."""

from __future__ import annotations

import io
import json
import os
import socket
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.self_check_fault import JOB, MXFP8
from tests.self_check_faults import FAULTS
from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

CELLS = [("quantized", [*JOB, *MXFP8]), ("plain", [*JOB]), ("plain again", [*JOB])]


def prove(folder: Path, fault: str) -> dict[str, Any]:
    """The status and the lines of a rank alone, and what it wrote, with a fault or without."""
    from torchtitan.models.moe import utils

    from cookbook.titan.tt_0_2_2 import prove_cells

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
        status = prove_cells.main([str(folder / "cells.json"), "-o", str(folder / "proofs.json")])
    return {
        "status": status,
        "lines": said.getvalue().splitlines(),
        "file": json.loads((folder / "proofs.json").read_text()),
        "alignment": utils.TOKEN_GROUP_ALIGN_SIZE_M,
    }


def test_what_two_cells_share_is_proved_once(tmp_path: Path) -> None:
    (found,) = run_ranks(prove, 1, tmp_path, "")
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
    (found,) = run_ranks(prove, 1, tmp_path, "an output row lost")
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
    from cookbook.titan.tt_0_2_2.prove_cells import cell_of

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
