"""What DeepEP and the low-precision kernels refuse once a job runs."""

from __future__ import annotations

from collections.abc import Iterator

from cookbook.config.cell import (
    EP_CHUNKS,
    LAYERS_KEPT,
    NUM_CHUNKS,
    NUM_SMS,
    SAVE_LIST,
    SCORE_ACTIVATIONS,
    Cell,
)
from cookbook.config.finding import DEEPEP, ERROR, TORCHTITAN, Finding
from cookbook.config.options import DEGREES
from cookbook.config.validate.layout import DEEPEP_SIZES

NVLINK_PEERS = 8
_CUSTOM_IMPORT = "experimental.custom_import"
MX = frozenset({"quantize.grouped_mm.mx", "quantize.linear.mx"})


def deepep_size(cell: Cell) -> Iterator[Finding]:
    """DeepEP is tuned for some sizes, and needs whole nodes of eight above eight ranks."""
    if not cell.uses_deepep:
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
    elif degree > per_node and per_node != NVLINK_PEERS:
        yield Finding(
            ERROR,
            "deepep_size",
            option,
            f"EP {degree} leaves the node, and DeepEP between nodes takes them to have "
            f"{NVLINK_PEERS} GPUs, not {per_node}",
            f"set it to at most {per_node}, or take the standard backend",
            f"{DEEPEP}/csrc/deep_ep.cpp",
        )


def deepep_etp(cell: Cell) -> Iterator[Finding]:
    """TorchTitan has no expert tensor parallelism with DeepEP."""
    if cell.uses_deepep and cell.layout.etp > 1:
        yield Finding(
            ERROR,
            "deepep_etp",
            DEGREES["etp"],
            f"DeepEP needs 1, found {cell.layout.etp}",
            "set it to 1",
            f"{TORCHTITAN}/models/deepseek_v3/infra/parallelize.py",
        )


def hooks_are_on(cell: Cell) -> Iterator[Finding]:
    """What the cookbook corrects in TorchTitan comes with its own `custom_import` alone."""
    hooks = cell.options.stack.hooks
    if cell.hooks == hooks:
        return
    reference = f"{TORCHTITAN}/models/moe/moe_deepep.py"
    remedy = f"leave {_CUSTOM_IMPORT} alone, or import {hooks} in {cell.hooks or 'a module'!r}"
    if cell.uses_deepep and cell.layout.tp > 1:
        reason = (
            "DeepEP under TP counts every token once for each TP rank where it is not corrected"
        )
        yield Finding(ERROR, "hooks_are_on", _CUSTOM_IMPORT, reason, remedy, reference)
    own = {
        NUM_CHUNKS: 0,
        EP_CHUNKS: 1,
        SCORE_ACTIVATIONS: False,
        NUM_SMS: 0,
        SAVE_LIST: list[str](),
        LAYERS_KEPT: 0,
    }
    for name, default in own.items():
        if cell.options[name] != default:
            yield Finding(
                ERROR,
                "hooks_are_on",
                name,
                "TorchTitan takes this option from the cookbook's hooks alone",
                f"{remedy}, or leave the option out",
            )
    if cell.uses_deepep and MX & set(cell.options["model.converters"]):
        reason = (
            "MXFP8 needs expert groups padded to 32 rows, which DeepEP's path lacks uncorrected"
        )
        yield Finding(ERROR, "hooks_are_on", _CUSTOM_IMPORT, reason, remedy, reference)


def mxfp8_hardware(cell: Cell) -> Iterator[Finding]:
    """MXFP8 converters need Blackwell or emulation, also where an option brought them in."""
    gpu = cell.cluster.gpu
    if gpu is not None and gpu.compute_capability >= 10.0:
        return
    for name in sorted(MX & set(cell.options["model.converters"])):
        if not cell.options[f"{name}.emulate"]:
            have = f"{gpu.name} has {gpu.compute_capability}" if gpu else "there is no CUDA GPU"
            yield Finding(
                ERROR,
                "mxfp8_hardware",
                "model.converters",
                f"{name} needs compute capability 10.0 (SM100), {have}",
                f"set {name}.emulate=true for numerics without speed",
                f"{TORCHTITAN}/components/quantization/mx.py",
            )


def mxfp8_linear_compiles(cell: Cell) -> Iterator[Finding]:
    """TorchAO's SM100 casts do not compile under TP; emulated, they are plain operations (H200)."""
    name = "quantize.linear.mx"
    if (
        name in cell.options["model.converters"]
        and not cell.options[f"{name}.emulate"]
        and cell.is_compiled
        and cell.layout.tp > 1
    ):
        yield Finding(
            ERROR,
            "mxfp8_linear_compiles",
            "",
            "MXFP8 linear layers with tensor parallelism and a compiled model: torch.compile does "
            "not support it yet",
            f"set {DEGREES['tp']} 1, or compile.components loss",
            f"{TORCHTITAN}/components/quantization/mx.py",
        )
