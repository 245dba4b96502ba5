"""What is known of a cell's DeepEP and low-precision kernels, beyond whether they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cookbook.config.cell import ATTENTION, NUM_SMS, Cell
from cookbook.config.finding import (
    DEEPEP,
    FLASH_ATTENTION,
    HINT,
    TORCHAO,
    TORCHTITAN,
    WARNING,
    Finding,
)
from cookbook.config.validate.kernels import NVLINK_PEERS
from cookbook.predict.shapes import destinations, groups

_BLOG = (
    "https://pytorch.org/blog/enabling-up-to-41-faster-pre-training-mxfp8-and-deepep-"
    "for-deepseek-v3-on-b200-with-torchtitan"
)
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-max-ctas"
_CUSTOM_IMPORT = "experimental.custom_import"


def router_gradient(cell: Cell) -> Iterator[Finding]:
    """Released TorchTitan takes a TP rank's part of the router's gradient for the whole."""
    hooks = cell.options.stack.hooks
    if cell.hooks != hooks and cell.layout.tp > 1:
        yield Finding(
            WARNING,
            "router_gradient",
            _CUSTOM_IMPORT,
            "under TP the router's gradient, uncorrected, is only a part of the sum",
            f"leave {_CUSTOM_IMPORT} alone, or import {hooks} in {cell.hooks or 'a module'!r}",
            "https://github.com/pytorch/torchtitan/pull/2416",
        )


def deepep_within_a_node(cell: Cell) -> Iterator[Finding]:
    """DeepEP gains most between nodes."""
    if cell.uses_deepep and 1 < cell.layout.ep <= NVLINK_PEERS:
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


def few_sms_for_all(cell: Cell) -> Iterator[Finding]:
    """A limit for what NCCL does beside GEMMs also holds where nothing else runs."""
    num_sms = cell.options[NUM_SMS]
    if not num_sms or cell.cluster.gpu is None:
        return
    waits = ["TP's exchanges"] if cell.layout.tp > 1 else []
    if cell.layout.ep > 1 and not cell.uses_deepep:
        waits.append("the all-to-all of EP")
    if waits:
        yield Finding(
            HINT,
            "few_sms_for_all",
            NUM_SMS,
            f"{num_sms} limits {' and '.join(waits)} too, which nothing hides",
            "compare with 0",
            _NCCL,
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


def reference_has_no_speed(cell: Cell) -> Iterator[Finding]:
    """On the CPU plain PyTorch stands in for FlashAttention-4."""
    if cell.attends_by_reference:
        yield Finding(
            HINT,
            "reference_has_no_speed",
            ATTENTION,
            "a reference computes attention on the CPU, document by document: its numerics are "
            "right, its speed means nothing",
            "",
            f"{FLASH_ATTENTION}/interface.py",
        )


def hints_from_model(cell: Cell, view: Mapping[str, Any]) -> Iterator[Finding]:
    """What experience says, for which the model's sizes must be known."""
    hidden = view["model"]["moe_inter_dim"]
    low_precision = bool(cell.options["model.converters"])
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
    forced = cell.options["debug.moe_force_load_balance"]
    if forced and cell.uses_deepep:
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
