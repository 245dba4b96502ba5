"""Compare this machine's kernels with a reference: `submit.py doctor --numerics`.

The kernels of all precisions and EP backends that can run here are checked, on this machine's GPUs
or, without GPUs, on two CPU ranks.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from cookbook.base.gpus import visible_gpus
from cookbook.base.paths import ROOT, python_path
from cookbook.config.cell import Cell, train_argv
from cookbook.config.cluster import Cluster
from cookbook.config.dialect.names import PACKAGE
from cookbook.config.facts import Facts
from cookbook.config.recipe import names_in
from cookbook.config.resolve import cell_on, this_machine
from cookbook.config.validate import missing_here, validation_errors
from cookbook.observe.failure import find_reason

# The second recipe differs in its attention; its other kernels are the same as the first recipe's.
_RECIPES = {"gpu": ("deepseek_v3_16b", "qwen3_30b_a3b"), "cpu": ("debug", "qwen3_debug")}


def prove(output: Path | None) -> int:
    """Check the kernels on this machine, and write the proofs; return 0 if all are correct."""
    gpus = visible_gpus()
    # Two ranks on a CPU, so that tokens are sent between ranks.
    ranks = len(gpus) or 2
    chosen = candidates(this_machine(ranks, gpus[0] if gpus else None))
    for cell, reason in chosen:
        if reason:
            print(f"not here  {cell.name}: {reason}")
    print(flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cells = folder / "cells.json"
        proved = [(cell.name, train_argv(cell)) for cell, reason in chosen if not reason]
        cells.write_text(json.dumps(proved), encoding="utf-8")
        written = output or folder / "proofs.json"
        # Rank 0 prints the verdicts. Other output goes to files that `find_reason` searches.
        redirects = ",".join(f"{rank}:{3 if rank else 2}" for rank in range(ranks))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", f"--redirects={redirects}"),
            *(f"--log-dir={folder}/ranks", "-m", f"{PACKAGE}.self_check_main"),
            *(str(cells), "-o", str(written)),
        ]
        environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        pipes: Any = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": ROOT}
        with (
            (folder / "train.log").open("w", encoding="utf-8") as log,
            subprocess.Popen(command, stderr=log, **pipes) as torchrun,
        ):
            for line in torchrun.stdout or ():
                is_verdict = line.startswith(("ok     ", "WRONG  "))
                print(line, end="", flush=True, file=None if is_verdict else log)
        status = torchrun.returncode
        if not written.exists():
            print(f"\nnot proved: {find_reason(folder) or f'torchrun ended with status {status}'}")
            return 1
        found = json.loads(written.read_text(encoding="utf-8"))
    proofs, where = found["proofs"], found["gpu"] or "the CPU"
    verdict = f"{len(proofs)} kernels proved on {where} in {found['seconds']:.0f} s"
    if wrong := sum(not proof["ok"] for proof in proofs):
        verdict = f"{wrong} of {len(proofs)} kernels are wrong on {where}"
    print(f"\n{verdict}")
    return 1 if status else 0


def candidates(machine: Cluster) -> list[tuple[Cell, str | None]]:
    """Return cells that test all precisions, all EP backends, TP and FlashAttention-4 on `machine`.

    Each cell comes with the reason why it cannot run, or None if it can.
    """
    chunks = {Facts.loss_chunks: 8}
    flash = {Facts.attention: "flash_attention_4"} | chunks
    backends = names_in("ep_backend")
    others = [backend for backend in backends if backend != "standard"]
    with_tp = backends if machine.gpu and machine.ranks_per_node > 1 else []
    first, second = _RECIPES["gpu" if machine.gpu else "cpu"]
    choices: list[tuple[str, str, str, dict[str, Any]]] = [
        *((first, precision, "standard", {}) for precision in names_in("precision")),
        # Test EP backends in BF16 and in MXFP8: MXFP8 pads an expert's rows to a larger multiple.
        *((first, one, backend, {}) for backend, one in product(others, ("bf16", "mxfp8"))),
        (first, "bf16", "standard", flash),
        *((first, "mxfp8", backend, {Facts.tp: 2} | chunks) for backend in with_tp),
        *((second, "bf16", "standard", options) for options in ({}, flash)),
    ]
    degrees = {
        Facts.tp: 1,
        Facts.pp: 1,
        # EP must divide the number of ranks and that of experts (64 or 128 in GPU recipes).
        Facts.ep: math.gcd(machine.ranks_per_node, 64),
        Facts.local_batch: 4,
    }
    found = []
    for recipe, precision, ep_backend, options in choices:
        words = [precision, ep_backend, *(f"{name}={value}" for name, value in options.items())]
        name = " ".join([*words, second] if recipe == second else words)
        cell = cell_on(machine, recipe, precision, ep_backend, degrees | options, name, "doctor")
        # Ignore findings not about kernels: a run's missing files, and too few ranks for FSDP.
        problems = [
            finding
            for finding in [*validation_errors(cell), *missing_here(cell)]
            if finding.rule != "files" and finding.option != Facts.dp_shard
        ]
        found.append((cell, problems[0].reason if problems else None))
    return found
