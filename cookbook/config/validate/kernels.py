"""The needs of precision, EP backend and attention, held against the options."""

from cookbook.config.cell import (
    ATTENTION,
    EP_CHUNKS,
    LAYERS_KEPT,
    NUM_CHUNKS,
    SAVE_LIST,
    SCORE_ACTIVATIONS,
    Cell,
    Problems,
    Rule,
    rule,
)
from cookbook.config.options import DEGREES
from cookbook.config.recipe import implied
from cookbook.config.stack import FLASH_ATTENTION, TORCHTITAN

RULES: list[Rule] = []
CUSTOM_IMPORT = "experimental.custom_import"
MX = frozenset({"quantize.grouped_mm.mx", "quantize.linear.mx"})
_PARALLELIZE = f"{TORCHTITAN}/models/llama4/infra/parallelize.py"
_MX = f"{TORCHTITAN}/components/quantization/mx.py"
# Hopper and Blackwell of data centres: 9.0 is H100 and H200, 10.0 and 10.3 are B200 and B300.
_FLASH_GENERATIONS = (9, 10)
# Of queries and keys, and of values. Gradients of other sizes were not compared with a reference,
# and some have been wrong on some GPUs.
_FLASH_HEAD_DIMS = ((192, 128), (128, 128))
# TorchTitan's `attn_type` of PyTorch's scaled_dot_product_attention.
_SDPA = "sdpa"


@rule(RULES, reference=_MX)
def hardware(cell: Cell) -> Problems:
    """An overlay needs its generation of GPUs, unless it is emulated."""
    gpu = cell.cluster.gpu
    have = f"{gpu.name} has {gpu.compute_capability}" if gpu else "there is no CUDA GPU"
    for overlay in (cell.precision, cell.ep_backend):
        needed = overlay.needs.compute_capability
        if needed > (gpu.compute_capability if gpu else 0) and overlay not in cell.emulated_parts:
            yield "", f"{overlay.name} needs a GPU of compute capability {needed}, {have}", ""


@rule(RULES, reference=_PARALLELIZE)
def needs(cell: Cell) -> Problems:
    """An overlay needs GPUs, EP and options; the first unmet one is named."""
    for overlay in (cell.precision, cell.ep_backend):
        needed, unmet = overlay.needs, list[str]()
        if needed.device == "cuda" and cell.cluster.gpu is None:
            unmet.append(f"CUDA GPUs, cluster {cell.cluster.name} runs on the CPU")
        if needed.expert_parallel and cell.options[DEGREES["ep"]] < 2:
            unmet.append(f"{DEGREES['ep']} above 1")
        for name, setting in needed.settings.items():
            if (value := cell.options[name]) != setting.value:
                unmet.append(f"{name} {setting.value}, found {value}")
        for reason in unmet[:1]:
            yield "", f"{overlay.name} needs {reason}", ""


@rule(RULES, reference=f"{TORCHTITAN}/protocols/model_converter.py")
def declaration(cell: Cell) -> Problems:
    """The job stops at its first step if the options turn on another format or exchange."""
    found = implied(cell.options)
    for overlay, what in ((cell.precision, "precision"), (cell.ep_backend, "EP backend")):
        for name, setting in overlay.expect.items():
            key = name.removeprefix("cookbook.")
            # With one EP rank nothing is dispatched.
            if found[key] == setting.value or (key == "dispatch" and cell.layout.ep == 1):
                continue
            reason = (
                f"{what} {overlay.name} expects {key} {setting.value}, and the options turn on "
            )
            reason += f"{found[key]}: the job would stop at its first step"
            remedy = f"correct the options, or `expect` in {overlay.path.name}"
            yield "model.converters" if what == "precision" else "", reason, remedy


@rule(RULES, reference=_PARALLELIZE)
def ep_size(cell: Cell) -> Problems:
    """An exchange supports certain EP degrees, and between nodes certain nodes."""
    exchange, degree, option = cell.exchange, cell.layout.ep, DEGREES["ep"]
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
        reason = (
            f"EP {degree} leaves the node, and {exchange.title} between nodes takes them to have"
        )
        remedy = f"set it to at most {per_node}, or take the standard backend"
        yield option, f"{reason} {exchange.ranks_per_node} GPUs, not {per_node}", remedy


@rule(RULES, reference=_PARALLELIZE)
def expert_tensor_parallel(cell: Cell) -> Problems:
    """TorchTitan has expert tensor parallelism with its own exchange alone."""
    if not cell.exchange.has_etp and cell.layout.etp > 1:
        reason = f"{cell.exchange.title} needs 1, found {cell.layout.etp}"
        yield DEGREES["etp"], reason, "set it to 1"


