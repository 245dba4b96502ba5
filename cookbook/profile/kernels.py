"""Rules that assign each kernel to a category by its name, operation and process group.

Only this module knows kernel names. A kernel that matches no rule counts as `other`, and the report
names it, so that a rule can be added here.
"""

import functools
import re
from dataclasses import dataclass

from cookbook.config.facts import EXCHANGES

COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True)
class Category:
    """A category of kernels to which the time of a step is attributed."""

    name: str
    title: str
    kind: str


# In report order. When kernels overlap, the time goes to the first of their categories.
CATEGORIES = (
    Category("attention", "attention", COMPUTE),
    Category("grouped_gemms", "grouped GEMMs", COMPUTE),
    Category("dense_gemms", "dense GEMMs", COMPUTE),
    Category("moving_rows", "moving rows", COMPUTE),
    Category("quantization", "quantization", COMPUTE),
    Category("loss", "loss", COMPUTE),
    Category("optimizer", "optimizer and gradient norm", COMPUTE),
    Category("copies", "copies and casts, FSDP's packing", COMPUTE),
    Category("pointwise", "pointwise, norms, reductions", COMPUTE),
    Category("other", "other (no rule knows the name)", COMPUTE),
    Category("ep", "EP communication", COMMUNICATION),
    Category("tp", "TP communication", COMMUNICATION),
    Category("cp", "CP communication", COMMUNICATION),
    Category("pp", "PP send and receive", COMMUNICATION),
    Category("fsdp", "FSDP communication", COMMUNICATION),
    Category("reductions", "all-reduce of norm, loss, counts", COMMUNICATION),
    Category("communication", "communication of an unknown group", COMMUNICATION),
)
BY_NAME = {category.name: category for category in CATEGORIES}
# Host operations that only wait or call other operations get this instead of a category.
NO_WORK = "no work"
NUMBERS = {category.name: number for number, category in enumerate(CATEGORIES)} | {NO_WORK: -1}
GEMMS = ("grouped_gemms", "dense_gemms")


@dataclass(frozen=True)
class Match:
    """Assigns a kernel to a category if every nonempty pattern matches."""

    category: str
    kernel: str = ""  # pattern for the kernel's name; on a CPU, for the operation's name
    operation: str = ""  # pattern for the name of the host operation that launched the kernel
    inside: str = ""  # pattern for the name of that operation or of any event that encloses it
    collective: str = ""  # pattern for the collective's name in the trace, such as `allgather`
    group: str = ""  # pattern for the process group's description, such as `mesh_ep`


_NCCL = r"^nccl"
_GATHERS = r"all_?gather|reduce_?scatter"

