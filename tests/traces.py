"""Writes small traces as PyTorch's profiler writes them, with what happened known beforehand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD = 100, 101
GEMM = "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN"
POINTWISE = "triton_poi_fused_add_mul_silu_3"
NCCL = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class TraceFile:
    """A rank's trace; times in microseconds from an arbitrary beginning."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        gpu: str | None = "NVIDIA H200",
        groups: Sequence[tuple[str, Sequence[int]]] = (),
        pipeline: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.events: list[dict[str, Any]] = []
        self._correlation = 0
        meshes = [("default_pg", range(world)), ("mesh_tp", [rank]), *groups]
        # PyTorch gives a mesh of all ranks no group of its own.
        if [*pipeline] != [*range(world)]:
            meshes.append(("mesh_pp", pipeline or [rank]))
        self.header: dict[str, Any] = {
            "deviceProperties": [{"id": 0, "name": gpu}] if gpu else [],
            "distributedInfo": {
                "rank": rank,
                "world_size": world,
                "pg_config": [
                    {"pg_name": str(number), "pg_desc": name, "ranks": list(ranks)}
                    for number, (name, ranks) in enumerate(meshes)
                ],
            },
        }

    def add(
        self, category: str, name: str, start: float, end: float, thread: int, **arguments: Any
    ) -> TraceFile:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": end - start,
                "args": {name.replace("_", " "): value for name, value in arguments.items()},
            }
        )
        return self

    def step(self, number: int, start: float, end: float) -> TraceFile:
        """A training step of the host; the profiler counts them from 0."""
        return self.add("user_annotation", f"ProfilerStep#{number - 1}", start, end, MAIN)

    def op(
        self, name: str, start: float, end: float, thread: int = MAIN, **arguments: Any
    ) -> TraceFile:
        return self.add("cpu_op", name, start, end, thread, **arguments)

    def note(self, name: str, start: float, end: float, thread: int = MAIN) -> TraceFile:
        return self.add("user_annotation", name, start, end, thread)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        launched: float | None = None,
        thread: int = MAIN,
        **arguments: Any,
    ) -> TraceFile:
        """A kernel, and the host's call that launched it: by default long before it started."""
        self._correlation += 1
        if launched is not None:
            call = {"correlation": self._correlation}
            self.add("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, **call)
        return self.add("kernel", name, start, end, 7, correlation=self._correlation, **arguments)

    def collective(
        self,
        collective: str,
        group: str,
        start: float,
        end: float,
        launched: float | None = None,
        name: str = NCCL,
    ) -> TraceFile:
        """A kernel of NCCL, with what PyTorch records of it."""
        arguments: dict[str, Any] = {
            "Collective_name": collective,
            "Process_Group_Description": group,
            "Process_Group_Ranks": "[0, 1]",
        }
        return self.kernel(name, start, end, launched, **arguments)

    def write(self, folder: Path, packed: bool = False) -> Path:
        """Write `rank<R>_trace.json` (with `.gz`) into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        events = [{"ph": "M", "name": "process_name", "args": {}}, *self.events]
        content = {**self.header, "traceEvents": events, "traceName": "x"}
        text = json.dumps(content, indent=1).encode()
        path = folder / f"rank{self.rank}_trace.json{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(text) if packed else text)
        return path
