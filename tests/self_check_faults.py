"""Faults put into kernels, and whether the self-check finds each, on the CPU or on GPUs.

    torchrun --nproc-per-node=2 -m tests.self_check_faults [-o FILE]

A fault changes what a kernel returns, or what its backward does, as a wrong kernel would. Those of
the exchange need two ranks; one rank leaves them out. Ends with status 1 where one is not found.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.self_check_computing import COMPUTING
from tests.self_check_fault import JOB, Fault
from tests.self_check_moving import MOVING

FAULTS = (*COMPUTING, *MOVING)


def proofs(options: Sequence[str], fault: Fault | None = None) -> list[Any]:
    """The proofs of a job with these options on this rank's world, with a fault or without."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec

    import cookbook.titan.tt_0_2_2  # noqa: F401  (registers the spec)
    from cookbook.titan.tt_0_2_2.self_check import prove_all
    from cookbook.titan.tt_0_2_2.selftest_cases import Cell

    config = ConfigManager().parse_args([*JOB, *options])
    degrees = config.parallelism
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=-1,
        cp=1,
        tp=degrees.tensor_parallel_degree,
        pp=1,
        ep=degrees.expert_parallel_degree,
        etp=1,
        world_size=dist.get_world_size(),
    )
    args = deepcopy(get_train_spec("deepseek_v3").model_args[config.model.flavor])
    args.update_from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as stack:
        if fault:
            stack.enter_context(fault.put_in())
        return prove_all(Cell(config, dims, args, device))


def try_faults(names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """For each fault that this world has ranks for, what the self-check says of it."""
    found = {}
    for fault in FAULTS:
        is_here = fault.ranks <= dist.get_world_size()
        is_here &= torch.cuda.is_available() or not fault.gpu_only
        if is_here and (names is None or fault.name in names):
            said = [proof for proof in proofs(fault.options, fault) if proof.fault]
            found[fault.name] = [f"{proof.kernel}: {proof.fault}" for proof in said]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend)
    found = try_faults()
    by_name = {fault.name: fault for fault in FAULTS}
    missed = [
        name
        for name, said in found.items()
        if not any(text.startswith(by_name[name].kernel) for text in said)
    ]
    if dist.get_rank() == 0:
        for name, said in found.items():
            print(f"{'NOT FOUND' if name in missed else 'found'}: {name}: {said[:1]}")
        if options.output:
            options.output.write_text(json.dumps({"found": found, "missed": missed}, indent=1))
        print(f"{len(found) - len(missed)} of {len(found)} faults found")
    dist.destroy_process_group()
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
