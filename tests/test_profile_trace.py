"""Reading trace files: plain and packed, their header, and files that are no whole trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.profile.trace import read_header, read_trace
from tests.traces import GEMM, TraceFile


def _trace(rank: int = 3) -> TraceFile:
    trace = TraceFile(rank, world=8, pipeline=[3, 7], groups=[("mesh_ep", [0, 1, 2, 3])])
    trace.step(7, 0, 1_000).op("aten::mm", 10, 20)
    for number in range(50):
        trace.kernel(f"{GEMM}\t", 100 + 10 * number, 109.5 + 10 * number, launched=15)
    return trace


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_read_plain_and_packed(tmp_path: Path, packed: bool) -> None:
    path = _trace().write(tmp_path, packed)
    # Names may hold characters that JSON would have escaped.
    if not packed:
        path.write_text(path.read_text().replace("\\t", "\t"))
    trace, header = read_trace(path), read_header(path)
    for found in (trace.header, header):
        assert (found.rank, found.stage, found.gpu) == (3, 0, "NVIDIA H200")
        assert found.group_ranks("mesh_ep") == [0, 1, 2, 3]
    assert (len(trace.device.start), len(trace.host.start)) == (50, 1)
    assert trace.device.end[-1] == 599.5 and set(trace.device.launched) == {15}


def test_without_a_record_the_rank_is_the_files(tmp_path: Path) -> None:
    trace = _trace()
    del trace.header["distributedInfo"]
    header = read_trace(trace.write(tmp_path)).header
    assert (header.rank, header.stage) == (3, None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("part", [0.3, 0.995])
def test_a_cut_trace_is_refused(tmp_path: Path, packed: bool, part: float) -> None:
    path = _trace().write(tmp_path, packed)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert path.name in error.value.place and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON, or was cut"),
        (b"[]", "has no traceEvents"),
        (b'{"traceEvents": []}', "holds no operation and no kernel"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}', "PyTorch does not"),
        (b"\x1f\x8bnonsense", "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "rank0_trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_trace(path)
