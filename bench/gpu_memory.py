"""In: a machine with 4 GPUs. Out: memory measured in short real jobs, beside what check predicts.

    python -m bench.gpu_memory -o memory.json        # measure; under 6 minutes on 4 H200
    python -m bench.gpu_memory --table memory.json   # predicted beside measured, anywhere
    python -m bench.gpu_memory --cpu -o cpu.json     # the same steps with the debug model, no GPU

Jobs share the GPUs where their predicted memory leaves room for one another: what is measured is
what each process's own allocator has reserved. The file is written after every job.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.cell import Cell
from cookbook.check.dry_run import build_cells
from cookbook.check.memory import predict_memory
from cookbook.cluster import load_cluster
from cookbook.files import write_whole
from cookbook.machine import visible_gpus
from cookbook.recipe import Setting, load_recipe
from cookbook.render import ROOT, train_args
from cookbook.stack import Stack, load_stack
from cookbook.sweep import CellRequest, expand_sweep, sweep_of_recipe

STEPS = 4
LIMIT_S = 150
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_FULL = {"activation_checkpoint.mode": "full"}
_NONE = {"activation_checkpoint.mode": "none"}
_BY_OPERATION = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
_EVERY_SECOND = {**_BY_OPERATION, "activation_checkpoint.selective_ac_option": "2"}
_EAGER = {"compile.enable": False}
_PP2 = {"parallelism.pipeline_parallel_degree": 2, "parallelism.expert_parallel_degree": 2}
_INTERLEAVED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
_TP2 = {"parallelism.tensor_parallel_degree": 2}
_EIGHT = {"model.flavor": "16B_8layers"}
_DEBUG = {"model.flavor": "debugmodel", "training.seq_len": 4096, **_EAGER}


@dataclass(frozen=True)
class Point:
    """One job: the 16B recipe on 4 GPUs with these options over it; unset: EP 4, sequence 8192."""

    name: str
    batch: int
    options: Mapping[str, Any]
    ep_backend: str = "standard"
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


# The most telling first: a run that is cut short has them.
POINTS = (
    Point("16B full", 4, _FULL),
    Point("16B TP 2", 4, {**_FULL, **_TP2}),
    Point("16B none", 1, _NONE),
    Point("16B PP 2 1F1B", 4, {**_FULL, **_PP2}),
    Point("16B selective op", 4, _BY_OPERATION),
    Point("16B full DeepEP", 4, _FULL, ep_backend="deepep", alone=True),
    Point("16B full", 8, _FULL),
    Point("8 layers none", 2, {**_EIGHT, **_NONE}),
    Point("8 layers selective op", 2, {**_EIGHT, **_BY_OPERATION}),
    Point("8 layers every 2nd", 4, {**_EIGHT, **_EVERY_SECOND}),
    Point("8 layers eager", 2, {**_EIGHT, **_FULL, **_EAGER}),
    Point("8 layers PP 2 interleaved", 8, {**_EIGHT, **_FULL, **_PP2, **_INTERLEAVED}),
    Point("debug none", 16, {**_DEBUG, **_NONE}),
    Point("debug full TP 2", 16, {**_DEBUG, **_FULL, **_TP2}),
    Point("16B full expandable", 4, _FULL, environment=_EXPANDABLE),
    Point("8 layers none DeepEP", 2, {**_EIGHT, **_NONE}, ep_backend="deepep", alone=True),
)
_TINY = {"model.flavor": "debugmodel", "training.seq_len": 128, **_EAGER}
_TINY |= {"parallelism.expert_parallel_degree": 2}
CPU_POINTS = (
    Point("debug none", 2, {**_TINY, **_NONE}),
    Point("debug full", 1, {**_TINY, **_FULL}),
)


def cell_of(point: Point, cluster_file: str) -> Cell:
    """The point as a cell of the cookbook's 16B recipe."""
    stack = _stack_with_flavors()
    options: dict[str, Any] = {
        "parallelism.expert_parallel_degree": 4,
        "training.local_batch_size": point.batch,
        "training.steps": STEPS,
        "training.dataset": "c4_test",
        "training.dataset_path": "assets/local/corpus",
        "model.hf_assets_path": "assets/local/tokenizer",
        "debug.moe_force_load_balance": True,
        "checkpoint.enable": False,
        "metrics.enable_tensorboard": False,
        "experimental.custom_import": "bench.memory_probe",
        **point.options,
    }
    request = CellRequest(
        cluster=load_cluster(cluster_file, stack),
        stack=stack,
        ep_backend=point.ep_backend,
        overrides={name: Setting(value, "bench") for name, value in options.items()},
    )
    recipe = load_recipe("deepseek_v3_16b", stack)
    (cell,) = expand_sweep(sweep_of_recipe(recipe, stack), request)
    return cell


