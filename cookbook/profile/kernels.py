"""Rules that assign each kernel to a category by its name, operation and process group.

Only this module knows kernel names. A kernel that matches no rule counts as `other`, and the report
names it, so that a rule can be added here.
"""

import functools
import re
from dataclasses import dataclass

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
class Rule:
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
    # DeepEP: deep_ep::intranode, internode, internode_ll, layout; also NVSHMEM's barrier.
    Rule("ep", kernel=r"\bdeep_ep::|\bnvshmem"),
    # TorchAO's quantized all-to-all: a Triton kernel over symmetric memory.
    Rule("ep", kernel=r"_mxfp8_all_to_all_v_kernel"),
    Rule("ep", kernel=_NCCL, group=r"^mesh_ep$"),
    Rule("cp", kernel=_NCCL, group=r"^mesh_cp$"),
    Rule("pp", kernel=_NCCL, group=r"^mesh_pp$", collective=r"send|recv|coalesced"),
    # The last reduction of the gradient norm is a sum over all pipeline ranks.
    Rule("reductions", kernel=_NCCL, group=r"^mesh_pp$"),
    Rule("tp", kernel=_NCCL, group=r"^mesh_e?tp$"),
    # FSDP's annotations also enclose HSDP's all-reduce of gradients over the replicas.
    Rule("fsdp", kernel=_NCCL, inside=r"^FSDP::"),
    Rule("fsdp", kernel=_NCCL, group=r"^mesh_(e?fsdp|dp_shard\w*)$", collective=_GATHERS),
    # Loss, gradient norm and expert loads are reduced over the fsdp, loss, batch or default group.
    Rule("reductions", kernel=_NCCL, collective=r"all_?reduce|barrier|broadcast"),
    Rule("ep", kernel=_NCCL, collective=r"all_?to_?all"),
    Rule("pp", kernel=_NCCL, collective=r"send|recv"),
    # Outside FSDP's annotations, only DTensor's redistribution over TP uses these collectives.
    Rule("tp", kernel=_NCCL, collective=_GATHERS, group=r"^default_pg$"),
    # Asynchronous TP: PyTorch's collectives over symmetric memory.
    Rule("tp", kernel=r"multimem_\w+_kernel|one_shot_all_reduce|two_shot_all_reduce"),
    # On a CPU, gloo's thread records which collective ran, but not in which group.
    Rule("ep", inside=r"^gloo:all_to_all"),
    Rule("pp", inside=r"^gloo:(send|recv)"),
    Rule("communication", inside=r"^gloo:"),
    Rule("communication", kernel=_NCCL),
    # --- On a CPU, the main thread waits in wait_tensor while the gloo thread works. Time inside
    # an autograd node but outside any operation is spent in hooks, mostly FSDP's.
    Rule(NO_WORK, kernel=r"^_c10d_functional::wait_tensor$"),
    Rule(NO_WORK, kernel=r"^autograd::engine::|^(?!Compiled)\w+Backward\d*$|^RegisterPost"),
    # Python code of a tensor subclass such as DTensor: it only calls the actual operation.
    Rule(NO_WORK, kernel=r"^Python(Subclass|TLSSnapshot|Dispatcher)$"),
    Rule("communication", kernel=r"^(_?c10d(_functional(_autograd)?)?)::"),
    # --- Attention.
    Rule("attention", kernel=r"flex_attention|flex_decoding"),
    # FlashAttention-4: CuTe DSL kernels, FlashAttentionForwardSm90, FlashAttentionBackwardSm100,
    # FlashAttentionBackwardPreprocess / Postprocess; FlashAttention-2 in PyTorch: flash_fwd_kernel.
    Rule("attention", kernel=r"(?i)flash_?att(entio)?n|flash_(fwd|bwd)|fmha"),
    # cuDNN: cudnn_generated_fort_native_sdpa_sm90_flash_fprop and _bprop.
    Rule("attention", kernel=r"^cudnn\w*_sdpa_"),
    # All other kernels that an attention operation launches.
    Rule("attention", inside=r"(?i)scaled_?dot_?product|flex_?attention|varlen_attention"),
    # --- Optimizer and gradient norm. The optimizer's own GEMMs and copies count here too.
    Rule("optimizer", inside=r"^Optimizer\.(step|zero_grad)#"),
    # Fused AdamW, and the norms and scaling of clip_grad_norm_ (multi_tensor_apply, _foreach_*).
    # FSDP's _foreach_copy_ uses the same kernels, so its rule comes first.
    Rule("copies", operation=r"^aten::_foreach_copy_"),
    Rule("optimizer", kernel=r"multi_tensor_apply|FusedAdam|FusedSgd"),
    Rule("optimizer", operation=r"^aten::(_foreach_|_fused_adam|linalg_vector_norm)"),
    # --- Quantization. These rules precede those for GEMMs, because a GEMM's operation may launch
    # quantization kernels as well.
    # TorchAO: MXFP8 casts (CUDA and Triton), scales in the blocked layout, FP8 rowwise casts.
    Rule("quantization", kernel=r"mxfp8_quantize|to_mxfp8_dim|mx_block(_rearrange|ed_layout)"),
    Rule("quantization", kernel=r"triton_scale_swizzle|scale_swizzle|_dequant_mxfp8|nvfp4"),
    Rule("quantization", kernel=r"_triton_fp8_(per_group|rowwise)|fp8_blockwise_\w*quant"),
    Rule("quantization", kernel=r"^_?to_fp8_(row|col)|^_amax_|^_scale_(atomic|reduction)"),
    Rule("quantization", operation=r"torchao::\w*(quantize|to_mx|swizzle|fp8|rearrange)"),
    # Quantization fused by Inductor: a maximum absolute value, then a clamp to the format's range.
    Rule("quantization", kernel=r"^triton_\w*(amax\w*clamp|clamp\w*amax|float8)"),
    # --- Grouped GEMMs: CUTLASS kernels of aten::_grouped_mm, and the kernel that sets their
    # problem sizes. TorchTitan's for-loop over experts counts as dense GEMMs.
    Rule("grouped_gemms", inside=r"^aten::_(scaled_)?grouped_mm"),
    Rule("grouped_gemms", kernel=r"(?i)grouped_?mm|GroupProblemShape|grouped_?gemm|group_gemm"),
    Rule("grouped_gemms", operation=r"(?i)grouped_mm"),
    # --- Dense GEMMs of cuBLAS (such as nvjet_* on Hopper and Blackwell), CUTLASS, Inductor and
    # FBGEMM, including split-K reductions and matrix-vector products.
    Rule("dense_gemms", kernel=r"^nvjet_|(?i:gemm)|^triton_tem_\w*mm|cublasLt|splitKreduce"),
    Rule("dense_gemms", kernel=r"\bgemv|gemv2|gemvx|f8f8bf16|_scaled_mm"),
    Rule("dense_gemms", operation=r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$"),
    Rule("dense_gemms", kernel=r"^(mkldnn|onednn)::|mkldnn_linear"),
    # --- Loss. Eager: aten::_log_softmax and nll_loss, forward and backward. Compiled: Inductor's
    # kernel names contain these. `_softmax` without `log` belongs to the router.
    Rule("loss", kernel=r"(?i)log_?softmax|nll_loss|cross_entropy"),
    # The chunked loss's kernels; earlier rules match its GEMMs.
    Rule("loss", inside=r"(?i)log_?softmax|nll_?loss|cross_?entropy"),
    # --- Moving rows to their experts and back: TorchTitan's _fill_indices_kernel and indexing, the
    # cookbook's kernels in `triton_kernels.py`, and DeepEP's permutation.
    Rule("moving_rows", kernel=r"_fill_indices_kernel|^_(count|place|take|spread|fill)_kernel"),
    Rule("moving_rows", kernel=r"^_(collect|dot)_kernel"),
    Rule("moving_rows", kernel=r"permute_(fwd|bwd)?_?kernel|_exchange_row_offsets|unpermute"),
    # Match embedding kernels first, because later rules count every gather as `moving_rows`.
    Rule("pointwise", operation=r"^aten::embedding"),
    Rule("pointwise", kernel=r"embedding|^aten::embedding"),
    # TorchTitan's indexing: aten::sort, argsort, topk (CUB's radix sorts), histc, cumsum, index,
    # gather, scatter_add, index_put, and their backward.
    Rule("moving_rows", kernel=r"(?i)radix_?sort|\bsort|histogram|histc|bincount|kthvalue|topk"),
    Rule("moving_rows", kernel=r"index_elementwise|indexing_backward|indexFunc|index_(put|add)"),
    Rule("moving_rows", kernel=r"(?i)gather|scatter"),
    Rule("moving_rows", kernel=r"^triton_\w*_(index|sort|cumsum)(_|$)"),
    Rule(
        "moving_rows",
        operation=r"^aten::(sort|argsort|topk|histc|bincount|cumsum|index|index_\w+|_index_put_impl_"
        r"|gather|scatter\w*|repeat_interleave|index_select|take)$",
    ),
    # --- Copies: FSDP's packing of parameters and gradients; the driver's copies and fills.
    Rule("copies", kernel=r"^_cast_kernel"),  # the cookbook's copies of expert weights
    Rule("copies", operation=r"^fsdp::|split_with_sizes_copy|^aten::_?chunk_cat"),
    Rule("copies", kernel=r"^Mem(cpy|set)\b|CatArrayBatchedCopy|chunk_cat|split_with_sizes_copy"),
    Rule("copies", operation=r"^aten::(copy_|_to_copy|clone|contiguous|cat|fill_|zero_)$"),
    # --- The rest of the model: norms, RoPE, activations, residuals, casts, the router. They
    # run in Inductor's fused kernels (poi: pointwise; red, per: reductions) or in PyTorch's own.
    Rule("pointwise", kernel=r"^_(activate|gradient)_kernel"),  # the cookbook's SwiGLU
    Rule("pointwise", kernel=r"^triton_(poi|red|per|for|spl)_"),
    Rule("pointwise", kernel=r"\bat::native::|\bat_cuda_detail::|\bcub::|\bthrust::"),
    # All other PyTorch operations on a CPU.
    Rule("pointwise", kernel=r"^(aten|prims|torch|autograd|mkl|fsdp)::"),
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
