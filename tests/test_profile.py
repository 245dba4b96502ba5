"""`submit.py profile` of traces and of a recipe; kernels by their names."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.profile.kernels import NO_WORK, category_of
from tests.made_up_run import Run
from tests.submit import ROOT, listing, submit
from tests.traces import GEMM, TraceFile
from tests.waiting import HANG_S

RUN = "mine-20261121-120000"
ATTEMPT = f"{RUN}/16b-bf16-deepep/attempt-0"


def _trace(folder: Path, rank: int = 0) -> Path:
    trace = TraceFile(rank, 2).step(7, 0, 10_000).kernel(GEMM, 0, 6_000, launched=0)
    return trace.collective("allreduce", "default_pg", 6_000, 8_000, launched=0).write(folder)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with two cells, one of which left traces."""
    run = Run(tmp_path / "runs", name=RUN)
    cells = [run.add(name) for name in ("16b-bf16-deepep", "16b-bf16-standard")]
    run.write()
    for rank in range(2):
        _trace(cells[0] / "attempt-0/profile_traces/iteration_8", rank)
    (cells[1] / "attempt-0").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "target",
    [
        RUN,
        f"{RUN}/16b-bf16-deepep",
        f"RUNS/{RUN}/16b-bf16-deepep",
        f"RUNS/{ATTEMPT}/profile_traces/iteration_8",
    ],
)
def test_a_runs_traces_are_found_by_any_of_its_names(runs: Path, target: str) -> None:
    before = listing(runs)
    answer = submit("profile", target.replace("RUNS", str(runs)), "--json", runs=runs)
    assert (answer.status, answer.stderr) == (0, ""), answer
    assert [rank["rank"] for rank in json.loads(answer.stdout)["ranks"]] == [0, 1]
    assert listing(runs) == before


def test_the_table(runs: Path) -> None:
    answer = submit("profile", RUN, "--ranks", "1", runs=runs)
    assert (answer.status, answer.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    assert f"{RUN}/16b-bf16-deepep: step 7, NVIDIA H200" in lines
    assert "dense GEMMs 6.0 60.0%" in lines
    assert "all-reduce of norm, loss, counts, exposed 2.0 20.0%" in lines
    assert "step 10.0 100.0%" in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{RUN}/16b-bf16-standard"], "left no trace"),
        ([f"{RUN}/16b"], "unknown cell '16b'"),
        ([RUN, "--ranks", "7"], "--ranks: found '7', allowed: all, or some of 0, 1"),
        ([RUN, "--nodes", "2"], f"--nodes: {RUN} is no recipe"),
        (
            ["debug", "--set", "training.steps=3"],
            "--set training.steps: profiling.profile_freq: found 3, allowed: 5 and up",
        ),
        (
            ["debug", "--set", "profiling.profile_freq=9"],
            "--set profiling.profile_freq: found 9, allowed: up to the 8 steps",
        ),
    ],
)
def test_a_mistake_is_one_line(runs: Path, words: list[str], message: str) -> None:
    before = listing(runs)
    answer = submit("profile", *words, runs=runs)
    assert (answer.status, answer.stdout) == (2, "")
    assert message in answer.stderr and answer.stderr.count("\n") == 1
    assert listing(runs) == before


def test_of_several_traced_cells_one_is_to_be_named(runs: Path) -> None:
    other = f"{RUN}/16b-bf16-standard"
    _trace(runs / other / "attempt-0/profile_traces/iteration_8", 1)
    answer = submit("profile", RUN, runs=runs)
    assert (answer.status, answer.stdout) == (2, "")
    assert f"{RUN}: several cells left traces: 16b-bf16-deepep, 16b-bf16-standard; name one" in (
        answer.stderr
    )
    (rank,) = json.loads(submit("profile", other, "--json", runs=runs).stdout)["ranks"]
    assert rank["rank"] == 1