@functools.cache
def _stack_with_flavors() -> Stack:
    """The stack, with what `memory_probe` adds to TorchTitan's flavors."""
    stack = load_stack()
    flavors = stack.models["deepseek_v3"]
    fewer = {
        f"16B_{layers}layers": dataclasses.replace(flavors["16B"], n_layers=layers)
        for layers in (4, 8)
    }
    return dataclasses.replace(stack, models={"deepseek_v3": {**flavors, **fewer}})


def write_cluster(folder: Path, gpu: Mapping[str, Any] | None, ranks: int) -> str:
    """A profile of this machine, without the settings of any other."""
    lines = ["description: bench", "scheduler: slurm", "nodes: 1", "emulate: true"]
    if gpu:
        lines += [f"gpus_per_node: {ranks}", f"gpu: {json.dumps(dict(gpu))}"]
    else:
        lines.append(f"ranks_per_node: {ranks}")
    path = folder / "bench.yaml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


class Job:
    """One point as a running torchrun."""

    def __init__(self, point: Point, cell: Cell, folder: Path, cache: Path) -> None:
        self.point, self.folder = point, folder
        self.started = time.monotonic()
        (folder / "probe").mkdir(parents=True)
        environment = {
            **os.environ,
            **point.environment,
            "MEMORY_PROBE_DIR": str(folder / "probe"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "WANDB_MODE": "disabled",
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={cell.world}", "-m", "torchtitan.train", *train_args(cell)]
        command.append(f"--job.dump_folder={folder / 'out'}")
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_over(self) -> bool:
        """Whether it has ended; one that takes too long is ended here."""
        if self._process.poll() is None and self.seconds > LIMIT_S:
            self.stop()
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the job's processes, and no other's."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def result(self) -> dict[str, Any]:
        """The peaks over all ranks and steps."""
        notes = [
            json.loads(line)
            for path in (self.folder / "probe").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        log = (self.folder / "log").read_text(errors="replace")
        code = self._process.returncode
        peaks = {
            key: round(max(note[key] for note in notes if key in note), 2)
            for key in ("reserved_gib", "active_gib", "device_gib", "retries")
            if any(key in note for note in notes)
        }
        error = None
        if code:
            words = [line for line in log.splitlines() if "Error" in line or "refuses" in line]
            error = "out of memory" if "out of memory" in log else (words or [f"status {code}"])[-1]
        return peaks | {"seconds": round(self.seconds, 1), "error": error and error[-300:]}


def predict(points: Sequence[Point], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What check says of each, or why it cannot."""
    answers: list[dict[str, Any]] = []
    for point, cell, built in zip(points, cells, build_cells(cells), strict=True):
        if not built.views:
            answers.append({"error": built.unavailable or str(built.failure)})
            continue
        environment = {**cell.environment, **point.environment}
        stages = [predict_memory(cell, view, environment) for view in built.views]
        peak = max(stages, key=lambda stage: stage.reserved)
        terms = {name: round(size, 2) for name, size in peak.terms.items()}
        answers.append(
            {"reserved_gib": round(peak.reserved, 2), "moment": peak.moment, "terms": terms}
        )
    return answers


def measure(
    points: Sequence[Point],
    cells: Sequence[Cell],
    predicted: Sequence[float],
    room: float,
    out: Path,
) -> None:
    """Run the points, as many at a time as `room` GiB a GPU allows; write `out` after each."""
    gpus = visible_gpus()
    content: dict[str, Any] = {
        "gpu": vars(gpus[0]) if gpus else None,
        "ranks": cells[0].world,
        "points": {},
    }
    waiting = list(range(len(points)))
    running: dict[int, Job] = {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
        folder = Path(temporary)
        try:
            while waiting or running:
                for index in list(waiting):
                    taken = sum(predicted[other] for other in running)
                    crowd = running and (
                        points[index].alone or any(points[i].alone for i in running)
                    )
                    if crowd or len(running) >= 3 or (running and taken + predicted[index] > room):
                        continue
                    waiting.remove(index)
                    running[index] = Job(
                        points[index], cells[index], folder / str(index), folder / "inductor"
                    )
                for index, job in list(running.items()):
                    if not job.is_over():
                        continue
                    del running[index]
                    result = job.result()
                    content["points"][key_of(points[index])] = result
                    content["seconds"] = round(time.monotonic() - begin, 1)
                    write_whole(out, json.dumps(content, indent=1) + "\n")
                    print(f"{key_of(points[index])}: {result}", flush=True)
                time.sleep(0.2)
        finally:
            for job in running.values():
                job.stop()


def key_of(point: Point) -> str:
    """A point's name in the file and the table."""
    return f"{point.name}, batch {point.batch}"


def print_table(
    points: Sequence[Point], measured: Mapping[str, Any], cells: Sequence[Cell]
) -> float:
    """Markdown; returns the largest error, as a part of what was measured."""
    print("| job | predicted GiB | measured GiB | error | peak at | largest terms |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for point, answer in zip(points, predict(points, cells), strict=True):
        found = measured["points"].get(key_of(point), {})
        reserved = found.get("reserved_gib") if not found.get("error") else None
        shown = found.get("error") or (f"{reserved:.1f}" if reserved else "not measured")
        if "error" in answer:
            print(f"| {key_of(point)} | {answer['error']} | {shown} | | | |")
            continue
        error = ""
        if reserved and measured["gpu"]:
            part = answer["reserved_gib"] / reserved - 1
            worst, error = max(worst, abs(part)), f"{part:+.0%}"
        largest = sorted(answer["terms"].items(), key=lambda term: -term[1])[:3]
        terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
        print(
            f"| {key_of(point)} | {answer['reserved_gib']:.1f} | {shown} | {error} | "
            f"{answer['moment']} | {terms} |"
        )
    return worst


def main() -> int:
    """Measure, or show what was measured; status 1 where a prediction is off by over 15%."""
    parser = argparse.ArgumentParser(description="GPU memory, predicted beside measured")
    parser.add_argument("-o", "--output", type=Path, default=Path("memory.json"))
    parser.add_argument("--table", type=Path, metavar="FILE", help="only show what FILE holds")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORDS", help="points to run"
    )
    parser.add_argument("--cpu", action="store_true", help="the script's own test, without GPUs")
    arguments = parser.parse_args()
    measured = json.loads(arguments.table.read_text()) if arguments.table else None
    known = CPU_POINTS if arguments.cpu or (measured and not measured["gpu"]) else POINTS
    points = [
        point
        for point in known
        if not arguments.only or any(words in key_of(point) for words in arguments.only)
    ]
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        gpu: Mapping[str, Any] | None
        if measured:
            gpu, ranks = measured["gpu"], measured["ranks"]
        elif arguments.cpu:
            gpu, ranks = None, 2
        else:
            gpus = visible_gpus()
            if len(gpus) < 4:
                sys.exit(f"4 GPUs are needed, found {len(gpus)}; try --cpu")
            gpu, ranks = vars(gpus[0]), 4
        cluster = write_cluster(Path(folder), gpu, ranks)
        cells = [cell_of(point, cluster) for point in points]
        if measured is None:
            answers = predict(points, cells)
            room = gpu["memory_gib"] - 8 if gpu else 100.0
            # Unknown ones take all; others get a margin for what is outside the allocator.
            needs = [answer.get("reserved_gib", room) * 1.1 + 3 for answer in answers]
            measure(points, cells, needs, room, arguments.output)
            measured = json.loads(arguments.output.read_text())
        worst = print_table(points, measured, cells)
    print(f"\nlargest error: {worst:.0%} (target: within 15%)")
    return 0 if worst <= 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
