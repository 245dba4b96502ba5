"""The cells whose numerics and speed `bench.gpu_numerics` compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster
from cookbook.config.resolve import cell_on

RANKS = 4

# Relative difference of losses, at every step, below which two backends count as the same.
BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        reference: the case whose losses it is compared with; empty where there is none.
        bound: largest allowed relative difference; None where the difference is only shown.
        released: TorchTitan as it is, without the cookbook's hooks (GPU only).
        expected_to_fail: the released code is known to fail here; what counts is that it is seen.
    """

    name: str
    part: str
    precision: str
    backend: str
    layout: str
    variant: str
    reference: str = ""
    bound: float | None = BOUND
    released: bool = False
    expected_to_fail: bool = False
    seconds: int = 240
    gpu_only: bool = False


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1-ep4": {"parallelism.expert_parallel_degree": 4},
    "tp2-ep4": {
        "parallelism.expert_parallel_degree": 4,
        "parallelism.tensor_parallel_degree": 2,
    },
    "pp2-ep2": {
        "parallelism.expert_parallel_degree": 2,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_microbatch_size": 2,
    },
}

_KEPT = {"activation_checkpoint.mode": "none", "compile.enable": False}
_RECOMPUTED = {"activation_checkpoint.mode": "full", "compile.enable": False}
_COMPILED = {"compile.enable": True, "compile.components": ["model", "loss"]}
# What the fast recipes choose, and DeepEP in parts.
_FAST = {
    "model.attention": "flash_attention_4",
    "loss.num_chunks": 4,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
    "activation_checkpoint.op_sac_save_list": ["attention", "communication", "grouped_mm", "mm"],
    "activation_checkpoint.num_layers_kept": 1,
    "deepep.score_activations": True,
    "deepep.num_chunks": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": _KEPT,
    "recompute": _RECOMPUTED,
    "compile": {**_KEPT, **_COMPILED},
    "recompute-compile": {**_RECOMPUTED, **_COMPILED},
    "fast": {**_FAST, "compile.enable": False},
    "fast-compile": {**_FAST, **_COMPILED},
    "deterministic": {**_KEPT, "debug.deterministic": True},
}

# Over the recipes: the same data, and a learning rate that only rises.
EVERY = {
    "training.dataset": "c4_test",
    "lr_scheduler.decay_ratio": None,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
    "model.print_after_conversion": False,
    "checkpoint.enable": False,
    "checkpoint.interval_minutes": 0,
    "metrics.enable_tensorboard": False,
    "comm.trace_buf_size": 0,
}
_DEBUG: dict[str, Any] = {
    "training.seq_len": 1024,
    "training.local_batch_size": 8,
    "optimizer.lr": 4e-4,
    "lr_scheduler.warmup_steps": 20,
}
_DEBUG_CPU = _DEBUG | {"training.seq_len": 64, "training.local_batch_size": 4}
_THROUGHPUT = {"training.local_batch_size": 4, "debug.moe_force_load_balance": True}


def cell_of(case: Case, machine: Cluster, assets: Path, steps: int) -> Cell:
    """The case as a cell on `machine`, with the text and the tokenizer in `assets`."""
    if case.part == "throughput":
        recipe, own = "deepseek_v3_16b", _THROUGHPUT
    else:
        recipe, own = "debug", _DEBUG if machine.gpu else _DEBUG_CPU
    options = {
        **EVERY,
        **own,
        **LAYOUTS[case.layout],
        **VARIANTS[case.variant],
        "training.dataset_path": str(assets / "corpus"),
        "model.hf_assets_path": str(assets / "tokenizer"),
        "training.steps": steps,
    }
    return cell_on(machine, recipe, case.precision, case.backend, options, case.name)


def make_case(
    part: str,
    precision: str,
    backend: str,
    layout: str,
    variant: str = "plain",
    *,
    suffix: str = "",
    **changes: Any,
) -> Case:
    """A case that is compared with the standard backend's, unless `changes` say otherwise."""
    name = f"{precision}-{backend}-{layout}-{variant}{suffix}"
    standard = f"{precision}-standard-{layout}-{variant}"
    reference = "" if name == standard else standard
    return Case(
        name, part, precision, backend, layout, variant, **{"reference": reference} | changes
    )


