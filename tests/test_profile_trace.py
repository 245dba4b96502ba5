"""Reading trace files: whole, packed, cut, broken, and larger than one block."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.profile import json_stream
from cookbook.profile.json_stream import TraceStream
from cookbook.profile.trace import read_trace
from tests.traces import GEMM, TraceFile


def _trace() -> TraceFile:
    trace = TraceFile(rank=3, world=8, pipeline=[3, 7], groups=[("mesh_ep", [0, 1, 2, 3])])
    trace.step(7, 0, 1_000).op("aten::mm", 10, 20)
    for number in range(50):
        trace.kernel(GEMM, 100 + 10 * number, 109.5 + 10 * number, launched=15)
    return trace


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_read_plain_and_packed(tmp_path: Path, packed: bool) -> None:
    trace = read_trace(_trace().write(tmp_path, packed))
    assert (trace.rank, trace.stage, trace.gpu) == (3, 0, "NVIDIA H200")
    assert trace.group_ranks("mesh_ep") == [0, 1, 2, 3]
    assert (len(trace.device), len(trace.host)) == (50, 1)
    assert trace.device.end[-1] == 599.5


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
def test_blocks_may_end_anywhere(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "_BLOCK", block)
    path = tmp_path / "rank0_trace.json"
    content = {
        "first": [1.5, {"a": None}],
        "traceEvents": [
            {"name": 'quote " and \\ and ü', "ts": 123456.789, "dur": -1e-3, "args": {"x": [[]]}},
            {"name": "]}", "ts": 1},
        ],
        "number": 1234567,
        "last": "x",
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    stream = TraceStream(path)
    assert list(stream.events()) == content["traceEvents"]
    assert stream.header == {name: content[name] for name in ("first", "number", "last")}


def test_names_may_hold_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "rank0_trace.json"
    path.write_text('{"traceEvents": [{"name": "a\tb\nc"}]}')
    assert list(TraceStream(path).events()) == [{"name": "a\tb\nc"}]


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "_BLOCK", 4096)
    path = tmp_path / "rank0_trace.json"
    events = ",".join(json.dumps({"name": "x" * 100, "ts": number}) for number in range(5_000))
    path.write_text(f'{{"traceEvents": [{events}]}}')
    stream = TraceStream(path)
    most = 0
    for _ in stream.events():
        most = max(most, len(stream._text))
    assert path.stat().st_size > 500_000 and most < 2 * 4096 + 200


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.9, 0.995])
def test_a_trace_that_was_not_written_to_its_end_is_refused(
    tmp_path: Path, packed: bool, part: float
) -> None:
    path = _trace().write(tmp_path, packed)
    whole = path.read_bytes()
    path.write_bytes(whole[: math.floor(len(whole) * part)])
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert path.name in error.value.place and "\n" not in str(error.value)
    assert "ends too early" in str(error.value) or "cannot be read" in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"   \n", "ends too early"),
        (b"[]", "holds no JSON object"),
        (b"{}", "has no traceEvents"),
        (b'{"a": 1}', "has no traceEvents"),
        (b'{"traceEvents": 7}', "traceEvents is no list"),
        (b'{"traceEvents": [1 2]}', "is not JSON"),
        (b'{"traceEvents": [{"a": nonsense, "b": 123456789012345678901234567890}]}', "is not JSON"),
        (b'{"traceEvents": []', "ends too early"),
        (b'{"traceEvents": []}', "holds no operation and no kernel"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}', "none of PyTorch's"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": "soon"}]}', "none of"),
        (b"\xff\xfe\x00", "is not text"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (b'{"traceEvents": ' + b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "rank0_trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).count("rank0_trace.json") >= 1


def test_a_rank_that_the_trace_does_not_name_is_its_files(tmp_path: Path) -> None:
    trace = _trace()
    del trace.header["distributedInfo"]
    read = read_trace(trace.write(tmp_path))
    assert (read.rank, read.stage) == (3, None)


def test_a_later_stage_is_its_place_in_the_pipelines_group(tmp_path: Path) -> None:
    trace = TraceFile(rank=7, world=8, pipeline=[3, 7]).kernel(GEMM, 0, 1)
    assert read_trace(trace.write(tmp_path)).stage == 1
