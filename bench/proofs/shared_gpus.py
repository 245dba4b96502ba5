"""Run a module in a rank that shares its GPU: torchrun -m bench.proofs.shared_gpus MODULE ...

A GPU then stands for several, to compare numerics, never speeds. Start CUDA's Multi-Process Service
first: DeepEP's kernels wait for one another, so they must run concurrently.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from cookbook.base.gpus import visible_gpus


def own_variables(local_rank: int, gpus: Sequence[str]) -> Mapping[str, str]:
    """Return the environment that a rank needs before torch looks at the GPUs.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them; the ranks take them in turn.
    """
    return {
        "CUDA_VISIBLE_DEVICES": gpus[local_rank % len(gpus)],
        # The only GPU that the rank sees.
        "LOCAL_RANK": "0",
        # NCCL allows one rank per GPU and host; ranks of several hosts talk over sockets.
        "NCCL_HOSTID": f"rank-{local_rank}",
    }


if __name__ == "__main__":
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [str(number) for number in range(len(visible_gpus()))]
    gpus = numbers if chosen is None else chosen.split(",")
    os.environ.update(own_variables(int(os.environ["LOCAL_RANK"]), gpus))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
