"""Rules about the GPUs and options that precisions, EP backends and attention kernels require."""

from cookbook.config.cell import Cell, CellRule, Problems, rule
from cookbook.config.dialect.names import (
    DEGREES,
    FLASH_ATTENTION,
    TORCHAO,
    TORCHTITAN,
    Converter,
)
from cookbook.config.facts import Facts

RULES: list[CellRule] = []
_PARALLELIZE = f"{TORCHTITAN}/models/llama4/infra/parallelize.py"
_MX = f"{TORCHTITAN}/components/quantization/mx.py"


@rule(RULES, reference=_MX)
def hardware(cell: Cell) -> Problems:
    capability, have = _gpu_of(cell)
    for overlay in (cell.precision, cell.ep_backend):
        needed = overlay.needs.compute_capability
        if needed > capability and overlay not in cell.emulated_parts:
            yield "", f"{overlay.name} needs a GPU of compute capability {needed}, {have}", ""


def _gpu_of(cell: Cell) -> tuple[float, str]:
    gpu = cell.cluster.gpu
    if gpu is None:
        return 0.0, "there is no CUDA GPU"
    return gpu.compute_capability, f"{gpu.name} has {gpu.compute_capability}"


@rule(RULES, reference=_PARALLELIZE)
def needs(cell: Cell) -> Problems:
    for overlay in (cell.precision, cell.ep_backend):
        needed = overlay.needs
        if needed.device == "cuda" and cell.cluster.gpu is None:
            reason = f"needs CUDA GPUs, cluster {cell.cluster.name} runs on the CPU"
            yield "", f"{overlay.name} {reason}", ""
            continue
        if needed.expert_parallel and cell.facts.ep < 2:
            yield "", f"{overlay.name} needs {Facts.ep} above 1", ""
            continue
        for option, setting in needed.settings.items():
            if (found := cell.options[option]) != setting.value:
                reason = f"{overlay.name} needs {setting.value}, found {found}"
                yield option, reason, f"set it to {setting.value}"


@rule(RULES, reference=f"{TORCHTITAN}/protocols/model_converter.py")
def declaration(cell: Cell) -> Problems:
    for key, found in cell.facts.active.items():
        is_exchange = key == "dispatch"
        overlay = cell.ep_backend if is_exchange else cell.precision
        what = "EP backend" if is_exchange else "precision"
        # With one EP rank nothing is dispatched.
        if found != overlay.expects(key) and not (is_exchange and cell.layout.ep == 1):
            reason = f"{what} {overlay.name} expects {key} {overlay.expects(key)}, and the options "
            reason += f"turn on {found}: the job would stop at its first step"
            remedy = f"correct the options, or `expect` in {overlay.path.name}"
            yield "" if is_exchange else Facts.converters, reason, remedy


@rule(RULES, reference=_PARALLELIZE)
def ep_size(cell: Cell) -> Problems:
    exchange, degree, option = cell.facts.exchange, cell.layout.ep, Facts.ep
    per_node = cell.cluster.ranks_per_node
    if not exchange.sizes:
        return
    if degree == 1:
        yield option, f"{exchange.title} needs EP above 1", "raise it, or take the standard backend"
    elif degree not in exchange.sizes:
        best = min(exchange.sizes, key=lambda size: abs(size - degree))
        sizes = ", ".join(map(str, exchange.sizes))
        reason = f"{exchange.title} has no configuration for EP {degree}; it has {sizes}"
        yield option, reason, f"try {best}"
    elif degree > per_node and exchange.ranks_per_node not in (0, per_node):
        reason = f"EP {degree} spans nodes, and {exchange.title} between nodes needs "
        remedy = f"set it to at most {per_node}, or take the standard backend"
        yield option, f"{reason}{exchange.ranks_per_node} GPUs a node, not {per_node}", remedy


def _mx(cell: Cell) -> list[Converter]:
    return [one for one in cell.facts.quantizes if one.is_mx]


