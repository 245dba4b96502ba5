"""`submit.py profile`: of traces that are there, and of a recipe that it trains on the CPU."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.made_up_run import Run
from tests.submit import ROOT, Answer, listing, submit
from tests.traces import GEMM, TraceFile

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


def _profile(answer: Answer) -> dict[str, Any]:
    assert (answer.status, answer.stderr) == (0, ""), answer
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


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
    assert [rank["rank"] for rank in _profile(answer)["ranks"]] == [0, 1]
    assert listing(runs) == before


def test_the_table_and_the_picture(runs: Path, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    answer = submit("profile", RUN, "--ranks", "1", "--figure", str(picture), runs=runs)
    assert (answer.status, answer.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    assert f"{RUN}/16b-bf16-deepep: step 7, NVIDIA H200" in lines
    assert "dense GEMMs 6.0 60.0%" in lines
    assert "all-reduce of norm, loss, counts, exposed 2.0 20.0%" in lines
    assert "step 10.0 100.0%" in lines
    assert ET.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{RUN}/16b-bf16-standard"], "left no trace"),
        ([f"{RUN}/16b"], "unknown cell '16b'"),
        ([RUN, "--ranks", "7"], "--ranks: found '7', allowed: all, or some of 0, 1"),
        ([RUN, "--nodes", "2"], f"--nodes: {RUN} is no recipe"),
        ([RUN, "--figure", "x.png"], "--figure: found 'x.png', allowed: a file that ends with"),
        ([RUN, "--figure", "/nowhere/x.svg"], "--figure: /nowhere is no folder"),
        (
            ["debug", "--set", "training.steps=3"],
            "--set training.steps: profiling.profile_freq: found 3, allowed: 5 and up",
        ),
        (
            ["debug", "--set", "profiling.profile_freq=9"],
            "--set profiling.profile_freq: found 9, allowed: 5 to 8",
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
    (rank,) = _profile(submit("profile", other, "--json", runs=runs))["ranks"]
    assert rank["rank"] == 1


@pytest.mark.nightly
@pytest.mark.titan
@pytest.mark.parametrize("recipe", ["debug", "qwen3_debug"])
def test_a_recipe_is_trained_and_profiled(recipe: str, tmp_path: Path) -> None:
    if not (ROOT / "assets/local/stamp.json").exists():
        command = [sys.executable, "-m", "cookbook.install.corpus", "assets/local"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    small = ["training.seq_len=64", "training.steps=3", "profiling.profiler_warmup=1"]
    words = [word for setting in small for word in ("--set", setting)]
    answer = submit(
        *["profile", recipe, "--cluster", "local", "--json", *words],
        runs=tmp_path,
        variables={"CUDA_VISIBLE_DEVICES": ""},
        timeout=280,
    )
    assert answer.status == 0, answer
    # Progress is said elsewhere than the profile.
    assert "step 3/3" in answer.stderr
    found = json.loads(answer.stdout)
    assert (found["on_gpu"], found["device"]) == (False, "CPU")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["steps"] == [1, 2]
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
