"""Proves every kernel that a cell uses, on the GPU that it is about to use it on.

Kernels have been wrong in silence, on one generation of GPUs or in the backward alone. So a job
compares them with a reference before its first step; a wrong one refuses the cell.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from cookbook.base.files import write_whole
from cookbook.titan.common import varlen_attention
from cookbook.titan.selftest.cases import Proof, prove
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.selftest_cases import Cell, kernels_of
from cookbook.titan.tt_0_2_2.versions import refuse, versions

FILE = "self_check.json"


def check_kernels(job_config: Any, parallel_dims: Any, model_args: Any) -> dict[str, Any] | None:
    """Prove the cell's kernels, on all ranks; ends every rank with one line where one is wrong.

    Returns:
        For the log: how many `kernels`, the `worst` error as a share of its bound, whose it is,
        and `seconds`. None where it is switched off, or nothing runs.
    """
    if not job_config.cookbook.self_check or job_config.comm.mode != "default":
        return None
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cell = Cell(job_config, parallel_dims, model_args, device)
    found = prove_all(cell)
    seconds = round(time.perf_counter() - began, 1)
    attempt = os.environ.get("COOKBOOK_ATTEMPT_DIR")
    if attempt and dist.get_rank() == 0:
        write_whole(Path(attempt) / FILE, as_json(found, device, seconds))
    if faults := [proof for proof in found if proof.fault]:
        first = faults[0]
        others = f" ({len(faults) - 1} more in {FILE})" if len(faults) > 1 else ""
        raise refuse(f"self-check: {first.fault}{others}; {first.avoid}")
    worst = max(found, key=lambda proof: proof.share)
    summary = {
        "kernels": len(found),
        "worst": round(worst.share, 2),
        "worst_kernel": worst.kernel,
        "seconds": seconds,
    }
    logger.info(f"Self-check: {len(found)} kernels proved in {seconds} s")
    return summary


def prove_all(cell: Cell, skip: Iterable[tuple[str, str]] = ()) -> list[Proof]:
    """The proofs of a cell's kernels, of each the worst of all ranks; the same list on every rank.

    What needs several ranks is left out where a kernel of one rank has failed: it would wait.

    Args:
        skip: kernels and shapes that are proved already.
    """
    known = set(skip)
    with _apart(cell.device):
        by_name = {(use.kernel, use.shape): use for use in kernels_of(cell)}
        uses = [use for name, use in by_name.items() if name not in known]
        alone = [use for use in uses if not use.collective]
        found = _worst_of_ranks([prove(use, cell.device) for use in alone])
        if not any(proof.fault for proof in found):
            together = [use for use in uses if use.collective]
            found += _worst_of_ranks([prove(use, cell.device) for use in together])
    return found


def as_json(found: Sequence[Proof], device: str, seconds: float) -> str:
    """The content of `self_check.json`."""
    content = {
        "ok": not any(proof.fault for proof in found),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "device": device,
        "seconds": seconds,
        "versions": versions(),
        "proofs": [proof.as_json() for proof in found],
    }
    return json.dumps(content, indent=1) + "\n"


def _worst_of_ranks(own: list[Proof]) -> list[Proof]:
    """Of each kernel the rank's proof with the largest error."""
    everywhere: list[Any] = [own]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
    return [
        max(ranks, key=lambda proof: (proof.fault is not None, proof.share))
        for ranks in zip(*everywhere, strict=True)
    ]


@contextmanager
def _apart(device: str) -> Iterator[None]:
    """Leave no trace in the process: no notes of what ran, no settings, no memory, no log lines."""
    noted = [
        varlen_attention.ran,
        activity.dispatches,
        activity.rows,
        activity.losses,
        activity.saved,
        activity.patches_applied,
    ]
    before = [set(notes) for notes in noted]
    precision = torch.get_float32_matmul_precision()
    # The references are in float32, and TF32 has no more bits than BF16.
    torch.set_float32_matmul_precision("highest")
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.enable_grad():
            yield
    finally:
        logging.disable(disabled)
        torch.set_float32_matmul_precision(precision)
        for notes, kept in zip(noted, before, strict=True):
            notes.clear()
            notes.update(kept)
        if device == "cuda":
            torch.cuda.empty_cache()
