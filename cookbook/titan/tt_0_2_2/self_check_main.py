"""Check the kernels of several cells on this machine's GPUs, without training.

    torchrun --standalone --nproc-per-node=N -m cookbook.titan.tt_0_2_2.self_check_main CELLS -o OUT

CELLS is a JSON file with a list of `[name, TorchTitan's options]`. A case that several cells share
runs once. Each result is a line on standard output; OUT gets all of them as JSON. The exit status
is 1 if any kernel is wrong.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.protocols.train_spec import get_train_spec

from cookbook.base.files import write_whole
from cookbook.titan.self_check import CaseResult
from cookbook.titan.tt_0_2_2.self_check import as_json, run_cases
from cookbook.titan.tt_0_2_2.self_check_cases import CheckedCell


def cell_of(words: Sequence[str], device: str) -> CheckedCell:
    """Build the cell that a list of TorchTitan options describes; the process group must exist."""
    config = ConfigManager().parse_args(list(words))
    options = config.parallelism
    dims = ParallelDims(
        dp_replicate=options.data_parallel_replicate_degree,
        dp_shard=options.data_parallel_shard_degree,
        cp=options.context_parallel_degree,
        tp=options.tensor_parallel_degree,
        pp=options.pipeline_parallel_degree,
        ep=options.expert_parallel_degree,
        etp=options.expert_tensor_parallel_degree,
        world_size=dist.get_world_size(),
    )
    # This alignment is global. The converters of an earlier configuration may have changed it.
    set_token_group_alignment_size_m(8)
    args = deepcopy(get_train_spec(config.model.name).model_args[config.model.flavor])
    args.update_from_config(config)
    return CheckedCell(config, dims, args, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the kernels of each cell in turn; return 1 if any kernel is wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Results are gathered as Python objects on the CPU, over gloo.
    dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
    began = time.perf_counter()
    found: list[CaseResult] = []
    for name, words in json.loads(parsed.cells.read_text(encoding="utf-8")):
        known = [(result.kernel, result.shape) for result in found]
        for result in run_cases(cell_of(words, device), known):
            found.append(result)
            share = f"{result.share:.0%} of the bound"
            line = f"ok     {result.kernel}: {result.shape}: {share}, {result.seconds:.1f} s"
            if result.fault:
                line = f"WRONG  {name}: {result.fault}; {result.avoid}"
            if dist.get_rank() == 0:
                print(line, flush=True)
    if dist.get_rank() == 0:
        write_whole(parsed.output, as_json(found, device, round(time.perf_counter() - began, 1)))
    dist.destroy_process_group()
    return 1 if any(result.fault for result in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
