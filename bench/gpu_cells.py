"""In: nothing. Out: the cells whose numerics and speed `bench.gpu_numerics` compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RANKS = 4

# Relative difference of losses, at every step, below which two backends count as the same.
BOUND = 1e-4


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        reference: the cell whose losses it is compared with; empty where there is none.
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
    arguments: tuple[str, ...]
    reference: str = ""
    bound: float | None = BOUND
    metrics_rank: int = 0
    released: bool = False
    expected_to_fail: bool = False
    seconds: int = 240
    gpu_only: bool = False
    emulated: bool = field(default=False)


LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp1-ep4": ("--parallelism.expert_parallel_degree=4",),
    "tp2-ep4": (
        "--parallelism.expert_parallel_degree=4",
        "--parallelism.tensor_parallel_degree=2",
    ),
    "pp2-ep2": (
        "--parallelism.expert_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_microbatch_size=2",
    ),
}

_COMPILED = ("--compile.enable", "--compile.components=model,loss")
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": ("--activation_checkpoint.mode=none",),
    "recompute": ("--activation_checkpoint.mode=full",),
    "compile": ("--activation_checkpoint.mode=none", *_COMPILED),
    "recompute-compile": ("--activation_checkpoint.mode=full", *_COMPILED),
    "deterministic": ("--activation_checkpoint.mode=none", "--debug.deterministic"),
}

_GROUPED = (
    "--quantize.grouped_mm.mx.fqns=experts",
    "--quantize.grouped_mm.mx.emulate",
    "--cookbook.emulated",
)
_GROUPED_ONLY = ("--model.converters=quantize.grouped_mm.mx", *_GROUPED)
PRECISIONS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "mxfp8": (*_GROUPED_ONLY, "--quantize.grouped_mm.mx.recipe_name=mxfp8"),
    "mxfp8_wgrad_hp": (
        *_GROUPED_ONLY,
        "--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp",
    ),
    "mxfp8_linear": (
        *_GROUPED,
        "--model.converters=quantize.grouped_mm.mx,quantize.linear.mx",
        "--quantize.linear.mx.recipe_name=mxfp8_cublas_rceil",
        "--quantize.linear.mx.emulate",
        "--quantize.linear.mx.filter_fqns="
        "output,router.gate,wq,wkv,wo,feed_forward.w2,shared_experts",
    ),
    "float8": (
        "--model.converters=quantize.linear.float8,quantize.grouped_mm.float8",
        "--quantize.linear.float8.recipe_name=rowwise",
        "--quantize.linear.float8.filter_fqns=output,router.gate",
        "--quantize.grouped_mm.float8.fqns=experts",
    ),
}

BACKENDS: dict[str, tuple[str, ...]] = {
    "standard": ("--parallelism.expert_parallel_comm_backend=standard",),
    "deepep": ("--parallelism.expert_parallel_comm_backend=deepep",),
    "mxfp8_a2a": (
        "--parallelism.expert_parallel_comm_backend=standard",
        "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
        "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8",
    ),
}


def make_cell(
    part: str,
    precision: str,
    backend: str,
    layout: str,
    variant: str = "plain",
    *,
    suffix: str = "",
    released: bool = False,
    **changes: Any,
) -> Cell:
    arguments = (*LAYOUTS[layout], *VARIANTS[variant], *BACKENDS[backend], *PRECISIONS[precision])
    if not released:
        arguments += (f"--cookbook.precision={precision}", f"--cookbook.ep_backend={backend}")
    name = f"{precision}-{backend}-{layout}-{variant}{suffix}"
    standard = f"{precision}-standard-{layout}-{variant}"
    return Cell(
        name=name,
        part=part,
        precision=precision,
        backend=backend,
        layout=layout,
        variant=variant,
        arguments=arguments,
        released=released,
        emulated="--cookbook.emulated" in arguments,
        metrics_rank=RANKS // 2 if layout.startswith("pp2") else 0,
        **({"reference": "" if name == standard else standard} | changes),
    )


def numerics_cells() -> list[Cell]:
    """The matrix, what takes longest first."""
    part = "numerics"
    cells = [
        make_cell(part, "bf16", backend, layout, variant, seconds=400, gpu_only=True)
        for variant in ("recompute-compile", "compile")
        for layout in LAYOUTS
        for backend in ("standard", "deepep")
    ]
    cells += [
        make_cell(part, "bf16", backend, layout, variant)
        for variant in ("recompute", "plain")
        for layout in LAYOUTS
        for backend in ("standard", "deepep")
    ]
    for precision in ("mxfp8", "mxfp8_wgrad_hp", "mxfp8_linear"):
        for layout in ("tp1-ep4", "tp2-ep4"):
            cells.append(make_cell(part, precision, "standard", layout))
            cells.append(make_cell(part, precision, "deepep", layout))
            # With high-precision weight gradients these alone see the exchange's rounding.
            bound = None if precision == "mxfp8_wgrad_hp" else BOUND
            cells.append(make_cell(part, precision, "mxfp8_a2a", layout, bound=bound))
    cells += [
        make_cell(part, "float8", backend, "tp1-ep4", gpu_only=True)
        for backend in ("standard", "deepep")
    ]
    # Compiled emulation, against the same without compilation, which rounds elsewhere.
    for precision, layout in (("mxfp8", "tp1-ep4"), ("mxfp8_linear", "tp2-ep4")):
        reference = f"{precision}-standard-{layout}-plain"
        cells.append(
            make_cell(
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
    cells += [
        make_cell(part, "bf16", "standard", layout, suffix="-again")
        for layout in ("tp1-ep4", "tp2-ep4")
    ]
    return cells


def fault_cells() -> list[Cell]:
    """TorchTitan as released, to show what is corrected; and deterministic mode, twice."""
    part = "fault"
    released: dict[str, Any] = {
        "released": True,
        "gpu_only": True,
        "suffix": "-released",
        "bound": None,
    }
    return [
        make_cell(part, "bf16", "deepep", "tp1-ep4", **released),
        make_cell(part, "bf16", "standard", "tp2-ep4", **released),
        make_cell(part, "bf16", "deepep", "tp2-ep4", **released),
        make_cell(
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
        make_cell(part, "bf16", "standard", "tp1-ep4", "deterministic", gpu_only=True),
        make_cell(part, "bf16", "deepep", "tp1-ep4", "deterministic", gpu_only=True),
        make_cell(
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


def throughput_cells() -> list[Cell]:
    """The 16B model at TP 2, EP 4: both backends, corrected and as released."""
    part = "throughput"
    common: dict[str, Any] = {"seconds": 300, "gpu_only": True, "reference": "", "bound": None}
    return [
        make_cell(
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
    "numerics": numerics_cells,
    "fault": fault_cells,
    "throughput": throughput_cells,
}
