"""The cells whose gradients `bench.gradients` compares, the references, and the bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell
from cookbook.config.resolve import cell_on, this_machine

# So many losses did the comparison see that was there before.
STEPS = 20
# The parameters are compared after these steps: each has moved some times, none has gone astray.
CHANGED_AFTER = 5
RANKS = 4
SEQUENCES, SEQ_LEN = 4, 64

# One rank that computes all of it, as the reference.
ALONE = "alone"
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

# Besides `LAYOUTS`: TP cuts every expert, with the standard backend alone.
CUT: dict[str, dict[str, Any]] = {
    "tp2-ep1": {"parallelism.tensor_parallel_degree": 2},
    "tp2-ep2-etp2": {
        "parallelism.expert_parallel_degree": 2,
        "parallelism.expert_tensor_parallel_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
    },
}


_KEPT = {"activation_checkpoint.mode": "none", "compile.enable": False}
_COMPILED = {"compile.enable": True, "compile.components": ["model", "loss"]}
# The fast recipes' options, and DeepEP in parts.
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
    "recompute": {"activation_checkpoint.mode": "full", "compile.enable": False},
    "compile": {**_KEPT, **_COMPILED},
    "fast": {**_FAST, "compile.enable": False},
    "fast-compile": {**_FAST, **_COMPILED},
}

# The same data, and a learning rate that only rises.
_EVERY = {
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


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        precision, backend: names of overlays.
        layout: one of `LAYOUTS` or `CUT`, or `ALONE`.
        fault: one of `bench.known_faults`; empty for the corrected cell.
        scale: the name of a parameter, and what its gradient is multiplied by.
        exact: nothing but the precision's own rounding: float32 in place of BF16.
        torch: the versions that have the fault begin with this; empty for all.
    """

    precision: str
    backend: str
    layout: str
    variant: str = "plain"
    fault: str = ""
    scale: tuple[str, float] | None = None
    exact: bool = True
    torch: str = ""

    @property
    def name(self) -> str:
        ends = [] if self.exact else ["bfloat16"]
        ends += [self.fault.replace(" ", "-").replace("'", "")] if self.fault else []
        ends += [f"scaled-by-{self.scale[1]!r}"] if self.scale else []
        return "-".join([self.precision, self.backend, self.layout, self.variant, *ends])

    @property
    def is_reference(self) -> bool:
        return self.layout == ALONE

    @property
    def rounds(self) -> bool:
        """Whether the precision quantizes the routed experts."""
        return self.precision != "bf16"

    @property
    def reference(self) -> Case:
        """One rank, in float32 but for what precision and EP backend round."""
        backend = self.backend if self.backend == "mxfp8_a2a" else "standard"
        return Case(self.precision, backend, ALONE)

    @property
    def steps(self) -> int:
        if self.scale:
            return 1
        return STEPS if self.fault or self.is_reference else CHANGED_AFTER

    @property
    def ranks(self) -> int:
        return 1 if self.is_reference else RANKS


def cell_of(case: Case, gpu: Gpu | None, assets: Path) -> Cell:
    """The case as a cell of this machine, with the text and the tokenizer in `assets`."""
    layout = {"parallelism.expert_parallel_degree": 1} | (LAYOUTS | CUT).get(case.layout, {})
    split = layout.get("parallelism.tensor_parallel_degree", 1)
    split *= layout.get("parallelism.pipeline_parallel_degree", 1)
    options: dict[str, Any] = {
        **_EVERY,
        **layout,
        **VARIANTS[case.variant],
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": SEQUENCES * split // case.ranks,
        "training.mixed_precision_param": "float32" if case.exact else "bfloat16",
        "training.steps": case.steps,
        "training.dataset_path": str(assets / "corpus"),
        "model.hf_assets_path": str(assets / "tokenizer"),
        "optimizer.lr": 4e-4,
        # The same rate whatever the number of steps.
        "lr_scheduler.warmup_steps": 2,
        "lr_scheduler.decay_ratio": 0.0,
        # The self-check would refuse some faults before the first step, and the report of the
        # first step the released code, which does not say how it sends tokens.
        "cookbook.self_check": False,
        "cookbook.dispatch": "",
    }
    if "parallelism.pipeline_parallel_degree" in layout:
        options["parallelism.pipeline_parallel_microbatch_size"] = 1
    precision, backend = case.precision, case.backend
    if backend == "mxfp8_a2a":
        options["cookbook.emulated"] = gpu is None or gpu.compute_capability < 10
    if case.is_reference:
        # Its experts and what they exchange are rounded by `plain_experts`, by nothing else.
        precision, backend = "bf16", "standard"
        if case.precision == "mxfp8_linear":
            precision = case.precision
            options |= {"model.converters": ["quantize.linear.mx"], "cookbook.grouped_gemms": ""}
        else:
            options["cookbook.emulated"] = False
    return cell_on(this_machine(case.ranks, gpu), "debug", precision, backend, options, case.name)


