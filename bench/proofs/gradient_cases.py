"""The cells whose gradients `bench.proofs.gradients` compares, and their references."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell
from cookbook.config.dialect.names import OVERRIDES
from cookbook.config.resolve import cell_on, this_machine

STEPS = 20
# Parameters are compared after this many steps: enough to move each, too few to diverge.
CHANGED_AFTER = 5
RANKS = 4
SEQUENCES, SEQ_LEN = 4, 64

# The layout of references: one rank computes everything.
ALONE = "alone"
# Degrees of EP, TP, PP and expert TP.
LAYOUTS = {"tp1-ep4": (4, 1, 1, 1), "tp2-ep4": (4, 2, 1, 1), "pp2-ep2": (2, 1, 2, 1)}
# TP shards every expert, which only the standard backend supports.
CUT = {"tp2-ep1": (1, 2, 1, 1), "tp2-ep2-etp2": (2, 2, 1, 2)}

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
    "random": {**_KEPT, "debug.moe_routing": "random"},
    "recompute": {"activation_checkpoint.mode": "full", "compile.enable": False},
    "compile": {**_KEPT, **_COMPILED},
    "rows": {**_KEPT, "cookbook.row_kernels": True},
    # FP8 linear layers give BF16, and so do the partial sums of TP's ranks: only experts are exact.
    "experts": {
        **_KEPT,
        "model.converters": ["quantize.grouped_mm.float8"],
        "cookbook.linear_layers": "",
    },
    "fast": {**_FAST, "compile.enable": False},
    "fast-compile": {**_FAST, **_COMPILED},
}

# Small enough for gloo: DeepSeek-V3 keeps one dense layer and two MoE layers.
_SMALL = {"n_layers": 3, "n_heads": 4}
_SIZES = {
    "debug": _SMALL,
    # The plain loop over all 64 experts would take half an hour.
    "qwen3_debug": _SMALL | {"n_kv_heads": 2, "moe_inter_dim": 256, "moe_args.num_experts": 16},
}
# The same data, and a learning rate that only rises.
_EVERY = {
    "training.dataset": "c4_test",
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
        fault: one of `bench.proofs.known_faults`; empty for the corrected cell.
        exact: float32 in place of BF16: only the precision itself rounds.
        recipe: of the family's debug model.
    """

    precision: str
    backend: str
    layout: str
    variant: str = "plain"
    fault: str = ""
    exact: bool = True
    recipe: str = "debug"

    @property
    def name(self) -> str:
        ends = [] if self.exact else ["bfloat16"]
        ends += [self.fault.replace(" ", "-").replace("'", "")] if self.fault else []
        start = [] if self.recipe == "debug" else [self.recipe]
        return "-".join([*start, self.precision, self.backend, self.layout, self.variant, *ends])

    @property
    def is_reference(self) -> bool:
        return self.layout == ALONE

    @property
    def rounds(self) -> bool:
        """Whether the precision quantizes the routed experts."""
        return self.precision != "bf16"

    @property
    def reference(self) -> Case:
        """The reference: one rank, in float32 except where precision or EP backend round."""
        backend = self.backend if self.backend == "mxfp8_a2a" else "standard"
        variant = self.variant if self.variant in ("random", "experts") else "plain"
        exact = self.exact or self.precision != "float8"
        return Case(self.precision, backend, ALONE, variant, exact=exact, recipe=self.recipe)

    @property
    def first(self) -> Case:
        """The reference whose initial weights all runs of the recipe share."""
        return Case("bf16", "standard", ALONE, recipe=self.recipe)

    @property
    def steps(self) -> int:
        return STEPS if self.fault or self.is_reference else CHANGED_AFTER

    @property
    def ranks(self) -> int:
        return 1 if self.is_reference else RANKS


def cell_of(case: Case, gpu: Gpu | None, assets: Path) -> Cell:
    """Return the case as a cell of this machine; text and tokenizer are in `assets`."""
    experts, tensor, pipeline, cut = (LAYOUTS | CUT).get(case.layout, (1, 1, 1, 1))
    options: dict[str, Any] = {
        **_EVERY,
        **{f"{OVERRIDES}{name}": size for name, size in _SIZES[case.recipe].items()},
        "parallelism.expert_parallel_degree": experts,
        "parallelism.tensor_parallel_degree": tensor,
        "parallelism.pipeline_parallel_degree": pipeline,
        "parallelism.expert_tensor_parallel_degree": cut,
        "parallelism.pipeline_parallel_microbatch_size": 1,
        **VARIANTS[case.variant],
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": SEQUENCES * tensor * pipeline // case.ranks,
        "training.mixed_precision_param": "float32" if case.exact else "bfloat16",
        "training.steps": case.steps,
        "training.dataset_path": str(assets / "corpus"),
        "model.hf_assets_path": str(assets / "tokenizer"),
        "optimizer.lr": 4e-4,
        # The same learning rates for any number of steps.
        "lr_scheduler.warmup_steps": 2,
        "lr_scheduler.decay_ratio": 0.0,
        # The self-check would reject some faults before the first step. The check of the dispatch
        # would reject released code, which does not report its dispatch.
        "cookbook.self_check": False,
        "cookbook.dispatch": "",
    }
    precision, backend = case.precision, case.backend
    if case.is_reference:
        # Only `plain_experts` rounds the reference's experts and their inputs.
        precision, backend = "bf16", "standard"
        if case.precision == "mxfp8_linear":
            precision = case.precision
            options |= {"model.converters": ["quantize.linear.mx"], "cookbook.grouped_gemms": ""}
    if case.precision == "float8":
        # The reference has the same FP8: a GPU sums FP8 products with fewer bits than float32.
        precision = case.precision
    return cell_on(
        this_machine(case.ranks, gpu), case.recipe, precision, backend, options, case.name
    )


