"""The predicted step: what must hold whatever the facts are, and what was measured."""

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench.fits.step_times import compare, read_points
from cookbook.base.errors import InputError
from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell
from cookbook.config.dialect.names import DEGREES
from cookbook.predict.hardware import hardware_of, load_hardware
from cookbook.predict.step import StepTime, predict_step
from tests.check_cells import cell_of, with_options
from tests.predict_machine import FACTS, RATES, on_gpus

FLASH = {"model.attention": "flash_attention_4"}
HARDWARE = Path(__file__).resolve().parents[1] / "recipes/hardware"
CELLS = {
    "fast": cell_of("deepseek_v3_671b_fast", precision="mxfp8", ep_backend="deepep"),
    "16b": cell_of("deepseek_v3_16b", precision="mxfp8", ep_backend="mxfp8_a2a"),
    "TP, replicas": cell_of(
        "deepseek_v3_16b",
        {
            "parallelism.tensor_parallel_degree": 4,
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.expert_parallel_degree": 1,
        },
    ),
}

# With PyTorch's attention, and with FlashAttention-4 at heads of 128.
QWEN3 = [cell_of("qwen3_30b_a3b_32nodes", options) for options in ({}, FLASH)]


def step_of(cell: Cell, released: bool = False, **facts: Any) -> StepTime:
    hardware = dataclasses.replace(hardware_of(cell), **facts)
    return predict_step(cell, hardware=hardware, released=released)


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_has_a_unit_and_counts(fact: str) -> None:
    assert fact.endswith((*RATES, "_ms", "us_per_token", "_bytes", "_tokens", "ms_per_step")) or (
        fact == "host_ms_per_routed_layer"
    )
    float8 = cell_of("deepseek_v3_16b", {}, precision="float8", ep_backend="deepep")
    plain = cell_of("deepseek_v3_16b", {})
    deepep = cell_of("deepseek_v3_16b", {}, ep_backend="deepep")
    cells = [(cell, False) for cell in (*CELLS.values(), float8, plain, *QWEN3)]
    assert any(
        step_of(cell, released, **{fact: getattr(hardware_of(cell), fact) / 100})
        != step_of(cell, released)
        for cell, released in [*cells, (deepep, True)]
    )


@pytest.mark.parametrize("fact", [one for one in FACTS if "infiniband" in one])
def test_a_job_of_several_nodes_needs_all_facts_of_the_network(
    fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of("deepseek_v3_16b", {})
    missing: dict[str, Any] = {fact: None}
    known = dataclasses.replace(hardware_of(cell), **missing)
    monkeypatch.setattr("cookbook.predict.hardware.load_hardware", lambda path: known)
    with pytest.raises(InputError, match="says nothing of the network between nodes"):
        hardware_of(cell)


@pytest.mark.titan
def test_every_measured_point_is_predicted() -> None:
    compared = compare(read_points())
    known = [one for one in compared if one.error is not None and not one.point.note]
    assert len(known) >= 25
    errors = {f"{one.point.name} {one.point.documents}": abs(one.error or 0) for one in known}
    # At TP 2 without full recomputation the host sets the pace, which is not modelled.
    assert {name for name, error in errors.items() if error > 0.15} == {"fast-tp2 long"}, errors
    assert statistics.fmean(errors.values()) <= 0.08
    held_out = [one for one in known if not one.point.fitted]
    assert len(held_out) >= 10
    # Of two cells of a table and corpus that differ by over 10%, the faster is predicted so, but
    # for three pairs.
    pairs = [
        (one, other)
        for one, other in itertools.permutations(known, 2)
        if (one.point.group, one.point.documents, one.point.released)
        == (other.point.group, other.point.documents, other.point.released)
        and (one.point.measured or 0) > 1.1 * (other.point.measured or 0)
    ]
    assert len(pairs) >= 150
    wrong = {
        (one.point.name, other.point.name)
        for one, other in pairs
        if one.predicted.tokens_per_second_per_gpu <= other.predicted.tokens_per_second_per_gpu
    }
    assert wrong == {
        ("FlexAttention, none, batch 2", "fast-tp2"),
        ("TP 2, FlexAttention, full", "FlexAttention, full, standard"),
    }


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"compile.enable": False}, "not compiled"),
        ({"compile.components": ["loss"]}, "not compiled"),
        ({"training.enable_cpu_offload": True}, "CPU offload"),
        ({"training.mixed_precision_param": "float32"}, "FP32"),
        ({"parallelism.fsdp_reshard_after_forward": "always", DEGREES["pp"]: 2}, "each microbatch"),
        ({"optimizer.implementation": "foreach"}, "not fused"),
        ({"training.dataset_path": "/data/mine"}, "documents in /data/mine"),
        ({"model.flavor": "17B"}, "not counted"),
        ({DEGREES["pp"]: 2, "parallelism.pipeline_parallel_schedule": "a"}, "is not simu"),
    ],
)
def test_what_the_model_does_not_know_is_refused(options: dict[str, Any], word: str) -> None:
    cell = with_options(CELLS["16b"], {"training.dataset": "c4_test", **options})
    with pytest.raises(InputError, match=word):
        predict_step(cell)


def test_emulation_and_unknown_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="is emulated"):
        predict_step(on_gpus(4, precision="mxfp8"))
    plain = on_gpus(4)
    assert predict_step(plain).step_ms > 0
    for gpu, said in (
        (Gpu("GB10", 9.0, 80), r"nothing is known of the speed of a GB10.*b200.yaml"),
        (Gpu("NVIDIA H100 PCIe", 9.0, 80), r"nothing is known of the speed of a NVIDIA H100 PCIe"),
        # GB200 is not B200: another machine altogether.
        (Gpu("GB200", 10, 180), "GB200"),
        (None, "has no GPU"),
    ):
        other = dataclasses.replace(plain, cluster=dataclasses.replace(plain.cluster, gpu=gpu))
        with pytest.raises(InputError, match=said):
            predict_step(other)
    with pytest.raises(InputError, match="nothing of the network between nodes"):
        predict_step(dataclasses.replace(plain, nodes=2))


@pytest.mark.parametrize(
    "path", sorted(Path("recipes/hardware").glob("*.yaml")), ids=lambda p: p.stem
)
def test_shares_are_up_to_1(path: Path) -> None:
    shares = [getattr(load_hardware(path), name) for name in FACTS if name.endswith("share")]
    assert all(share <= 1 for share in shares if share)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("text_us_per_token", "text_us_a_token", "text_us_a_token.*text_us_per_token"),
        ("value: 4800", "value: -1", "memory_bandwidth_gb_per_s.value: .*above 0"),
        ("value: 4800", "value: true", "found true, allowed: a number"),
        ("value: 4800", "value: .nan", "found .*nan.*, allowed: a"),
        ('source: "data sheet"', 'source: ""', "source: found the text '', allowed: a text"),
        ("{value: 4800,", "{worth: 4800,", "memory_bandwidth_gb_per_s.worth: .*source, value"),
        ("nvlink_gb_per_s: {value: 450", "# {value: 450", "nvlink_gb_per_s: is missing"),
        ("gpu: H200", "", "gpu: is missing"),
    ],
)
def test_a_fact_that_is_wrong_is_named(old: str, new: str, found: str, tmp_path: Path) -> None:
    text = (HARDWARE / "h200.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=found):
        load_hardware(path)
