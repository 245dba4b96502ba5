"""Measure the memory of an export for models of several sizes, on a CPU.

    python -m bench.export_memory OUT --layers 5 8

Each size is TorchTitan's 16B with that many layers, random weights, saved in FP32 as training saves
them, and exported in BF16 in files of 5 GB. OUT needs 6 bytes a parameter of the largest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from cookbook.titan.tt_0_2_2 import export
from cookbook.titan.tt_0_2_2.families import FAMILIES
from cookbook.titan.tt_0_2_2.families.deepseek_v3 import DEEPSEEK_V3


def cut_flavor(layers: int) -> Any:
    """Return the arguments of the 16B with fewer layers."""
    args = DEEPSEEK_V3.flavors()["16B"]
    args.n_layers, args.moe_impl = layers, "standard"
    return args


def save_random(folder: Path, layers: int) -> float:
    """Save a native checkpoint; return its GB. The weights lie in files, to save this one's RAM."""
    with torch.device("meta"):
        state = DEEPSEEK_V3.model(cut_flavor(layers)).state_dict()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        for number, (name, tensor) in enumerate(state.items()):
            size = tensor.numel()
            flat = torch.from_file(f"{scratch}/{number}", True, size, dtype=tensor.dtype)
            state[name] = flat.normal_().view(tensor.shape)
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e9


def peak_gb() -> float:
    """Return this process's peak memory; `getrusage` counts that of a parent before `exec`."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024 / 1e9


def export_alone(request: export.Request, layers: int, peaks: Any) -> None:
    """Export in this process; put the peaks of its imports and of all into `peaks`."""
    cut = replace(DEEPSEEK_V3, flavors=lambda: {"cut": cut_flavor(layers)})
    FAMILIES[cut.name] = cut
    imports = peak_gb()
    export.export(request)
    peaks.put((imports, peak_gb()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 8])
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for layers in options.layers:
        folder = options.out / f"{layers}-layers"
        folder.mkdir(parents=True)
        saved = save_random(folder / "step-1", layers)
        paths = str(folder / "step-1"), str(folder / "hf")
        request = export.Request(*paths, DEEPSEEK_V3.name, "cut", 8192)
        peaks = spawn.SimpleQueue()
        process = spawn.Process(target=export_alone, args=(request, layers, peaks))
        process.start()
        process.join()
        imports, peak = peaks.get()
        files = len([*(folder / "hf").glob("*.safetensors")])
        print(
            f"{layers} layers: {saved:.1f} GB saved, {files} files; "
            f"peak {peak:.1f} GB ({imports:.1f} GB after the imports)",
            flush=True,
        )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
