"""Runs a module in a rank that shares its GPU with others: torchrun -m bench.shared_gpus MODULE ...

A GPU then stands for several, to compare numerics, never speeds. Start CUDA's Multi-Process Service
first (docs/convergence.md): DeepEP's kernels wait for one another, and must run at once.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from bench.cells import gpu_ids


def own_variables(local_rank: int, gpus: Sequence[str]) -> Mapping[str, str]:
    """What a rank must find in its environment before torch looks at the GPUs.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them; the ranks take them in turn.
    """
    return {
        # Whoever asks for the GPU of this local rank gets the only one that it sees.
        "CUDA_VISIBLE_DEVICES": gpus[local_rank % len(gpus)],
        "LOCAL_RANK": "0",
        # NCCL takes one rank a GPU and host; as ranks of several hosts they talk over sockets.
        "NCCL_HOSTID": f"rank-{local_rank}",
    }


def main() -> None:
    os.environ.update(own_variables(int(os.environ["LOCAL_RANK"]), gpu_ids()))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