def corrected_cases() -> list[Case]:
    """Return the cells that must agree with one rank."""
    both, three = ("standard", "deepep"), ("standard", "deepep", "mxfp8_a2a")
    cases = [Case("bf16", "standard", layout) for layout in (*LAYOUTS, *CUT)]
    cases += [Case("bf16", "deepep", layout) for layout in LAYOUTS]
    cases += [Case("bf16", "mxfp8_a2a", "tp1-ep4")]
    for variant in ("recompute", "compile"):
        cases += [Case("bf16", backend, "tp2-ep4", variant) for backend in both]
    cases += [Case("bf16", "standard", layout, "rows") for layout in (*LAYOUTS, *CUT)]
    cases += [Case("bf16", "deepep", layout, "fast") for layout in LAYOUTS]
    cases += [Case("bf16", "deepep", layout, "fast-compile") for layout in ("tp1-ep4", "tp2-ep4")]
    for precision in ("mxfp8_wgrad_hp", "mxfp8"):
        for layout in ("tp1-ep4", "tp2-ep4"):
            cases += [Case(precision, backend, layout) for backend in three]
    cases += [Case("mxfp8_linear", backend, "tp1-ep4") for backend in both]
    cases.append(Case("mxfp8_linear", "mxfp8_a2a", "tp2-ep4"))
    for variant, exact in (("experts", True), ("plain", False)):
        for backend in both:
            cases += [Case("float8", backend, name, variant, exact=exact) for name in LAYOUTS]
    return cases


def qwen3_cases() -> list[Case]:
    """Return the cells of Qwen3-MoE, which has no pipelines."""
    three = ("standard", "deepep", "mxfp8_a2a")
    found = [Case("bf16", backend, "tp1-ep4") for backend in three]
    found += [Case("bf16", backend, "tp2-ep4") for backend in three[:2]]
    found += [Case("bf16", "standard", layout) for layout in CUT]
    found += [Case("bf16", "deepep", layout, "fast") for layout in ("tp1-ep4", "tp2-ep4")]
    found += [Case("bf16", "standard", "tp2-ep4", "compile")]
    found += [Case("mxfp8", backend, "tp1-ep4") for backend in three]
    found += [Case("mxfp8", "standard", "tp2-ep4"), Case("mxfp8_wgrad_hp", "standard", "tp1-ep4")]
    found += [Case("mxfp8_linear", "standard", "tp1-ep4")]
    found += [Case("float8", backend, "tp1-ep4", "experts") for backend in three[:2]]
    return [replace(case, recipe="qwen3_debug") for case in found]


_FAULTS = (
    ("the released code", "bf16", "deepep", "tp2-ep4"),
    ("the released code", "bf16", "standard", "tp2-ep4"),
    ("every TP rank sends every token", "bf16", "deepep", "tp2-ep4"),
    ("the router's gradient is one TP rank's", "bf16", "standard", "tp2-ep4"),
    ("the router's gradient is one TP rank's", "bf16", "deepep", "tp2-ep4"),
    ("the router's gradient is one TP rank's", "bf16", "standard", "tp2-ep1"),
    ("shared experts' gradients are summed over TP", "bf16", "standard", "tp2-ep4"),
    ("rows of the input's gradient are lost", "bf16", "standard", "tp2-ep4"),
    ("a pipeline's gradients are not divided", "bf16", "deepep", "pp2-ep2"),
    ("tokens that are no training are counted", "bf16", "standard", "pp2-ep2"),
    ("scores are applied twice", "bf16", "deepep", "tp1-ep4"),
    ("scores are applied before the experts", "bf16", "deepep", "tp1-ep4"),
    ("expert groups are not padded", "mxfp8", "deepep", "tp1-ep4"),
    ("the weight gradient's recipe is ignored", "mxfp8_wgrad_hp", "standard", "tp1-ep4"),
    ("the dispatch is not quantized", "bf16", "mxfp8_a2a", "tp1-ep4"),
    ("the combine is not quantized", "bf16", "mxfp8_a2a", "tp1-ep4"),
)
# Faults of some versions of torch only, with the start of those versions.
_TORCH = {"shared experts' gradients are summed over TP": "2.10."}


def fault_cases(torch: str = "2.10.0") -> list[Case]:
    """Return each known fault that this version of torch has, in a cell that shows it."""
    return [
        Case(precision, backend, layout, fault=fault)
        for fault, precision, backend, layout in _FAULTS
        if torch.startswith(_TORCH.get(fault, ""))
    ]
