"""Where a step goes, on small traces with known answers; several ranks; trace files."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.profile.profile import (
    cell_traces,
    choose_ranks,
    folder_traces,
    make_profile,
    render_text,
)
from cookbook.profile.rank import RankProfile, profile_rank
from cookbook.profile.trace import read_trace
from cookbook.run.folder import CellFolder
from tests.traces import ALL_GATHER, AUTOGRAD, GEMM, POINTWISE, TraceFile

DEEPEP = "void deep_ep::intranode::dispatch<4, 768, 8192>(int4*, float*, int*)"
GROUPED = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape>>"


def _profiled(trace: TraceFile, folder: Path) -> RankProfile:
    profile = profile_rank(trace.write(folder))
    total = sum(_counted(profile).values()) + profile.idle.host_ms + profile.idle.queued_ms
    assert total == pytest.approx(profile.step_ms), "the parts are not the step"
    return profile


def _counted(profile: RankProfile) -> dict[str, float]:
    return {name: own.ms for name, own in profile.categories.items()}


def test_each_moment_is_counted_once(tmp_path: Path) -> None:
    trace = TraceFile().step(7, 0, 10_000)
    # A GEMM for 4 ms; an all-gather beside it, of which 1 ms sticks out; then 2 ms of DeepEP alone.
    trace.kernel(GEMM, 1_000, 5_000, launched=500)
    trace.note("FSDP::all_gather (layers.3)", 590, 620)
    trace.collective("_allgather_base", "mesh_fsdp", 3_000, 6_000, launched=600, name=ALL_GATHER)
    trace.kernel(DEEPEP, 6_000, 8_000, launched=700)
    profile = _profiled(trace, tmp_path)
    assert profile.step_ms == pytest.approx(10)
    assert _counted(profile) == pytest.approx({"dense_gemms": 4, "fsdp": 1, "ep": 2})
    assert [own.hidden_ms for own in profile.categories.values()] == pytest.approx([0, 0, 2])
    assert (profile.compute_ms, profile.exposed_communication_ms) == pytest.approx((4, 3))


def test_idle_time_is_the_hosts_until_it_launches_and_then_the_queues(tmp_path: Path) -> None:
    trace = TraceFile().step(7, 0, 10_000)
    trace.kernel(GEMM, 0, 2_000, launched=0)
    # Idle from 2 to 6 ms: launched at 5; the host was in the data loader.
    trace.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 2_500, 4_900)
    trace.kernel(GEMM, 6_000, 7_000, launched=5_000)
    # Idle from 7 to 9 ms, although launched at 5.1: it waited for an event.
    trace.kernel(POINTWISE, 9_000, 10_000, launched=5_100)
    profile = _profiled(trace, tmp_path)
    assert (profile.idle.host_ms, profile.idle.queued_ms) == pytest.approx((3, 3))
    assert profile.idle.causes_ms == pytest.approx({"enumerate(DataLoader)": 3})


def test_a_host_that_waited_for_the_gpu_is_named(tmp_path: Path) -> None:
    trace = TraceFile().step(7, 0, 8_000)
    trace.kernel(GEMM, 0, 2_000, launched=0)
    trace.op("aten::_local_scalar_dense", 100, 2_100)
    trace.add("cuda_runtime", "cudaStreamSynchronize", 200, 2_050, 100)
    trace.op("aten::add", 2_200, 6_000)
    trace.kernel(GEMM, 6_000, 8_000, launched=5_900)
    causes = _profiled(trace, tmp_path).idle.causes_ms
    assert causes == pytest.approx({"had waited for the GPU in aten::_local_scalar_dense": 3.9})


def test_the_launching_thread_is_the_one_that_is_asked(tmp_path: Path) -> None:
    trace = TraceFile().step(7, 0, 4_000).kernel(GEMM, 0, 1_000, launched=0)
    trace.op("aten::main_thread_waits", 0, 4_000)
    trace.op("deepep::dispatch", 900, 2_900, thread=AUTOGRAD)
    trace.kernel(DEEPEP, 3_000, 4_000, launched=2_800, thread=AUTOGRAD)
    causes = _profiled(trace, tmp_path).idle.causes_ms
    assert causes == pytest.approx({"deepep::dispatch": 1.8})


def test_steps_are_the_devices_where_the_host_runs_ahead(tmp_path: Path) -> None:
    trace = TraceFile().step(7, 0, 4_000).step(8, 4_000, 8_000)
    # The device was busy with step 6 until 3 ms, does step 7 until 7 and step 8 until 11.
    trace.kernel(GEMM, 3_000, 7_000, launched=100)
    trace.kernel(POINTWISE, 7_000, 11_000, launched=4_100)
    profile = _profiled(trace, tmp_path)
    assert profile.steps == (7, 8)
    assert (*profile.each_step_ms, profile.step_ms) == pytest.approx((4, 4, 4))
    assert _counted(profile) == pytest.approx({"dense_gemms": 2, "pointwise": 2})
    assert profile.idle.host_ms == pytest.approx(0)


def test_kernels_outside_the_steps_are_left_out(tmp_path: Path) -> None:
    trace = TraceFile().step(7, 10_000, 12_000)
    trace.kernel(GEMM, 8_000, 9_000, launched=7_900).kernel(GEMM, 10_000, 11_000, launched=10_000)
    # Of what runs over the beginning, only the part within it counts.
    trace.kernel(POINTWISE, 9_500, 10_500, launched=7_900)
    trace.kernel(GEMM, 12_500, 14_000, launched=12_400)
    # One that no rule knows.
    trace.kernel("colleagues_kernel", 11_000, 11_500, launched=10_000)
    profile = _profiled(trace, tmp_path)
    assert profile.step_ms == pytest.approx(2)
    assert _counted(profile) == pytest.approx({"dense_gemms": 1, "pointwise": 0, "other": 0.5})
    assert profile.categories["pointwise"].hidden_ms == pytest.approx(0.5)
    assert [kernel.name for kernel in profile.unknown] == ["colleagues_kernel"]


def test_a_gemms_share_of_the_peak_follows_from_its_shapes(tmp_path: Path) -> None:
    trace = TraceFile().step(7, 0, 10_000).step(8, 10_000, 20_000)
    half = ["c10::BFloat16", "c10::BFloat16"]
    trace.op("aten::mm", 0, 100, Input_Dims=[[4096, 2048], [2048, 1024]], Input_type=half)
    # Two kernels of one operation: its work counts once.
    trace.kernel(GEMM, 1_000, 1_040, launched=10)
    trace.kernel("void cublasLt::splitKreduce_kernel<32>", 1_040, 1_060, launched=20)
    # No shapes: its time is not part of the rate.
    trace.op("aten::bmm", 100, 200).kernel(GEMM, 2_000, 3_000, launched=110)
    grouped = [[8192, 2048], [4, 2048, 1408], [4]]
    trace.op("aten::_grouped_mm", 200, 300, Input_Dims=grouped, Input_type=[*half, "int"])
    trace.kernel(GROUPED, 3_000, 3_100, launched=210)
    profile = _profiled(trace, tmp_path)
    dense, experts = profile.gemms["dense_gemms"], profile.gemms["grouped_gemms"]
    work = 2 * 4096 * 2048 * 1024
    assert dense.tflops == pytest.approx(work / 60e-6 / 1e12)
    assert dense.peak_share == pytest.approx(work / 60e-6 / 989e12)
    assert (dense.ms, dense.known_ms) == pytest.approx((0.53, 0.03))
    assert experts.tflops == pytest.approx(2 * 8192 * 2048 * 1408 / 100e-6 / 1e12)


@pytest.mark.parametrize(
    ("operation", "dims", "kind", "flops", "bits"),
    [
        ("aten::addmm", [[64], [128, 32], [32, 64]], "BFloat16", 2 * 128 * 32 * 64, 16),
        ("aten::bmm", [[5, 128, 32], [5, 32, 64]], "float", 2 * 5 * 128 * 32 * 64, 32),
        # A weight gradient: the groups share the inner dimension out.
        ("aten::_grouped_mm", [[64, 1000], [1000, 32], [4]], "BFloat16", 2 * 64 * 1000 * 32, 16),
        ("aten::_scaled_grouped_mm", [[9, 8], [4, 8, 6]], "Float8_e4m3fn", 2 * 9 * 8 * 6, 8),
    ],
)
def test_flops_by_operation(
    tmp_path: Path, operation: str, dims: list[list[int]], kind: str, flops: float, bits: int
) -> None:
    trace = TraceFile(gpu="NVIDIA B200").step(7, 0, 100)
    types = [f"c10::{kind}"] * len(dims)
    trace.op(operation, 0, 10, Input_Dims=dims, Input_type=types)
    profile = _profiled(trace.kernel(GEMM, 20, 30, launched=5), tmp_path)
    (rate,) = profile.gemms.values()
    assert rate.tflops == pytest.approx(flops / 10e-6 / 1e12)
    peak = {16: 2250e12, 8: 4500e12}.get(bits)
    assert rate.peak_share == (pytest.approx(flops / 10e-6 / peak) if peak else None)


def test_a_cpus_operations_are_its_work(tmp_path: Path) -> None:
    trace = TraceFile(gpu=None).step(7, 0, 10_000)
    # 4 ms, of which 3 in the product itself; then gloo's thread while the main one waits.
    trace.op("aten::linear", 0, 4_000).op("aten::mm", 1_000, 4_000)
    trace.op("_c10d_functional::wait_tensor", 4_000, 8_000)
    trace.note("gloo:all_to_all", 5_000, 8_000, thread=AUTOGRAD)
    trace.op("aten::view", 5_100, 5_200, thread=AUTOGRAD)
    profile = _profiled(trace, tmp_path)
    assert not profile.on_gpu
    assert _counted(profile) == pytest.approx({"pointwise": 1, "dense_gemms": 3, "ep": 3})
    assert (profile.idle.host_ms, profile.idle.queued_ms) == pytest.approx((3, 0))
    assert profile.idle.causes_ms["_c10d_functional::wait_tensor"] == pytest.approx(1)


def _trace(rank: int = 3) -> TraceFile:
    trace = TraceFile(rank, world=8, pipeline=[3, 7], groups=[("mesh_ep", [0, 1, 2, 3])])
    trace.step(7, 0, 1_000).op("aten::mm", 10, 20)
    for number in range(50):
        trace.kernel(f"{GEMM}\t", 100 + 10 * number, 109.5 + 10 * number, launched=15)
    return trace


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_trace_is_read_plain_and_packed(tmp_path: Path, packed: bool, suffix: str) -> None:
    written = _trace().write(tmp_path / "written", packed)
    # A browser that unpacks what it downloads keeps the name.
    path = written.rename(tmp_path / f"rank3_trace.json{suffix}")
    # Names may hold characters that JSON would have escaped.
    if not packed:
        path.write_text(path.read_text().replace("\\t", "\t"))
    trace = read_trace(path)
    found = trace.header
    assert (found.rank, found.stage, found.gpu) == (3, 0, "NVIDIA H200")
    assert found.groups["mesh_ep"] == [0, 1, 2, 3]
    assert (len(trace.device.start), len(trace.host.start)) == (50, 1)
    assert trace.device.end[-1] == 599.5 and set(trace.device.launched) == {15}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON, or is truncated"),
        (b'{"traceEvents": []}', "holds no operation and no kernel; the profiler recorded nothing"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}', "PyTorch does not"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (
            b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"x","ts":1,"dur":0,"tid":1}]}',
            "covers no time; profile",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "rank0_trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        make_profile("x", [path])


COMBINE = "void deep_ep::intranode::combine<__nv_bfloat16, 4>(int4*)"


def _rank(rank: int, world: int, stages: int, compute: float) -> TraceFile:
    pipeline = [rank % (world // stages) + stage * (world // stages) for stage in range(stages)]
    trace = TraceFile(rank, world, pipeline=pipeline)
    trace.step(7, 0, 10_000).kernel(GEMM, 0, compute, launched=0)
    return trace.collective("allreduce", "default_pg", compute, 10_000, launched=0)


def _write(folder: Path, world: int, stages: int = 1) -> dict[int, Path]:
    for rank in range(world):
        _rank(rank, world, stages, 4_000 + 1_000 * (rank * 3 % 5)).write(folder)
    return folder_traces(folder)


def _ranks(paths: Sequence[Path]) -> list[int]:
    return [int(path.name.removeprefix("rank").partition("_")[0]) for path in paths]


def test_few_traces_are_all_read_and_of_many_some_at_even_distances(tmp_path: Path) -> None:
    few, many = _write(tmp_path / "few", 8, 2), _write(tmp_path / "many", 12, 2)
    assert _ranks(choose_ranks(few, None)) == [*range(8)]
    assert _ranks(choose_ranks(many, None)) == [*range(0, 12, 2)]
    assert _ranks(choose_ranks(many, "all")) == [*range(12)]
    assert _ranks(choose_ranks(many, "11, 2,2")) == [2, 11]


def test_the_newest_attempt_and_its_last_step_are_read(tmp_path: Path) -> None:
    cell = CellFolder(tmp_path / "cell")
    for attempt, step in ((0, 90), (1, 8), (1, 16), (1, 9)):
        folder = cell.path / f"attempt-{attempt}" / "profile_traces" / f"iteration_{step}"
        _rank(0, 1, 1, 1_000).write(folder)
    (cell.path / "attempt-2").mkdir()
    (trace,) = cell_traces(cell).values()
    assert trace.parts[-4:-1] == ("attempt-1", "profile_traces", "iteration_16")
    with pytest.raises(InputError, match="holds no trace"):
        folder_traces(cell.path / "attempt-2")


def test_unknown_kernels_and_missing_steps_are_told(tmp_path: Path) -> None:
    trace = TraceFile().kernel(GEMM, 0, 900).kernel("mystery", 900, 1_000)
    trace.write(tmp_path)
    text = render_text(make_profile("x", choose_ranks(folder_traces(tmp_path), None)), 120)
    assert "no ProfilerStep in the trace: the whole trace is counted as one step" in text
    assert ": 10.0% of the step is in kernels that no rule knows: mystery (0.1 ms); add" in text


def test_of_each_stage_the_first_the_slowest_and_the_fastest_are_shown(tmp_path: Path) -> None:
    traces = _write(tmp_path, 8, 2)
    profile = make_profile("x", choose_ranks(traces, None))
    # Compute by rank: 4, 7, 5, 8, 6, 4, 7, 5 ms.
    shown = [(rank.rank, said) for rank, said in profile.shown()]
    assert shown == [(0, "fastest"), (3, "slowest"), (4, ""), (6, "slowest"), (5, "fastest")]
    assert [rank.stage for rank, _ in profile.shown()] == [0, 0, 1, 1, 1]
    assert "stage 1, rank 6  slowest" in render_text(profile)