def test_a_recipe_is_profiled_without_its_weights_and_validation(tmp_path: Path) -> None:
    recipe, text = tmp_path / "mine.yaml", (ROOT / "recipes/debug.yaml").read_text()
    options = ["enable: true", "initial_load_in_hf: true", "last_save_in_hf: true"]
    options += ["last_save_model_only: true"]
    options += ["initial_load_in_hf_quantized: true", "initial_load_path: nowhere"]
    text += "validation: {enable: true, freq: 0}\ncheckpoint:"
    recipe.write_text("\n  ".join([text, *options]))
    words = ["profile", str(recipe), "--cluster", "local", "--dry-run"]
    answer = submit(*words, runs=tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    # If checkpoints are asked for, so are the recipe's weights.
    answer = submit(*words, "--set", "checkpoint.enable=true", runs=tmp_path)
    assert answer.status == 1 and "nowhere is not there" in answer.stdout
    answer = submit(*words, "--set", "checkpoint.last_save_in_hf=true", runs=tmp_path)
    assert answer.status == 2 and "last_save_in_hf: has no effect" in answer.stderr


@pytest.mark.nightly
@pytest.mark.titan
@pytest.mark.parametrize("recipe", ["debug", "qwen3_debug"])
def test_a_recipe_is_trained_and_profiled(recipe: str, tmp_path: Path) -> None:
    if not (ROOT / "assets/local/stamp.json").exists():
        command = [sys.executable, "-m", "cookbook.install.corpus", "assets/local"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)
    small = ["training.seq_len=64", "training.steps=3", "profiling.profiler_warmup=1"]
    words = [word for setting in small for word in ("--set", setting)]
    answer = submit(
        *["profile", recipe, "--cluster", "local", "--json", *words],
        runs=tmp_path,
        variables={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert answer.status == 0, answer
    # Progress is said elsewhere than the profile.
    assert "step 3/3" in answer.stderr
    found = json.loads(answer.stdout)
    assert (found["on_gpu"], found["device"]) == (False, "CPU")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["steps"] == [2, 3]
        parts = [category["ms"] for category in rank["categories"].values()]
        assert sum(parts) + rank["idle"]["host_ms"] == pytest.approx(rank["step_ms"])
        assert rank["accounted"] > 0.95
        expected = {"attention", "dense_gemms", "grouped_gemms", "moving_rows", "optimizer"}
        assert expected | {"loss", "copies", "ep", "communication"} <= set(rank["categories"])
        assert rank["gemms"]["grouped_gemms"]["tflops"] > 0
    (run,) = tmp_path.iterdir()
    assert run.name.startswith(f"{recipe.replace('_', '-')}-profile-")
    again = submit("profile", run.name, "--json", runs=tmp_path)
    assert json.loads(again.stdout)["ranks"] == found["ranks"]


OWN_KERNEL = re.compile(r"@triton\.jit.*\ndef (_\w+_kernel)\(")
# As profilers of this stack name them: H100, H200 and B200, torch 2.10 and 2.11.
KERNELS = {
    "attention": [
        "triton_tem_fused_flex_attention_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_5_64x128x128_4x1x1",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
    ],
    "grouped_gemms": [
        "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>(...)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::"
        "GroupProblemShape<cute::tuple<int, int, int>>, cutlass::gemm::collective::...>>",
    ],
    "dense_gemms": [
        "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
        "triton_tem_fused_mm_4",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>",
    ],
    "moving_rows": [
        "_spread_kernel",
        "_fill_kernel",
        "_place_kernel",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<...>>",
        "void at::native::indexing_backward_kernel_stride_1<c10::BFloat16, 4>(long const*)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>(...)",
        "void at::native::kernelHistogram1D<long, long, long, 1, 2, -1>(...)",
        "triton_poi_fused_scatter_add_3",
    ],
    "quantization": [
        "void mxfp8_quantize_kernel<__nv_bfloat16, __nv_fp8_e4m3, 32ul, 1ul, 0>(CUtensorMap_st)",
        "triton_scale_swizzle_M_groups",
        "_quantize_kernel",
        "triton_red_fused__to_copy_abs_amax_clamp_div_mul_2",
    ],
    "loss": [
        "void (anonymous namespace)::cunn_SoftMaxForward<4, float>(LogSoftMaxForwardEpilogue)",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "_cast_kernel",
        "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**, char**)",
    ],
    "pointwise": [
        "triton_poi_fused_add_mul_silu_3",
        "_activate_kernel",
        "_gradient_kernel",
        "triton_red_fused__fused_rms_norm__to_copy_add_1",
    ],
    "ep": [
        "deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, int*, bool*)",
        "_mxfp8_all_to_all_v_kernel",
    ],
}
NAMES = [(category, name) for category, names in KERNELS.items() for name in names]
OWN = [
    name
    for file in ROOT.glob("cookbook/titan/common/*.py")
    for name in OWN_KERNEL.findall(file.read_text())
]
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(("category", "name"), NAMES)
def test_a_kernels_name_says_what_it_is_for(category: str, name: str) -> None:
    assert category_of(name) == category


def test_a_rule_knows_each_of_the_cookbooks_own_kernels() -> None:
    assert len(OWN) > 10 and {"_quantize_kernel", "_update_kernel"} <= {*OWN}
    assert [name for name in OWN if category_of(name) == "other"] == []


@pytest.mark.parametrize(
    ("category", "collective", "group", "inside"),
    [
        # A mesh of all ranks has PyTorch's own group: EP 4, FSDP 4 on 4 GPUs.
        ("ep", "all_to_allv", "default_pg", ()),
        ("fsdp", "_allgather_base", "default_pg", ("FSDP::all_gather (layers.3)",)),
        ("fsdp", "_reduce_scatter_base", "mesh_efsdp", ()),
        ("fsdp", "allreduce", "mesh_dp_replicate", ("FSDP::post_backward_reduce",)),
        ("tp", "_allgather_base", "mesh_tp", ()),
        ("tp", "_reduce_scatter_base", "default_pg", ()),
        ("cp", "_allgather_base", "mesh_cp", ()),
        ("pp", "send", "mesh_pp", ()),
        ("reductions", "allreduce", "mesh_pp", ()),
        ("reductions", "allreduce", "default_pg", ()),
        ("communication", "_allgather_base", "mesh_mine", ()),
    ],
)
def test_collectives(category: str, collective: str, group: str, inside: tuple[str, ...]) -> None:
    assert category_of(NCCL, inside, collective, group) == category


ELEMENTWISE = "void at::native::elementwise_kernel<128, 2>"


@pytest.mark.parametrize(
    ("category", "name", "inside"),
    [
        # The same kernel, by what launched it.
        ("pointwise", ELEMENTWISE, ("aten::mul",)),
        ("optimizer", ELEMENTWISE, ("aten::mul", "Optimizer.step#AdamW.step")),
        ("attention", ELEMENTWISE, ("aten::mul", "cookbook::varlen_attention")),
        ("copies", ELEMENTWISE, ("fsdp::chunk_cat",)),
        ("loss", "void cunn_SoftMaxForward<4, float>", ("aten::_log_softmax",)),
        ("loss", "triton_red_fused_exp_sum_0", ("Torch-Compiled Region", "ChunkedCrossEntropy")),
        ("dense_gemms", "nvjet_tst_256x128", ("aten::mm", "_ChunkedCrossEntropyBackward")),
        ("attention", "nvjet_tst_128x64", ("aten::bmm", "aten::_scaled_dot_product_attention")),
        ("copies", "multi_tensor_apply_kernel<CopyFunctor>", ("aten::_foreach_copy_",)),
        ("quantization", "triton_poi_fused_x", ("torchao::mxfp8_quantize",)),
        # Of a GEMM's operation only what casts is not a GEMM.
        ("quantization", "to_mxfp8_dim1_kernel", ("aten::_scaled_grouped_mm",)),
        (NO_WORK, "_c10d_functional::wait_tensor", ("_c10d_functional::wait_tensor",)),
        ("pp", "gloo:recv", ("gloo:recv",)),
        ("ep", "aten::view", ("aten::view", "gloo:all_to_all")),
        ("communication", "gloo:all_reduce", ("gloo:all_reduce",)),
        (NO_WORK, "MulBackward0", ("MulBackward0",)),
        ("other", "CompiledFunctionBackward", ("CompiledFunctionBackward",)),
    ],
)
def test_the_launcher_decides(category: str, name: str, inside: tuple[str, ...]) -> None:
    assert category_of(name, inside) == category
