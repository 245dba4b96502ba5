"""In: a cell. Out: what is known of its DeepEP and low-precision kernels, needs and gains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cookbook.cells.cell import Cell
from cookbook.cells.layout import DEGREES
from cookbook.check.facts import DEEPEP, TORCHAO, TORCHTITAN, uses_deepep, value
from cookbook.check.finding import ERROR, HINT, WARNING, Finding
from cookbook.check.shapes import destinations, groups

_BLOG = (
    "https://pytorch.org/blog/enabling-up-to-41-faster-pre-training-mxfp8-and-deepep-"
    "for-deepseek-v3-on-b200-with-torchtitan"
)
# `Buffer.get_dispatch_config` has a tuned configuration for these; others fail its assertion.
DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_NVLINK_PEERS = 8
_CUSTOM_IMPORT = "experimental.custom_import"
_MX = {"quantize.grouped_mm.mx", "quantize.linear.mx"}
_PRECISION_OF = {
    frozenset[str](): {"bf16"},
    frozenset({"quantize.grouped_mm.mx"}): {"mxfp8", "mxfp8_wgrad_hp"},
    frozenset({"quantize.grouped_mm.mx", "quantize.linear.mx"}): {"mxfp8_linear"},
    frozenset({"quantize.grouped_mm.float8", "quantize.linear.float8"}): {"float8"},
}


def deepep_size(cell: Cell) -> Iterator[Finding]:
    """DeepEP is tuned for some sizes, and needs whole nodes of eight above eight ranks."""
    if not uses_deepep(cell):
        return
    degree, option = cell.layout.ep, DEGREES["ep"]
    per_node = cell.cluster.ranks_per_node
    if degree == 1:
        yield Finding(
            ERROR,
            "deepep_size",
            option,
            "DeepEP needs EP above 1",
            "raise it, or take the standard backend",
            f"{TORCHTITAN}/models/deepseek_v3/infra/parallelize.py",
        )
    elif degree not in DEEPEP_SIZES:
        best = min(DEEPEP_SIZES, key=lambda size: abs(size - degree))
        yield Finding(
            ERROR,
            "deepep_size",
            option,
            f"DeepEP has no configuration for EP {degree}; it has "
            f"{', '.join(map(str, DEEPEP_SIZES))}",
            f"try {best}",
            f"{DEEPEP}/deep_ep/buffer.py",
        )
    elif degree > per_node and per_node != _NVLINK_PEERS:
        yield Finding(
            ERROR,
            "deepep_size",
            option,
            f"EP {degree} leaves the node, and DeepEP between nodes takes them to have "
            f"{_NVLINK_PEERS} GPUs, not {per_node}",
            f"set it to at most {per_node}, or take the standard backend",
            f"{DEEPEP}/csrc/deep_ep.cpp",
        )


def deepep_etp(cell: Cell) -> Iterator[Finding]:
    """TorchTitan has no expert tensor parallelism with DeepEP."""
    if uses_deepep(cell) and cell.layout.etp > 1:
        yield Finding(
            ERROR,
            "deepep_etp",
            DEGREES["etp"],
            f"DeepEP needs 1, found {cell.layout.etp}",
            "set it to 1",
            f"{TORCHTITAN}/models/deepseek_v3/infra/parallelize.py",
        )


def corrections_are_on(cell: Cell) -> Iterator[Finding]:
    """What the cookbook corrects in TorchTitan comes with its own `custom_import` alone."""
    module = cell.options.get(_CUSTOM_IMPORT, "cookbook.titan.stack_2026_02")
    if module == "cookbook.titan.stack_2026_02":
        return
    reference = f"{TORCHTITAN}/models/moe/moe_deepep.py"
    remedy = (
        f"leave {_CUSTOM_IMPORT} alone, or import "
        f"cookbook.titan.stack_2026_02 in {module or 'a module'!r}"
    )
    if uses_deepep(cell) and cell.layout.tp > 1:
        reason = (
            "DeepEP under TP counts every token once for each TP rank where it is not corrected"
        )
        yield Finding(ERROR, "corrections_are_on", _CUSTOM_IMPORT, reason, remedy, reference)
    if uses_deepep(cell) and _MX & set(value(cell, "model.converters")):
        reason = (
            "MXFP8 needs expert groups padded to 32 rows, which DeepEP's path lacks uncorrected"
        )
        yield Finding(ERROR, "corrections_are_on", _CUSTOM_IMPORT, reason, remedy, reference)
    if cell.layout.tp > 1 and cell.layout.ep > 1:
        reason = "under TP and EP the router's gradient, uncorrected, is only a part of the sum"
        yield Finding(
            WARNING,
            "corrections_are_on",
            _CUSTOM_IMPORT,
            reason,
            remedy,
            "https://github.com/pytorch/torchtitan/pull/2416",
        )


def mxfp8_hardware(cell: Cell) -> Iterator[Finding]:
    """MXFP8 converters need Blackwell or emulation, also where an option brought them in."""
    gpu = cell.cluster.gpu
    if cell.refused or (gpu is not None and gpu.compute_capability >= 10.0):
        return
    for name in sorted(_MX & set(value(cell, "model.converters"))):
        if not value(cell, f"{name}.emulate"):
            have = f"{gpu.name} has {gpu.compute_capability}" if gpu else "there is no CUDA GPU"
            yield Finding(
                ERROR,
                "mxfp8_hardware",
                "model.converters",
                f"{name} needs compute capability 10.0 (SM100), {have}",
                f"set {name}.emulate=true for numerics without speed",
                f"{TORCHTITAN}/components/quantization/mx.py",
            )


def precision_is_its_converters(cell: Cell) -> Iterator[Finding]:
    """The job compares what is active with the precision that was asked for, and stops at a
    difference.
    """
    converters = frozenset(
        name for name in value(cell, "model.converters") if name.startswith("quantize.")
    )
    allowed = _PRECISION_OF.get(converters)
    known = {name for names in _PRECISION_OF.values() for name in names}
    if cell.precision.name in known and allowed is not None and cell.precision.name not in allowed:
        yield Finding(
            ERROR,
            "precision_is_its_converters",
            "model.converters",
            f"{', '.join(sorted(converters)) or 'no converter'} is not precision "
            f"{cell.precision.name}, "
            "and the job would stop at its first step for it",
            f"ask for --precision {' or '.join(sorted(allowed))}",
            f"{TORCHTITAN}/protocols/model_converter.py",
        )


def deepep_within_a_node(cell: Cell) -> Iterator[Finding]:
    """DeepEP gains most between nodes."""
    if uses_deepep(cell) and 1 < cell.layout.ep <= _NVLINK_PEERS:
        yield Finding(
            HINT,
            "deepep_within_a_node",
            "parallelism.expert_parallel_comm_backend",
            f"at EP {cell.layout.ep} DeepEP may gain little over the all-to-all, or lose to it: "
            "tokens "
            "travel over NVLink alone",
            "measure both",
            f"{DEEPEP}/README.md",
        )


def emulated_has_no_speed(cell: Cell) -> Iterator[Finding]:
    """Emulation computes what MXFP8 would, in BF16 and slower."""
    if cell.emulated:
        yield Finding(
            HINT,
            "emulated_has_no_speed",
            "",
            f"{cell.precision.name} is emulated here: its numerics are right, its speed "
            "means nothing",
            "",
            f"{TORCHAO}/prototype/moe_training/README.md",
        )


def hints_from_model(cell: Cell, view: Mapping[str, Any]) -> Iterator[Finding]:
    """What experience says, for which the model's sizes must be known."""
    hidden = view["model"]["moe_inter_dim"]
    low_precision = bool(value(cell, "model.converters"))
    if low_precision and not cell.emulated and hidden < 2048:
        yield Finding(
            HINT,
            "small_experts",
            "model.converters",
            f"experts of hidden size {hidden} are small: quantizing may cost more than the "
            "faster GEMMs "
            "bring (published for 671B, whose experts have 2048; not gained on the 16B)",
            "compare with --precision bf16",
            _BLOG,
        )
    routing = view["model"]
    forced = value(cell, "debug.moe_force_load_balance")
    if forced and uses_deepep(cell):
        sizes = routing["moe_args.num_experts"], routing["moe_args.top_k"], cell.layout.ep
        dealt = destinations(*sizes, True, None)
        routed = destinations(*sizes, False, groups(routing))
        if dealt < 0.8 * routed:
            yield Finding(
                HINT,
                "forced_balance_flatters_deepep",
                "debug.moe_force_load_balance",
                f"dealt out round-robin, a token's experts live on {dealt:.1f} of {cell.layout.ep} "
                f"ranks; real routing reaches {routed:.1f}: DeepEP sends a token once a rank and "
                "looks faster than "
                "it will be",
                "measure with real routing as well",
                f"{TORCHTITAN}/models/moe/moe.py",
            )
