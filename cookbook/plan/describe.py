"""What a layout is, in a few words each, and what it comes to."""

from __future__ import annotations

from typing import Any

from cookbook.config.cell import ATTENTION, LAYERS_KEPT, Cell
from cookbook.plan.search import Candidate


def degrees(cell: Cell) -> str:
    """`TP 2, PP 2 Interleaved1F1B/4, EP 32`; other degrees where they are not 1."""
    layout = cell.layout
    words = [f"TP {layout.tp}", f"PP {layout.pp}"]
    if layout.pp > 1:
        words[-1] += f" {schedule(cell)}"
    words.append(f"EP {layout.ep}")
    others = {"ETP": layout.etp, "CP": layout.cp, "DP replicate": layout.dp_replicate}
    return ", ".join([*words, *(f"{name} {size}" for name, size in others.items() if size > 1)])


def schedule(cell: Cell) -> str:
    """`1F1B`, or `Interleaved1F1B/4` with the layers of a stage where they are set."""
    name = cell.options["parallelism.pipeline_parallel_schedule"]
    layers = cell.options["parallelism.pipeline_parallel_layers_per_stage"]
    return f"{name}/{layers}" if layers else str(name)


def recomputation(cell: Cell) -> str:
    """`full`, `none`, `memory_budget 0.5`, or what selective recomputation saves; and how many
    layers it leaves out.
    """
    mode = str(cell.options["activation_checkpoint.mode"])
    if mode == "memory_budget":
        mode += f" {cell.options['activation_checkpoint.memory_budget']:g}"
    elif cell.saves:
        mode = f"saves {', '.join(sorted(cell.saves))}"
    elif mode == "selective":
        mode = f"1 layer in {cell.options['activation_checkpoint.selective_ac_option']}"
    kept = cell.options[LAYERS_KEPT]
    return f"{mode}; keeps {kept} layers" if kept else mode


def as_mapping(candidate: Candidate, base: Candidate | None = None) -> dict[str, Any]:
    """For programs; what is not known is null. Units are in the names."""
    cell, step = candidate.cell, candidate.step
    layout = cell.layout
    tokens = step.tokens_per_gpu * cell.world if step else None
    return {
        "precision": cell.precision.name,
        "ep_backend": cell.ep_backend.name,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "pipeline_parallel_schedule": schedule(cell) if layout.pp > 1 else None,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.etp,
        "data_parallel_replicate_degree": layout.dp_replicate,
        "local_batch_size": cell.options["training.local_batch_size"],
        "recomputation": recomputation(cell),
        "attention": cell.options[ATTENTION],
        "verdict": candidate.verdict,
        "memory_gib": round(candidate.memory.total, 1),
        "memory_largest": candidate.memory.largest,
        "step_ms": round(step.step_ms, 1) if step else None,
        "tokens_per_step": round(tokens) if tokens else None,
        "tokens_per_second_per_gpu": round(step.tokens_per_second_per_gpu, 1) if step else None,
        "times_the_recipe": times(candidate, base),
        "exposed_ms": round(step.exposed_ms, 1) if step else None,
        "bubble_ms": round(step.terms_ms.get("pipeline bubble", 0.0), 1) if step else None,
        "limited_by": step.largest if step else None,
        "terms_ms": {name: round(ms, 1) for name, ms in step.terms_ms.items()} if step else None,
        "unknown": candidate.unknown or None,
    }


def times(candidate: Candidate, base: Candidate | None) -> float | None:
    """How many times as fast as `base` it is predicted to be."""
    if base is None or base.step is None or candidate.step is None:
        return None
    ratio = candidate.step.tokens_per_second_per_gpu / base.step.tokens_per_second_per_gpu
    return round(ratio, 2)