@rule(RULES, reference=_MX)
def mxfp8_hardware(cell: Cell) -> Problems:
    capability, have = _gpu_of(cell)
    for one in _mx(cell):
        if capability < 10.0 and not cell.options[one.emulate]:
            reason = f"{one.name} needs compute capability 10.0 (SM100), {have}"
            yield Facts.converters, reason, f"set {one.emulate}=true for numerics without speed"


@rule(RULES, reference=_MX)
def mxfp8_linear_compiles(cell: Cell) -> Problems:
    """Refuse compiled MXFP8 linear layers under TP, unless they are emulated."""
    linear = [one for one in _mx(cell) if one.gemms == "linear_layers"]
    is_native = any(not cell.options[one.emulate] for one in linear)
    if is_native and cell.facts.is_compiled and cell.layout.tp > 1:
        reason = "MXFP8 linear layers with tensor parallelism and a compiled model: torch.compile"
        remedy = f"set {Facts.tp} 1, or {Facts.compiled_components} loss"
        yield "", f"{reason} does not support it yet", remedy


@rule(RULES, reference=f"{TORCHTITAN}/protocols/model_converter.py")
def converted(cell: Cell) -> Problems:
    """Refuse converters that would convert nothing, or not what the loss and the kernels need."""
    facts, model = cell.facts, cell.options.model
    for one in facts.quantizes:
        parts = cell.options[one.modules or one.filter]
        if one.modules and model is not None:
            layers = range(model.n_dense_layers, model.n_layers)
            experts = [f"layers.{layer}.moe.experts" for layer in layers]
            if not any(part in name for part in parts for name in experts):
                reason = f"found {parts}, which names no layer's experts: none would be quantized"
                yield one.modules, reason, "set it to [experts]"
        if one.filter and facts.loss_chunks and not any(part in "output" for part in parts):
            reason = f"lacks output, whose weight {Facts.loss_chunks} multiplies by itself"
            yield one.filter, reason, "add output to it"
        has_rows = facts.row_kernels or facts.exchange.has_own_layer
        if one.modules and not one.is_mx and not has_rows:
            reason = "is false, and the row kernels compute the experts in FP8"
            yield Facts.row_kernels, reason, "set it to true"


@rule(RULES, reference=f"{TORCHAO}/prototype/mx_formats/mx_tensor.py")
def whole_blocks(cell: Cell) -> Problems:
    """Refuse feed-forward layers that TP cuts to a width that quantized GEMMs cannot have."""
    model, layout = cell.options.model, cell.layout
    if model is None:
        return
    for one in cell.facts.quantizes:
        short, what, hidden = "tp" if layout.ep == 1 else "etp", "experts", model.expert_hidden
        if one.gemms == "linear_layers":
            layers = (f"layers.{layer}.feed_forward." for layer in range(model.n_dense_layers))
            modules = [f"{layer}w{number}" for layer in layers for number in (1, 2, 3)]
            filters = cell.options[one.filter]
            is_left_out = all(any(part in module for part in filters) for module in modules)
            short, what, hidden = "tp", "dense layers", 0 if is_left_out else model.dense_hidden
        if (width := hidden / getattr(layout, short)) % one.multiple:
            reason = f"it cuts the {what} of {cell.options.model_title} to a width of {width:g}"
            reason += f", and {one.name} needs a multiple of {one.multiple}"
            yield DEGREES[short], reason, "lower it, or use another precision"


@rule(RULES, reference=f"{FLASH_ATTENTION}/interface.py")
def flash_attention(cell: Cell) -> Problems:
    (capability, have), option = _gpu_of(cell), Facts.attention
    if not cell.facts.uses_flash_attention:
        return
    # It supports compute capabilities 9 (Hopper) and 10 (data-center Blackwell); 0 stands for CPUs.
    if int(capability) not in (0, 9, 10):
        reason = "FlashAttention-4 needs a GPU of compute capability 9.x (H100, H200) or 10.x "
        yield option, f"{reason}(B200), {have}", f"set {option}=flavor"
    elif cell.cluster.gpu and cell.facts.param_dtype == "float32":
        reason = "FlashAttention-4 cannot compute in FP32, as TorchTitan does with TP or PP and no "
        yield option, f"{reason}FSDP", f"use bfloat16 and FSDP, or set {option}=flavor"
