"""Several ranks' traces: which are read, which are shown, and who waited for whom."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.profile.profile import (
    HOST,
    QUEUED,
    Profile,
    cell_traces,
    choose_ranks,
    folder_traces,
    make_profile,
    render_svg,
    render_text,
    step_parts,
)
from cookbook.run.folder import CellFolder
from tests.traces import GEMM, TraceFile

SVG = "{http://www.w3.org/2000/svg}"
DEEPEP = "void deep_ep::intranode::combine<__nv_bfloat16, 4>(int4*)"


def _rank(rank: int, world: int, stages: int, compute: float) -> TraceFile:
    """Computes for `compute` us of 10 ms, then is in an all-reduce to the end."""
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


def _waited(profile: Profile, category: str) -> list[float]:
    assert all(waited is not None for waited in profile.waited)
    return [waited[category] for waited in profile.waited if waited is not None]


def test_few_traces_are_all_read_and_of_many_one_of_each_stage(tmp_path: Path) -> None:
    few, many = _write(tmp_path / "few", 8, 2), _write(tmp_path / "many", 12, 2)
    assert _ranks(choose_ranks(few, None)) == [*range(8)]
    assert _ranks(choose_ranks(many, None)) == [0, 6]
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


def test_of_each_stage_the_first_the_slowest_and_the_fastest_are_shown(tmp_path: Path) -> None:
    traces = _write(tmp_path, 8, 2)
    profile = make_profile("x", choose_ranks(traces, None))
    # Compute by rank: 4, 7, 5, 8, 6, 4, 7, 5 ms.
    shown = [(profile.ranks[index].rank, said) for index, said in profile.shown()]
    assert shown == [(0, "fastest"), (3, "slowest"), (4, ""), (6, "slowest"), (5, "fastest")]
    assert [profile.ranks[index].stage for index, _ in profile.shown()] == [0, 0, 1, 1, 1]
    text = render_text(profile)
    assert "stage 1, rank 6  slowest" in text


def test_the_last_rank_to_come_waits_for_nobody(tmp_path: Path) -> None:
    for rank, late in enumerate((4_000, 9_000)):
        trace = TraceFile(rank, 2).step(7, 0, 10_000).kernel(GEMM, 0, late, launched=0)
        trace.collective("allreduce", "default_pg", late, 10_000, launched=0).write(tmp_path)
    profile = make_profile("x", choose_ranks(folder_traces(tmp_path), None))
    # The last takes 1 ms, which is what the call costs; the first is in it for 6.
    assert _waited(profile, "reductions") == pytest.approx([5, 0])
    assert "5.0 for other ranks" in render_text(profile)


def test_the_nth_call_is_matched_with_the_nth_of_the_same_step(tmp_path: Path) -> None:
    # Each rank is late once: in step 7 the first, in step 8 the second.
    for rank, durations in enumerate(((1_000, 3_000), (4_000, 1_000))):
        trace = TraceFile(rank, 2)
        for index, duration in enumerate(durations):
            start = 10_000 * index
            trace.step(7 + index, start, start + 10_000)
            trace.kernel(DEEPEP, start, start + duration, launched=start)
        trace.write(tmp_path)
    profile = make_profile("x", choose_ranks(folder_traces(tmp_path), None))
    # Milliseconds a step, of two.
    assert _waited(profile, "ep") == pytest.approx([1, 1.5])


def test_the_longest_step_fills_the_picture_and_idle_time_is_told_apart(tmp_path: Path) -> None:
    for rank, end in enumerate((10_000, 5_000)):
        trace = TraceFile(rank, 2).step(7, 0, end).kernel(GEMM, 0, 2_000, launched=0)
        # Launched at once, and started a millisecond later; from then on nothing is launched.
        trace.kernel(GEMM, 3_000, 4_000, launched=2_000).write(tmp_path)
    traces = choose_ranks(folder_traces(tmp_path), None)
    profile = make_profile("x", traces)
    assert [{title: ms for title, _, ms in step_parts(rank) if ms} for rank in profile.ranks] == [
        {"dense GEMMs": 3.0, HOST: 6.0, QUEUED: 1.0},
        {"dense GEMMs": 3.0, HOST: 1.0, QUEUED: 1.0},
    ]
    texts = [node.text for node in ET.fromstring(render_svg(profile)).iter(f"{SVG}text")]
    assert [texts.count(text) for text in ("dense GEMMs", HOST, QUEUED, "3")] == [1, 1, 1, 2]
    assert {"rank 0 (fastest)", "rank 1 (slowest)"} <= {*texts}