def corrected_cases() -> list[Case]:
    """The cells that must agree with one rank."""
    exact = [("standard", layout) for layout in (*LAYOUTS, *CUT)]
    exact += [("deepep", layout) for layout in LAYOUTS]
    cases = [Case("bf16", backend, layout) for backend, layout in exact]
    cases += [Case("bf16", "mxfp8_a2a", "tp1-ep4")]
    cases += [Case("bf16", backend, "tp2-ep4", "recompute") for backend in ("standard", "deepep")]
    cases += [Case("bf16", backend, "tp2-ep4", "compile") for backend in ("standard", "deepep")]
    cases += [Case("bf16", "deepep", layout, "fast") for layout in LAYOUTS]
    cases += [Case("bf16", "deepep", layout, "fast-compile") for layout in ("tp1-ep4", "tp2-ep4")]
    cases += [
        Case(precision, backend, layout)
        for precision in ("mxfp8_wgrad_hp", "mxfp8")
        for layout in ("tp1-ep4", "tp2-ep4")
        for backend in ("standard", "deepep", "mxfp8_a2a")
    ]
    cases += [
        Case("mxfp8_linear", "standard", "tp1-ep4"),
        Case("mxfp8_linear", "deepep", "tp1-ep4"),
        Case("mxfp8_linear", "mxfp8_a2a", "tp2-ep4"),
    ]
    return cases


def fault_cases() -> list[Case]:
    """Each known fault, in a cell that has what is at fault."""
    return [
        Case("bf16", "deepep", "tp2-ep4", fault="the released code"),
        Case("bf16", "standard", "tp2-ep4", fault="the released code"),
        Case("bf16", "deepep", "tp2-ep4", fault="every TP rank sends every token"),
        Case("bf16", "standard", "tp2-ep4", fault="the router's gradient is one TP rank's"),
        Case("bf16", "deepep", "tp2-ep4", fault="the router's gradient is one TP rank's"),
        Case("bf16", "standard", "tp2-ep1", fault="the router's gradient is one TP rank's"),
        Case(
            "bf16",
            "standard",
            "tp2-ep4",
            fault="shared experts' gradients are summed over TP",
            torch="2.10.",
        ),
        Case("bf16", "standard", "tp2-ep4", fault="rows of the input's gradient are lost"),
        Case("bf16", "deepep", "pp2-ep2", fault="a pipeline's gradients are not divided"),
        Case("bf16", "standard", "pp2-ep2", fault="tokens that are no training are counted"),
        Case("bf16", "deepep", "tp1-ep4", fault="scores are applied twice"),
        Case("bf16", "deepep", "tp1-ep4", fault="scores are applied before the experts"),
        Case("mxfp8", "deepep", "tp1-ep4", fault="expert groups are not padded"),
        Case(
            "mxfp8_wgrad_hp", "standard", "tp1-ep4", fault="the weight gradient's recipe is ignored"
        ),
        Case("bf16", "mxfp8_a2a", "tp1-ep4", fault="the dispatch is not quantized"),
        Case("bf16", "mxfp8_a2a", "tp1-ep4", fault="the combine is not quantized"),
    ]
