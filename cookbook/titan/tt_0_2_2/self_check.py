"""Compare every kernel of a job with a reference, on the job's own GPUs, before the first step.

Kernels have been silently wrong on one GPU generation, or only in the backward. A wrong kernel
stops the job.
"""

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from cookbook.base.files import write_whole
from cookbook.titan.common import varlen_attention
from cookbook.titan.common.process import attempt_folder
from cookbook.titan.self_check import CaseResult, KernelCase, run_case
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.self_check_cases import CheckedCell, kernel_cases
from cookbook.titan.tt_0_2_2.versions import refuse, versions

FILE = "self_check.json"


def check_kernels(job_config: Any, parallel_dims: Any, model_args: Any) -> dict[str, Any] | None:
    """Check the job's kernels on all ranks; if one is wrong, exit all ranks with a one-line error.

    Return a summary for the log, with each error as a fraction of the largest allowed one. Return
    None if `cookbook.self_check` is off, or in `check`, which builds a trainer and does not train.
    """
    if job_config.comm.mode != "default":
        return None
    if job_config.parallelism.expert_parallel_comm_backend == "deepep" and parallel_dims.ep > 1:
        import_module("deep_ep")
        check_nvshmem(Path("/proc/self/maps").read_text(encoding="utf-8"))
    if not job_config.cookbook.self_check:
        return None
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = run_cases(CheckedCell(job_config, parallel_dims, model_args, device))
    seconds = round(time.perf_counter() - began, 1)
    if (attempt := attempt_folder()) and dist.get_rank() == 0:
        write_whole(attempt / FILE, as_json(found, device, seconds))
    if faults := [result for result in found if result.fault]:
        others = f" ({len(faults) - 1} more in {FILE})" if len(faults) > 1 else ""
        raise refuse(f"self-check: {faults[0].fault}{others}; {faults[0].avoid}")
    worst = max(found, key=lambda result: result.share)
    logger.info(f"Self-check: {len(found)} kernels proved in {seconds} s")
    return {
        "kernels": len(found),
        "worst": round(worst.share, 2),
        "worst_kernel": worst.kernel,
        "seconds": seconds,
    }


def check_nvshmem(maps: str) -> None:
    """Log the NVSHMEM library found in `maps` (/proc/self/maps); refuse any except the wheel's.

    DeepEP was linked with the NVSHMEM wheel that torch installs. If the loader finds another one
    on LD_LIBRARY_PATH, DeepEP hangs or fails between nodes.
    """
    spec = find_spec("nvidia.nvshmem") if find_spec("nvidia") else None
    folders = (spec and spec.submodule_search_locations) or ()
    wheels = [Path(folder, "lib").resolve() for folder in folders]
    for library in sorted(set(re.findall(r"/\S*libnvshmem_host\S*", maps))):
        logger.info(f"DeepEP's NVSHMEM: {library}")
        folder = Path(library).parent
        if wheels and folder.resolve() not in wheels:
            raise refuse(
                f"DeepEP was linked with NVSHMEM in {wheels[0]}, but the loader took {library}; "
                f"take {folder} out of LD_LIBRARY_PATH"
            )


def run_cases(cell: CheckedCell, skip: Iterable[tuple[str, str]] = ()) -> list[CaseResult]:
    """Return each case's worst result over all ranks; the list is the same on every rank.

    Leave out the cases in `skip`, given as (kernel, shape). If a rank fails in a case that it runs
    alone, skip all collective cases: the other ranks could hang in them.
    """
    with _without_traces(cell.device):
        # Run the cases in a function, so that their tensors are freed before the cache is emptied.
        return _run_cases(cell, skip)


def _run_cases(cell: CheckedCell, skip: Iterable[tuple[str, str]]) -> list[CaseResult]:
    found: list[CaseResult] = []
    cases = {(case.kernel, case.shape): case for case in kernel_cases(cell)}
    for name in skip:
        cases.pop(name, None)
    for collective in (False, True):
        if not any(result.fault for result in found):
            chosen = [case for case in cases.values() if case.collective == collective]
            own = [_run(case, cell.device) for case in chosen]
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, own)
            found += [
                max(ranks, key=lambda result: (result.fault is not None, result.share))
                for ranks in zip(*everywhere, strict=True)
            ]
    return found


def _run(case: KernelCase, device: str) -> CaseResult:
    """Run a case, and end the job at once if the kernel left the GPU unusable."""
    result = run_case(case, device)
    if result.failure and device == "cuda":
        try:
            torch.cuda.synchronize()
        except torch.AcceleratorError:
            raise refuse(f"self-check: {result.fault}; {result.avoid}") from None
    return result


def as_json(found: Sequence[CaseResult], device: str, seconds: float) -> str:
    content = {
        "ok": not any(result.fault for result in found),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "device": device,
        "seconds": seconds,
        "versions": versions(),
        "proofs": [result.as_json() for result in found],
    }
    return json.dumps(content, indent=1) + "\n"


@contextmanager
def _without_traces(device: str) -> Iterator[None]:
    notes = (varlen_attention.ran, activity.dispatches, activity.rows, activity.losses)
    with ExitStack() as afterwards, torch.enable_grad():
        for noted in (*notes, activity.saved, activity.patches_applied):
            afterwards.callback(noted.update, set(noted))
            afterwards.callback(noted.clear)
        # The float32 references must not use TF32, whose precision is close to BF16's.
        precision = torch.get_float32_matmul_precision()
        afterwards.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("highest")
        afterwards.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        if device == "cuda":
            afterwards.callback(_free_memory)
        yield


def _free_memory() -> None:
    # After an illegal memory access every CUDA call fails; that must not hide the first error.
    with suppress(torch.AcceleratorError):
        torch.cuda.empty_cache()
