"""In: a machine with 4 GPUs. Out: which cells compute the same, and how fast the 16B ones are.

    python -m bench.gpu_numerics OUT [--parts numerics,fault] [--jobs 6] [--seconds 560]
    python -m bench.gpu_numerics OUT --parts throughput --steps 12

Each cell is one torchrun of real TorchTitan on all 4 GPUs with the same seed and real routing (the
throughput cells force balance); tiny ones run side by side. After each cell OUT/results.json and
OUT/numerics.md are written anew, and its log is OUT/logs/<cell>.log. Cells that OUT/results.json
has already are not run again. `--device cpu` tries all of this out on a machine without GPUs, with
the tests' stand-in for DeepEP: small, slow, and not a result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu_cells import PARTS, RANKS, Cell
from bench.gpu_numerics_table import render_report
from cookbook.base.files import write_whole
from cookbook.install.corpus import is_made, make_corpus
from cookbook.log.lines import parse_active, parse_line

ROOT = Path(__file__).resolve().parent.parent

DEBUG = {
    "model.flavor": "debugmodel",
    "training.seq_len": 1024,
    "training.local_batch_size": 8,
    "optimizer.lr": 4e-4,
    "lr_scheduler.warmup_steps": 20,
}
DEBUG_CPU = DEBUG | {"training.seq_len": 64, "training.local_batch_size": 4}
THROUGHPUT = {
    "model.flavor": "16B",
    "training.seq_len": 8192,
    "training.local_batch_size": 4,
    "optimizer.lr": 1e-4,
    "lr_scheduler.warmup_steps": 2000,
}


def torchrun_command(cell: Cell, out: Path, steps: int, cpu: bool) -> list[str]:
    options: dict[str, Any] = {
        "job.dump_folder": out / "runs" / cell.name,
        "model.name": "deepseek_v3",
        "model.hf_assets_path": out / "assets" / "tokenizer",
        "training.dataset": "c4_test",
        "training.dataset_path": out / "assets" / "corpus",
        "training.steps": steps,
        "optimizer.eps": 1e-8,
        "metrics.log_freq": 1,
        "comm.trace_buf_size": 0,
        "debug.seed": 42,
    }
    options |= THROUGHPUT if cell.part == "throughput" else DEBUG_CPU if cpu else DEBUG
    flags = [f"--{name}={value}" for name, value in options.items()]
    flags.append("--metrics.disable_color_printing")
    if cell.part == "throughput":
        flags.append("--debug.moe_force_load_balance")
    if not cell.released:
        flags += [
            "--job.custom_config_module=cookbook.titan.stack_2026_02.job_config",
            "--experimental.custom_import=cookbook.titan.stack_2026_02",
        ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1"),
        *(f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        *(f"--rdzv-id={cell.name}", "--role=rank", "--tee=3"),
        *(f"--local-ranks-filter={cell.metrics_rank}",),
        *(f"--log-dir={out / 'runs' / cell.name / 'ranks'}", "-m", "torchtitan.train"),
        *flags,
        *cell.arguments,
    ]


class Run:
    """A cell under way."""

    def __init__(self, cell: Cell, out: Path, steps: int, cpu: bool) -> None:
        self.cell, self.steps = cell, steps
        self.log = out / "logs" / f"{cell.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.command = torchrun_command(cell, out, steps, cpu)
        paths = [str(ROOT), *([str(ROOT / "tests" / "stand_in")] if cpu else [])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).strip(":"),
            "OMP_NUM_THREADS": "1",
            "LOG_RANK": str(cell.metrics_rank),
            "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
            "TRITON_CACHE_DIR": str(out / "triton"),
            # Many processes compile at once; each would take a thread per core.
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            # The corpus is a local folder: lose no time on a network that may not be there.
            "HF_DATASETS_CACHE": str(out / "datasets"),
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("COOKBOOK_ATTEMPT_DIR", None)
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def overdue(self, deadline: float) -> bool:
        now = time.monotonic()
        return now > self.started + self.cell.seconds or now > deadline

    def stop(self) -> None:
        """End torchrun, which ends its workers; then those that it left, each by its id."""
        workers = _children(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for worker in workers:
            if _is_ours(worker, self.cell.name):
                os.kill(worker, signal.SIGKILL)

    def result(self, stopped: str) -> dict[str, Any]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        steps = {m.step: m for m in map(parse_line, text.splitlines()) if m and m.step}
        metrics = [steps[number] for number in sorted(steps)]
        active = next((found for found in map(parse_active, text.splitlines()) if found), None)
        code = self.process.returncode
        finished = code == 0 and len(metrics) == self.steps
        speeds = [m.tokens_per_second for m in metrics[len(metrics) // 2 :] if m.tokens_per_second]
        return asdict(self.cell) | {
            "status": "finished" if finished else "failed",
            "reason": stopped or ("" if finished else _reason(text, code)),
            "wall_s": round(time.monotonic() - self.started, 1),
            "losses": [m.loss for m in metrics],
            "grad_norms": [m.grad_norm for m in metrics],
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "memory_gib": max((m.memory_gib or 0 for m in metrics), default=None),
            "active": active,
            "command": shlex.join(self.command),
        }


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.parent.name))
    return found


def _is_ours(process: int, name: str) -> bool:
    """Whether the process still is a worker of this cell: ids are used again."""
    try:
        return f"/runs/{name}".encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _reason(text: str, code: int | None) -> str:
    """The line that says most about a failure: a refusal, an assert, the last error."""
    lines = text.splitlines()
    for pattern in (r"cookbook refuses: .*", r"CUDA error: .*", r"^.*\b\w*(Error|Exception): .*"):
        found = [match.group() for line in lines if (match := re.search(pattern, line))]
        if found:
            return re.sub(r"^(\[rank\d+\]:\s*)+", "", found[0])[:300]
    return f"exit status {code}"


def run_cells(
    cells: list[Cell], out: Path, steps: int, jobs: int, seconds: float, cpu: bool
) -> list[dict[str, Any]]:
    """Run what has no result yet, `jobs` at a time, until `seconds` have passed."""
    deadline = time.monotonic() + seconds
    path = out / "results.json"
    results: dict[str, dict[str, Any]] = {}
    if path.exists():
        kept = json.loads(path.read_text())["cells"]
        results = {r["name"]: r for r in kept if r["status"] == "finished" or r["expected_to_fail"]}
    waiting = [cell for cell in cells if cell.name not in results]
    running: list[Run] = []
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < deadline - 30:
            running.append(Run(waiting.pop(0), out, steps, cpu))
        if not running:
            break
        time.sleep(0.5)
        for run in list(running):
            stopped = ""
            if run.process.poll() is None:
                if not run.overdue(deadline):
                    continue
                stopped = f"stopped after {time.monotonic() - run.started:.0f} s"
                run.stop()
            running.remove(run)
            results[run.cell.name] = found = run.result(stopped)
            print(f"{found['status']:8} {found['wall_s']:6.1f} s {run.cell.name} {found['reason']}")
            _write(out, list(results.values()), cpu)
    for cell in waiting:
        results[cell.name] = asdict(cell) | {"status": "not run", "reason": "no time left"}
        results[cell.name] |= {"losses": [], "grad_norms": [], "active": None}
    _write(out, list(results.values()), cpu)
    return list(results.values())


def _write(out: Path, results: list[dict[str, Any]], cpu: bool) -> None:
    document = {"device": "cpu" if cpu else "cuda", "command": shlex.join(sys.argv)}
    write_whole(out / "results.json", json.dumps(document | {"cells": results}, indent=1) + "\n")
    write_whole(out / "numerics.md", render_report(results, cpu))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="numerics,fault", help=f"of {','.join(PARTS)}")
    parser.add_argument("--only", default="", help="regular expression of cell names")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=6, help="cells at a time; throughput: always 1")
    parser.add_argument("--seconds", type=float, default=560)
    options = parser.parse_args()
    cpu = options.device == "cpu"
    out = options.out.resolve()
    if not is_made(out / "assets"):
        make_corpus(out / "assets")
    cells = [cell for part in options.parts.split(",") for cell in PARTS[part]()]
    cells = [c for c in cells if re.search(options.only, c.name) and not (cpu and c.gpu_only)]
    jobs = 1 if "throughput" in options.parts else options.jobs
    results = run_cells(cells, out, options.steps, jobs, options.seconds, cpu)
    print((out / "numerics.md").read_text())
    return 0 if all(r["status"] == "finished" or r["expected_to_fail"] for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
