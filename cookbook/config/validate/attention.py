"""What a cell's attention refuses: the flavor's own, or FlashAttention-4."""

from __future__ import annotations

from collections.abc import Iterator

from cookbook.config.cell import ATTENTION, Cell
from cookbook.config.finding import ERROR, FLASH_ATTENTION, TORCHTITAN, Finding
from cookbook.config.options import DEGREES

# Hopper and Blackwell of data centres: 9.0 is H100 and H200, 10.0 and 10.3 are B200 and B300.
_GENERATIONS = (9, 10)
# Of queries and keys, and of values. It takes other sizes, but the gradients of none of them have
# been compared with a reference, and some have been wrong on some GPUs.
_HEAD_DIMS = (192, 128)
# TorchTitan's `attn_type` of PyTorch's scaled_dot_product_attention.
_SDPA = "sdpa"


def flash_attention_gpu(cell: Cell) -> Iterator[Finding]:
    """Its kernels are for two generations of GPUs; on the CPU its reference runs."""
    gpu = cell.cluster.gpu
    if cell.uses_flash_attention and gpu and int(gpu.compute_capability) not in _GENERATIONS:
        yield _refused(
            "flash_attention_gpu",
            ATTENTION,
            "FlashAttention-4 needs a GPU of compute capability 9.x (H100, H200) or 10.x (B200), "
            f"{gpu.name} has {gpu.compute_capability}",
            f"set {ATTENTION}=flavor",
            f"{FLASH_ATTENTION}/interface.py",
        )


def flash_attention_heads(cell: Cell) -> Iterator[Finding]:
    """Only DeepSeek-V3's own heads have been checked."""
    model = cell.options.model
    if model is None or not cell.uses_flash_attention:
        return
    found = (model.qk_head_dim, model.v_head_dim)
    if found != _HEAD_DIMS:
        allowed, have = ("/".join(map(str, dims)) for dims in (_HEAD_DIMS, found))
        yield _refused(
            "flash_attention_heads",
            ATTENTION,
            f"FlashAttention-4 is for heads of {allowed} (queries and keys/values), flavor "
            f"{cell.options['model.flavor']} has {have}",
            f"set {ATTENTION}=flavor",
            f"{FLASH_ATTENTION}/interface.py",
        )


def context_parallel_attention(cell: Cell) -> Iterator[Finding]:
    """TorchTitan has context parallelism for SDPA alone, and most flavors have FlexAttention."""
    own = _own_attention(cell)
    if cell.layout.cp == 1 or (own == _SDPA and not cell.uses_flash_attention):
        return
    reason = (
        "FlashAttention-4 computes each document on one rank, and context parallelism "
        f"({cell.layout.cp}) cuts documents over several"
        if cell.uses_flash_attention
        else "TorchTitan has context parallelism for SDPA only, and flavor "
        f"{cell.options['model.flavor']} has {own}"
    )
    yield _refused(
        "context_parallel_attention",
        DEGREES["cp"],
        reason,
        "set it to 1" + (f", or set {ATTENTION}=flavor" if own == _SDPA else ""),
        f"{TORCHTITAN}/models/deepseek_v3/model/args.py",
    )


def flash_attention_hooks(cell: Cell) -> Iterator[Finding]:
    """The option is the cookbook's; without its hooks TorchTitan would ignore it in silence."""
    hooks = cell.options.stack.hooks
    if cell.uses_flash_attention and cell.hooks != hooks:
        yield _refused(
            "flash_attention_hooks",
            ATTENTION,
            "TorchTitan takes FlashAttention-4 from the cookbook's hooks alone",
            f"import {hooks} in {cell.hooks or 'experimental.custom_import'!r}, or set "
            f"{ATTENTION}=flavor",
            f"{TORCHTITAN}/models/deepseek_v3/model/model.py",
        )


def _own_attention(cell: Cell) -> str:
    """The flavor's `attn_type`; SDPA, which nothing refuses, where the stack does not know it."""
    flavors = cell.options.stack.model_args.get(cell.options["model.name"], {})
    own: str = flavors.get(cell.options["model.flavor"], {}).get("attn_type", _SDPA)
    return own


def _refused(rule: str, option: str, reason: str, remedy: str, reference: str) -> Finding:
    return Finding(ERROR, rule, option, reason, remedy, reference)