@rule(RULES, reference=f"{TORCHTITAN}/models/moe/moe_deepep.py")
def hooks_are_on(cell: Cell) -> Problems:
    """The cookbook's corrections and options of TorchTitan come with its `custom_import`."""
    hooks = cell.options.stack.hooks
    if cell.hooks == hooks:
        return
    title, remedy = cell.exchange.title, f"set {CUSTOM_IMPORT} to {hooks}"
    uses_mx = MX & set(cell.options["model.converters"])
    if cell.exchange.has_own_layer and (cell.layout.tp > 1 or uses_mx):
        reason = f"without the hooks {title} counts tokens once a TP rank, and pads no MXFP8 groups"
        yield CUSTOM_IMPORT, reason, remedy
    for name in (NUM_CHUNKS, EP_CHUNKS, LAYERS_KEPT, SAVE_LIST, SCORE_ACTIVATIONS, ATTENTION):
        if cell.options[name] != cell.options.stack.options[name].default:
            yield name, "only the cookbook's hooks have this option", remedy


@rule(RULES, reference=_MX)
def mxfp8_hardware(cell: Cell) -> Problems:
    """MXFP8 converters need Blackwell or emulation, also those that an option brought in."""
    gpu = cell.cluster.gpu
    if gpu is not None and gpu.compute_capability >= 10.0:
        return
    have = f"{gpu.name} has {gpu.compute_capability}" if gpu else "there is no CUDA GPU"
    for name in sorted(MX & set(cell.options["model.converters"])):
        if not cell.options[f"{name}.emulate"]:
            reason = f"{name} needs compute capability 10.0 (SM100), {have}"
            remedy = f"set {name}.emulate=true for numerics without speed"
            yield "model.converters", reason, remedy


@rule(RULES, reference=_MX)
def mxfp8_linear_compiles(cell: Cell) -> Problems:
    """TorchAO's SM100 casts do not compile under TP; emulated, they are plain operations (H200)."""
    name = "quantize.linear.mx"
    is_native = name in cell.options["model.converters"] and not cell.options[f"{name}.emulate"]
    if is_native and cell.is_compiled and cell.layout.tp > 1:
        reason = "MXFP8 linear layers with tensor parallelism and a compiled model: torch.compile"
        remedy = f"set {DEGREES['tp']} 1, or compile.components loss"
        yield "", f"{reason} does not support it yet", remedy


@rule(RULES, reference=f"{FLASH_ATTENTION}/interface.py")
def flash_attention(cell: Cell) -> Problems:
    """It has kernels for two generations of GPUs, and only the families' own heads were checked."""
    gpu, model, remedy = cell.cluster.gpu, cell.options.model, f"set {ATTENTION}=flavor"
    if not cell.uses_flash_attention:
        return
    # On the CPU its reference runs.
    if gpu and int(gpu.compute_capability) not in _FLASH_GENERATIONS:
        reason = (
            "FlashAttention-4 needs a GPU of compute capability 9.x (H100, H200) or 10.x (B200)"
        )
        yield ATTENTION, f"{reason}, {gpu.name} has {gpu.compute_capability}", remedy
    if model and model.head_dims not in _FLASH_HEAD_DIMS:
        every = (*_FLASH_HEAD_DIMS, model.head_dims)
        *allowed, have = ("/".join(map(str, dims)) for dims in every)
        reason = (
            f"FlashAttention-4 is for heads of {' or '.join(allowed)} (queries and keys/values)"
        )
        yield ATTENTION, f"{reason}, {cell.options.model_title} has {have}", remedy


@rule(RULES, reference=f"{TORCHTITAN}/distributed/context_parallel.py")
def context_parallel_attention(cell: Cell) -> Problems:
    """TorchTitan has context parallelism for SDPA only; most flavors have FlexAttention."""
    model, title = cell.options.model, cell.options.model_title
    own = model.attn_type if model else _SDPA
    if cell.layout.cp == 1:
        return
    if cell.uses_flash_attention:
        reason = "FlashAttention-4 computes a sequence on one rank, and context parallelism "
        reason += f"({cell.layout.cp}) cuts it over several"
    elif own != _SDPA:
        reason = f"TorchTitan has context parallelism for SDPA only, and {title} has {own}"
    elif model and model.kv_heads < model.heads:
        reason = f"context parallelism is untested with grouped-query attention, as in {title}"
    else:
        return
    yield DEGREES["cp"], reason, "set it to 1"