# The first rule that matches a kernel applies.
RULES = (
    # --- Communication. A process group has the name of its mesh in TorchTitan's parallel_dims.py,
    # but a group of all ranks is always named `default_pg`, whatever it is used for.
    *(Match("ep", kernel=one.kernels) for one in EXCHANGES.values() if one.kernels),
    Match("ep", kernel=_NCCL, group=r"^mesh_ep$"),
    Match("cp", kernel=_NCCL, group=r"^mesh_cp$"),
    Match("pp", kernel=_NCCL, group=r"^mesh_pp$", collective=r"send|recv|coalesced"),
    # The last reduction of the gradient norm is a sum over all pipeline ranks.
    Match("reductions", kernel=_NCCL, group=r"^mesh_pp$"),
    Match("tp", kernel=_NCCL, group=r"^mesh_e?tp$"),
    # FSDP's annotations also enclose HSDP's all-reduce of gradients over the replicas.
    Match("fsdp", kernel=_NCCL, inside=r"^FSDP::"),
    Match("fsdp", kernel=_NCCL, group=r"^mesh_(e?fsdp|dp_shard\w*)$", collective=_GATHERS),
    # Loss, gradient norm and expert loads are reduced over the fsdp, loss, batch or default group.
    Match("reductions", kernel=_NCCL, collective=r"all_?reduce|barrier|broadcast"),
    Match("ep", kernel=_NCCL, collective=r"all_?to_?all"),
    Match("pp", kernel=_NCCL, collective=r"send|recv"),
    # Outside FSDP's annotations, only DTensor's redistribution over TP uses these collectives.
    Match("tp", kernel=_NCCL, collective=_GATHERS, group=r"^default_pg$"),
    # Asynchronous TP: PyTorch's collectives over symmetric memory.
    Match("tp", kernel=r"multimem_\w+_kernel|one_shot_all_reduce|two_shot_all_reduce"),
    # On a CPU, gloo's thread records which collective ran, but not in which group.
    Match("ep", inside=r"^gloo:all_to_all"),
    Match("pp", inside=r"^gloo:(send|recv)"),
    Match("communication", inside=r"^gloo:"),
    Match("communication", kernel=_NCCL),
    # --- On a CPU, the main thread waits in wait_tensor while the gloo thread works. Time inside
    # an autograd node but outside any operation is spent in hooks, mostly FSDP's.
    Match(NO_WORK, kernel=r"^_c10d_functional::wait_tensor$"),
    Match(NO_WORK, kernel=r"^autograd::engine::|^(?!Compiled)\w+Backward\d*$|^RegisterPost"),
    # Python code of a tensor subclass such as DTensor: it only calls the actual operation.
    Match(NO_WORK, kernel=r"^Python(Subclass|TLSSnapshot|Dispatcher)$"),
    Match("communication", kernel=r"^(_?c10d(_functional(_autograd)?)?)::"),
    # --- Attention.
    Match("attention", kernel=r"flex_attention|flex_decoding"),
    # FlashAttention-4: CuTe DSL kernels, FlashAttentionForwardSm90, FlashAttentionBackwardSm100,
    # FlashAttentionBackwardPreprocess / Postprocess; FlashAttention-2 in PyTorch: flash_fwd_kernel.
    Match("attention", kernel=r"(?i)flash_?att(entio)?n|flash_(fwd|bwd)|fmha"),
    # cuDNN: cudnn_generated_fort_native_sdpa_sm90_flash_fprop and _bprop.
    Match("attention", kernel=r"^cudnn\w*_sdpa_"),
    # All other kernels that an attention operation launches.
    Match("attention", inside=r"(?i)scaled_?dot_?product|flex_?attention|varlen_attention"),
    # --- Optimizer and gradient norm. The optimizer's own GEMMs and copies count here too.
    Match("optimizer", inside=r"^Optimizer\.(step|zero_grad)#"),
    # Fused AdamW, and the norms and scaling of clip_grad_norm_ (multi_tensor_apply, _foreach_*).
    # FSDP's _foreach_copy_ uses the same kernels, so its rule comes first.
    Match("copies", operation=r"^aten::_foreach_copy_"),
    Match("optimizer", kernel=r"multi_tensor_apply|FusedAdam|^_update_kernel"),
    Match("optimizer", operation=r"^aten::(_foreach_|_fused_adam|linalg_vector_norm)"),
    # --- Quantization. These rules precede those for GEMMs, because a GEMM's operation may launch
    # quantization kernels as well.
    # TorchAO's MXFP8 casts (CUDA and Triton) and scales in the blocked layout; the cookbook's FP8.
    Match("quantization", kernel=r"mxfp8_quantize|to_mxfp8_dim|mx_block(_rearrange|ed_layout)"),
    Match("quantization", kernel=r"scale_swizzle|_dequant_mxfp8|^_(quantize|transpose)_kernel"),
    Match("quantization", operation=r"torchao::\w*(quantize|to_mx|swizzle|fp8|rearrange)"),
    # Quantization fused by Inductor: a maximum absolute value, then a clamp to the format's range.
    Match("quantization", kernel=r"^triton_\w*(amax\w*clamp|clamp\w*amax|float8)"),
    # --- Grouped GEMMs: CUTLASS kernels of aten::_grouped_mm, and the kernel that sets their
    # problem sizes. TorchTitan's for-loop over experts counts as dense GEMMs.
    Match("grouped_gemms", inside=r"^aten::_(scaled_)?grouped_mm"),
    Match("grouped_gemms", kernel=r"(?i)grouped_?mm|GroupProblemShape|grouped_?gemm|group_gemm"),
    Match("grouped_gemms", operation=r"(?i)grouped_mm"),
    # --- Dense GEMMs of cuBLAS (such as nvjet_* on Hopper and Blackwell), CUTLASS, Inductor and
    # FBGEMM, including split-K reductions and matrix-vector products.
    Match("dense_gemms", kernel=r"^nvjet_|(?i:gemm)|^triton_tem_\w*mm|cublasLt|splitKreduce"),
    Match("dense_gemms", kernel=r"\bgemv|gemv2|gemvx|f8f8bf16|_scaled_mm"),
    Match("dense_gemms", operation=r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$"),
    Match("dense_gemms", kernel=r"^(mkldnn|onednn)::|mkldnn_linear"),
    # --- Loss. Eager: aten::_log_softmax and nll_loss, forward and backward. Compiled: Inductor's
    # kernel names contain these. `_softmax` without `log` belongs to the router.
    Match("loss", kernel=r"(?i)log_?softmax|nll_loss|cross_entropy"),
    # The chunked loss's kernels; earlier rules match its GEMMs.
    Match("loss", inside=r"(?i)log_?softmax|nll_?loss|cross_?entropy"),
    # --- Moving rows to their experts and back: TorchTitan's _fill_indices_kernel and indexing, the
    # cookbook's kernels in `triton_kernels.py`, and DeepEP's permutation.
    Match("moving_rows", kernel=r"_fill_indices_kernel|^_(count|place|take|spread|fill)_kernel"),
    Match("moving_rows", kernel=r"^_(collect|dot)_kernel"),
    Match("moving_rows", kernel=r"permute_(fwd|bwd)?_?kernel|_exchange_row_offsets|unpermute"),
    # Match embedding kernels first, because later rules count every gather as `moving_rows`.
    Match("pointwise", operation=r"^aten::embedding"),
    Match("pointwise", kernel=r"embedding|^aten::embedding"),
    # TorchTitan's indexing: aten::sort, argsort, topk (CUB's radix sorts), histc, cumsum, index,
    # gather, scatter_add, index_put, and their backward.
    Match("moving_rows", kernel=r"(?i)radix_?sort|\bsort|histogram|histc|bincount|kthvalue|topk"),
    Match("moving_rows", kernel=r"index_elementwise|indexing_backward|indexFunc|index_(put|add)"),
    Match("moving_rows", kernel=r"(?i)gather|scatter"),
    Match("moving_rows", kernel=r"^triton_\w*_(index|sort|cumsum)(_|$)"),
    Match(
        "moving_rows",
        operation=r"^aten::(sort|argsort|topk|histc|bincount|cumsum|index|index_\w+|_index_put_impl_"
        r"|gather|scatter\w*|repeat_interleave|index_select|take)$",
    ),
    # --- Copies: FSDP's packing of parameters and gradients; the driver's copies and fills.
    Match("copies", kernel=r"^_cast_kernel"),  # the cookbook's copies of expert weights
    Match("copies", operation=r"^fsdp::|split_with_sizes_copy|^aten::_?chunk_cat"),
    Match("copies", kernel=r"^Mem(cpy|set)\b|CatArrayBatchedCopy|chunk_cat|split_with_sizes_copy"),
    Match("copies", operation=r"^aten::(copy_|_to_copy|clone|contiguous|cat|fill_|zero_)$"),
    # --- The rest of the model: norms, RoPE, activations, residuals, casts, the router. They
    # run in Inductor's fused kernels (poi: pointwise; red, per: reductions) or in PyTorch's own.
    Match("pointwise", kernel=r"^_(activate|gradient)_kernel"),  # the cookbook's SwiGLU
    Match("pointwise", kernel=r"^triton_(poi|red|per|for|spl)_"),
    Match("pointwise", kernel=r"\bat::native::|\bat_cuda_detail::|\bcub::|\bthrust::"),
    # All other PyTorch operations on a CPU.
    Match("pointwise", kernel=r"^(aten|prims|torch|autograd|mkl|fsdp)::"),
)


@functools.cache
def category_of(
    kernel: str, inside: tuple[str, ...] = (), collective: str = "", group: str = ""
) -> str:
    """Return the name of a kernel's category, or `NO_WORK`.

    `inside`: the operation that launched the kernel, then its enclosing events from the inside out.
    """
    texts: dict[str, tuple[str, ...]] = {"operation": inside[:1], "inside": inside}
    texts |= {"kernel": (kernel,), "collective": (collective,), "group": (group,)}
    for rule in RULES:
        patterns = ((getattr(rule, name), texts[name]) for name in texts)
        if all(any(re.search(form, one) for one in found) for form, found in patterns if form):
            return rule.category
    return "other"
