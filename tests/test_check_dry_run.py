"""Layouts, many of them wrong: check and TorchTitan agree on what can be built.

One subprocess builds them all; it is the one that `submit.py check` starts.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cookbook.check.check import Built, dry_run
from cookbook.config.cell import Cell
from cookbook.config.dialect.names import DEGREES
from cookbook.config.validate import validation_errors
from tests.check_cells import cell_of, cluster_of, with_options
from tests.waiting import until

pytestmark = pytest.mark.titan

MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
# TorchTitan builds these, and they fail in the first step: heads, experts and the hidden sizes that
# a degree does not divide are cut unevenly, and a batch of nothing is never looked at.
FAILS_LATER = {DEGREES["tp"], DEGREES["ep"], "training.seq_len"}


Build = Callable[[Cell], Built]


@pytest.fixture(scope="module")
def build() -> Iterator[Build]:
    with dry_run() as opened:
        yield opened


def debug_cell(world: int) -> Cell:
    """The debug model on one node of `world` B200."""
    cluster = dataclasses.replace(cluster_of("soperator-b200"), gpus_per_node=world, nodes=1)
    return cell_of("debug", {DEGREES["ep"]: 1}, cluster=cluster, nodes=1)


layouts = st.fixed_dictionaries(
    {
        DEGREES["pp"]: st.sampled_from([1, 1, 1, 2, 2, 4]),
        DEGREES["tp"]: st.sampled_from([1, 1, 2, 2, 3, 4]),
        DEGREES["cp"]: st.sampled_from([1, 1, 1, 2]),
        DEGREES["dp_replicate"]: st.sampled_from([1, 1, 1, 2]),
        DEGREES["dp_shard"]: st.sampled_from([-1, -1, -1, 1, 2, 4]),
        DEGREES["ep"]: st.sampled_from([1, 2, 2, 4, 8, 3]),
        DEGREES["etp"]: st.sampled_from([1, 1, 1, 2]),
        "parallelism.pipeline_parallel_schedule": st.sampled_from(
            ["1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble", "InterleavedZeroBubble", "1F2B"]
        ),
        "parallelism.pipeline_parallel_layers_per_stage": st.sampled_from(
            [None, None, None, 1, 2, 4]
        ),
        MICROBATCH: st.sampled_from([1, 1, 2, 3]),
        "training.local_batch_size": st.integers(1, 9),
        "training.global_batch_size": st.sampled_from([-1, -1, -1, 8, 12]),
        "training.seq_len": st.sampled_from([64, 64, 64, 96, 30]),
        "activation_checkpoint.mode": st.sampled_from(["none", "full", "selective"]),
        "compile.enable": st.booleans(),
    }
)


@pytest.mark.nightly
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(world=st.sampled_from([1, 2, 4, 8, 8, 16]), options=layouts)
def test_check_and_torchtitan_agree(build: Build, world: int, options: dict[str, Any]) -> None:
    cell = with_options(debug_cell(world), options)
    errors = validation_errors(cell)
    built = build(cell)
    assert not built.unavailable
    event(f"{'refused' if errors else 'allowed'}, {'built' if built.ranks else 'not built'}")
    if not errors:
        assert built.ranks, f"check allows what TorchTitan refuses: {built.failure}"
    elif built.ranks:
        assert {one.option for one in errors} <= FAILS_LATER, (
            f"check refuses what TorchTitan builds: {errors}"
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"training.seq_len": 8190, DEGREES["tp"]: 4}, "Sequence length 8190"),
        ({"optimizer.name": "Adagrad"}, "Adagrad"),
        ({"model.converters": ["quantize.nothing"]}, "quantize.nothing"),
        ({"model.flavor": "debugmodel_flex_attn", DEGREES["cp"]: 2}, "only supports SDPA"),
        ({"model.converters": ["quantize.grouped_mm.mx"]}, "fqns"),
    ],
)
def test_torchtitan_is_quoted(build: Build, options: dict[str, Any], words: str) -> None:
    built = build(with_options(debug_cell(8), options))
    failure = built.failure
    assert failure and words in failure["error"], failure
    assert not built.ranks
    assert failure["place"] or failure["kind"] == "SystemExit"


@pytest.mark.parametrize("precision", ["mxfp8", "mxfp8_linear", "float8"])
def test_the_build_has_the_clusters_gpu_and_a_stand_in(build: Build, precision: str) -> None:
    built = build(cell_of("deepseek_v3_16b", precision=precision, ep_backend="deepep"))
    assert built.ranks, built.failure
    notes = " ".join(built.noted("not_exercised"))
    assert "compute capability 10.0 was simulated" in notes and "DeepEP: a stand-in" in notes


def test_one_cell_leaves_nothing_for_the_next(build: Build) -> None:
    """Converters, DeepEP and layer counts change global state; each rank has its own process."""
    before = build(debug_cell(4)).ranks
    build(cell_of("deepseek_v3_16b", precision="mxfp8_linear", ep_backend="deepep"))
    assert build(debug_cell(4)).ranks == before


def _children(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children()}
    except psutil.NoSuchProcess:
        return set()


def test_an_interrupt_ends_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = _children(os.getpid())
    with pytest.raises(KeyboardInterrupt), dry_run() as opened:
        (pid,) = _children(os.getpid()) - before

        def build() -> None:
            # The folder with the subprocess's errors may be gone by then.
            with contextlib.suppress(FileNotFoundError):
                opened(cell_of("deepseek_v3_671b"))

        building = threading.Thread(target=build)
        building.start()
        until(lambda: _children(pid))
        ranks = _children(pid)
        raise KeyboardInterrupt
    building.join(20)
    assert not building.is_alive()
    until(lambda: not any(map(psutil.pid_exists, {pid, *ranks})))
    assert not list(tmp_path.iterdir())
