"""How long trainings take to start, and where the time goes: as released, and the fast options.

    python -m bench.gpu_start OUT [START ...] [--gpus 2] [--seconds 300]

A start lasts from that of torchrun to the end of the second step. These follow one another, 8
layers of the 16B model on long documents; each has empty caches of its own, but the last:

    released    as released
    fast        the fast options, without kernels of FlashAttention-4 that were compiled ahead
    compiled    the same with them (`cookbook.install.attention_kernels`), compiled before it
    again       the same with the caches of `compiled`

On two GPUs with DeepEP; on one, which exchanges nothing, with the standard backend. What is
imported is read from the disk once before, so that the order does not count, and its bytecode must
be there, as pip leaves it (`python -m compileall`). After every training
OUT/start.json is written anew; the logs are in OUT/runs/<start>. `--device cpu` tries it out with
the debug model: not a result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.cells import first_gpu
from bench.throughput_cells import CELLS, cell_of
from bench.torchrun import Job
from bench.training import Outcome, train_one
from cookbook.base.files import write_whole
from cookbook.base.paths import LOCAL_ASSETS
from cookbook.config.cluster import Cluster
from cookbook.config.resolve import this_machine
from cookbook.install.attention_kernels import compile_for, made_from
from cookbook.install.corpus import is_made, make_corpus
from cookbook.observe.console import COLOURS, read_time
from cookbook.run.folder import CellFolder
from cookbook.titan.common import kernel_cache

# Each start's cell, and whose caches it has.
STARTS = {
    "released": ("released", "released"),
    "fast": ("fast", "fast"),
    "compiled": ("fast", "compiled"),
    "again": ("fast", "compiled"),
}
# By the number of GPUs.
_CELLS = {
    1: {"released": "released-standard-8layers", "fast": "fast-standard-8layers"},
    2: {"released": "released-deepep-8layers", "fast": "fast-8layers"},
}
_STEPS = 3
# What ends with the line, in the order of the log.
ENDS = {
    "imports": "Starting job: ",
    "process group, tokenizer, data": r"Building \S+ \S*with",
    "self-check": r"Self-check: ",
    "model and optimizer": "Training starts at step ",
    "step 1": r"step:\s+1\s",
    "step 2": r"step:\s+2\s",
}
_LINE = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - \S+ - INFO - (.*)")
_IMPORTED = "import torchtitan.train, cookbook.titan.tt_0_2_2, importlib.util as u\n"
_IMPORTED += "if u.find_spec('flash_attn'): import flash_attn.cute.interface"


def parts_of(log: Path, start_seconds: float) -> dict[str, float]:
    """Seconds of each part of the start, which took `start_seconds` to the end of step 2."""
    at = dict[str, datetime]()
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _LINE.search(COLOURS.sub("", line)):
            for name, text in ENDS.items():
                if name not in at and re.match(text, found[2]):
                    at[name] = read_time(found[1])
    ends = {
        name: start_seconds - (at["step 2"] - at[name]).total_seconds()
        for name in ENDS
        if name in at
    }
    before = [0.0, *ends.values()]
    return {name: round(end - before[number], 1) for number, (name, end) in enumerate(ends.items())}


def note_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What is written of a start."""
    attempt = CellFolder(job.folder).attempts()[-1]
    proofs = attempt.path / "self_check.json"
    found = json.loads(proofs.read_text())["proofs"] if proofs.exists() else []
    start = outcome.start_seconds
    return {
        "reason": outcome.reason,
        "start_seconds": start,
        "parts": {} if start is None else parts_of(attempt.log, start),
        "proofs": {f"{one['kernel']} at {one['shape']}": one["seconds"] for one in found},
        "losses": outcome.losses,
        "seconds": outcome.seconds,
    }


def job_of(start: str, out: Path, machine: Cluster) -> Job:
    """The training; on a CPU that of the debug model with DeepEP."""
    kind, caches = STARTS[start]
    name = _CELLS[machine.ranks_per_node][kind]
    trained = CELLS[name if machine.gpu else "deepep"]
    texts = LOCAL_ASSETS / "corpus", LOCAL_ASSETS / "tokenizer"
    cell = cell_of(name, trained, machine, *texts, _STEPS)
    folder, on_gpu = out / "runs" / start, machine.gpu is not None
    return Job(cell, folder, caches=out / caches, released=trained.released and on_gpu)


def measure(starts: Sequence[str], out: Path, machine: Cluster, deadline: float) -> bool:
    """Train them in turn; whether all came to their end."""
    notes: dict[str, Any] = {}
    gpu = machine.gpu.name if machine.gpu else None
    content: dict[str, Any] = {"gpu": gpu, "gpus": machine.ranks_per_node, "starts": notes}
    capability = round(10 * machine.gpu.compute_capability) if machine.gpu else 0
    for start in starts:
        job = job_of(start, out, machine)
        if start == "fast" and any(kernel_cache.COMPILED.glob(f"sm{capability}*")):
            raise SystemExit(f"{kernel_cache.COMPILED}: kernels are there; take them away first")
        if start == "compiled" and capability:
            began = time.monotonic()
            made = compile_for(capability, made_from())
            content["kernels"] = {"made": made, "seconds": round(time.monotonic() - began, 1)}
        notes[start] = note = note_of(job, train_one(job, deadline))
        write_whole(out / "start.json", json.dumps(content, indent=1) + "\n")
        print(f"{start}: {json.dumps(note)} {content.get('kernels', '')}", flush=True)
    return not any(note["reason"] for note in notes.values())


def main() -> int:
    """Measure; status 1 where a training did not come to its end."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("starts", nargs="*", metavar="START", help=f"of {', '.join(STARTS)}; all")
    parser.add_argument("--gpus", type=int, choices=sorted(_CELLS), default=2)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    starts = asked.starts or list(STARTS)
    if unknown := set(starts) - set(STARTS):
        parser.error(f"found {', '.join(sorted(unknown))}, allowed: {', '.join(STARTS)}")
    if asked.device == "cuda" and sys.dont_write_bytecode:
        parser.error(
            "PYTHONDONTWRITEBYTECODE is set, and each start may compile what it imports; unset it"
        )
    gpu = first_gpu(asked.gpus, "--gpus 1 or --device cpu") if asked.device == "cuda" else None
    machine = this_machine(asked.gpus, gpu, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    if not is_made(LOCAL_ASSETS):
        make_corpus(LOCAL_ASSETS)
    subprocess.run([sys.executable, "-c", _IMPORTED], check=False)
    return 0 if measure(starts, asked.out.resolve(), machine, began + asked.seconds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