def numerics_cases() -> list[Case]:
    """The matrix, what takes longest first."""
    part = "numerics"
    cases = [
        make_case(part, "bf16", backend, layout, variant, seconds=400, gpu_only=True)
        for variant in ("recompute-compile", "compile")
        for layout in LAYOUTS
        for backend in ("standard", "deepep")
    ]
    cases += [
        make_case(part, "bf16", backend, layout, variant)
        for variant in ("recompute", "plain")
        for layout in LAYOUTS
        for backend in ("standard", "deepep")
    ]
    for precision in ("mxfp8", "mxfp8_wgrad_hp", "mxfp8_linear"):
        for layout in ("tp1-ep4", "tp2-ep4"):
            cases.append(make_case(part, precision, "standard", layout))
            cases.append(make_case(part, precision, "deepep", layout))
            # With high-precision weight gradients these alone see the exchange's rounding.
            bound = None if precision == "mxfp8_wgrad_hp" else BOUND
            cases.append(make_case(part, precision, "mxfp8_a2a", layout, bound=bound))
    cases += [
        make_case(part, "float8", backend, "tp1-ep4", gpu_only=True)
        for backend in ("standard", "deepep")
    ]
    # Compiled emulation, against the same without compilation, which rounds elsewhere.
    for precision, layout in (("mxfp8", "tp1-ep4"), ("mxfp8_linear", "tp2-ep4")):
        reference = f"{precision}-standard-{layout}-plain"
        cases.append(
            make_case(
                part,
                precision,
                "standard",
                layout,
                "recompute-compile",
                reference=reference,
                bound=None,
                seconds=300,
                gpu_only=True,
            )
        )
    # How far a run is from itself: what no bound can be below.
    cases += [
        make_case(part, "bf16", "standard", layout, suffix="-again")
        for layout in ("tp1-ep4", "tp2-ep4")
    ]
    return cases


def fast_cases() -> list[Case]:
    """What the fast recipes choose, beside the published options: both compiled."""
    return [
        make_case(
            "fast",
            "bf16",
            "deepep",
            layout,
            "fast-compile",
            reference=f"bf16-standard-{layout}-recompute-compile",
            seconds=400,
            gpu_only=True,
        )
        for layout in LAYOUTS
    ]


def fault_cases() -> list[Case]:
    """TorchTitan as released, to show what is corrected; and deterministic mode, twice."""
    part = "fault"
    released: dict[str, Any] = {
        "released": True,
        "gpu_only": True,
        "suffix": "-released",
        "bound": None,
    }
    return [
        make_case(part, "bf16", "deepep", "tp1-ep4", **released),
        make_case(part, "bf16", "standard", "tp2-ep4", **released),
        make_case(part, "bf16", "deepep", "tp2-ep4", **released),
        make_case(
            part,
            "bf16",
            "deepep",
            "tp1-ep4",
            "deterministic",
            expected_to_fail=True,
            reference="",
            seconds=90,
            **released,
        ),
        make_case(part, "bf16", "standard", "tp1-ep4", "deterministic", gpu_only=True),
        make_case(part, "bf16", "deepep", "tp1-ep4", "deterministic", gpu_only=True),
        make_case(
            part,
            "bf16",
            "deepep",
            "tp1-ep4",
            "deterministic",
            suffix="-again",
            reference="bf16-deepep-tp1-ep4-deterministic",
            bound=0.0,
            gpu_only=True,
        ),
    ]


def throughput_cases() -> list[Case]:
    """The 16B model at TP 2, EP 4: both backends, corrected and as released."""
    part = "throughput"
    common: dict[str, Any] = {"seconds": 300, "gpu_only": True, "reference": "", "bound": None}
    return [
        make_case(
            part,
            "bf16",
            backend,
            "tp2-ep4",
            "recompute-compile",
            suffix="-16b-released" if released else "-16b",
            released=released,
            **common,
        )
        for released in (False, True)
        for backend in ("deepep", "standard")
    ]


PARTS = {
    "numerics": numerics_cases,
    "fast": fast_cases,
    "fault": fault_cases,
    "throughput": throughput_cases,
}
