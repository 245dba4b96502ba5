"""The predicted step: what must hold whatever the facts are, and what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.step_times import Comparison, compare, read_points
from cookbook.base.errors import InputError
from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell
from cookbook.predict.facts import Documents, hardware_of, load_hardware
from cookbook.predict.step import StepTime, predict_step
from tests.check_cells import cell_of, h200, with_options
from tests.predict_machine import FACTS, RATES

MODE = "activation_checkpoint.mode"
SELECTIVE = {MODE: "selective", "activation_checkpoint.selective_ac_option": "op"}
SAVES = "activation_checkpoint.op_sac_save_list"
BATCH = "training.local_batch_size"
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


def step_of(cell: Cell, **facts: Any) -> StepTime:
    return predict_step(cell, hardware=dataclasses.replace(hardware_of(cell), **facts))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(list(CELLS)),
    fact=st.sampled_from(FACTS),
    factor=st.floats(1.01, 50.0),
)
def test_more_speed_is_never_slower(name: str, fact: str, factor: float) -> None:
    cell = CELLS[name]
    if fact == "host_ms_per_routed_layer":
        # With a host that is much slower, the cell is refused.
        factor = min(factor, 2.0)
    before = step_of(cell)
    after = step_of(cell, **{fact: getattr(hardware_of(cell), fact) * factor})
    if fact.endswith(RATES):
        assert after.step_ms <= before.step_ms * (1 + 1e-9)
    else:
        assert after.step_ms >= before.step_ms * (1 - 1e-9)


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_has_a_unit_and_counts(fact: str) -> None:
    assert fact.endswith((*RATES, "_ms", "us_per_token", "_bytes", "_tokens", "ms_per_step")) or (
        fact == "host_ms_per_routed_layer"
    )
    float8 = cell_of("deepseek_v3_16b", {}, precision="float8", ep_backend="deepep")
    plain = cell_of("deepseek_v3_16b", {})
    released = dataclasses.replace(
        cell_of("deepseek_v3_16b", {}, ep_backend="deepep"), hooks="none"
    )
    cells = [*CELLS.values(), float8, plain, released]
    changed = [
        step_of(cell, **{fact: getattr(hardware_of(cell), fact) / 100}).step_ms for cell in cells
    ]
    assert changed != [step_of(cell).step_ms for cell in cells]


@settings(deadline=None, max_examples=15)
@given(
    name=st.sampled_from(list(CELLS)),
    batch=st.sampled_from([4, 8, 16]),
    mean=st.floats(50, 20_000),
    ratio=st.floats(1.05, 4),
)
def test_no_term_is_negative_and_they_add_up(
    name: str, batch: int, mean: float, ratio: float
) -> None:
    cell = with_options(CELLS[name], {BATCH: batch})
    step = predict_step(cell, documents=Documents(mean, mean / ratio, "drawn"))
    assert min(step.terms_ms.values()) > 0
    assert sum(step.terms_ms.values()) == pytest.approx(step.step_ms)
    assert 0 <= step.recompute_ms < step.step_ms
    tokens = batch * cell.options["training.seq_len"] / cell.layout.tp
    assert step.tokens_per_gpu == tokens
    assert step.tokens_per_second_per_gpu == pytest.approx(1000 * tokens / step.step_ms)
    larger = predict_step(with_options(cell, {BATCH: 2 * batch}))
    assert larger.step_ms > predict_step(cell).step_ms


def test_what_is_computed_again_takes_its_time() -> None:
    cell = with_options(CELLS["fast"], FLASH)
    saved = ["attention", "communication"]
    modes: list[dict[str, Any]] = [
        {MODE: "none"},
        {**SELECTIVE, SAVES: [*saved, "grouped_mm"]},
        {**SELECTIVE, SAVES: saved},
        {**SELECTIVE, SAVES: ["attention"]},
        {MODE: "full"},
    ]
    overlapped = [predict_step(with_options(cell, mode)).step_ms for mode in modes]
    assert overlapped == sorted(set(overlapped))
    # Where each exchange is waited for at once, what is sent hides under nothing that is repeated.
    steps = [predict_step(with_options(cell, mode), overlapped=False) for mode in modes]
    times = [step.step_ms for step in steps]
    assert times == sorted(set(times))
    assert steps[0].recompute_ms == 0
    # What is saved is not done again; the rest is.
    again = [step.recompute_ms for step in steps]
    # Of FSDP's exchanges a longer backward hides more.
    fsdp = [step.terms_ms["FSDP, exposed"] for step in steps]
    assert times[-1] - times[0] == pytest.approx(again[-1] + fsdp[-1] - fsdp[0])
    for kind, first, last in (("EP, exposed", 2, 3), ("attention", 0, 3), ("grouped GEMMs", 1, 2)):
        left, right = steps[first].terms_ms[kind], steps[last].terms_ms[kind]
        assert (left == right) is (kind == "attention"), kind
    every_second = {
        **SELECTIVE,
        "activation_checkpoint.selective_ac_option": "2",
    }
    half = predict_step(with_options(cell, every_second), overlapped=False)
    # 29 of the 58 layers with experts; and one of the three without.
    gemms = [step.terms_ms["grouped GEMMs"] for step in (steps[0], half, steps[-1])]
    assert gemms[1] == pytest.approx((gemms[0] + gemms[2]) / 2)
    assert again[-1] / 3 < half.recompute_ms < again[-1] / 2
    budget = with_options(cell, {MODE: "memory_budget", "activation_checkpoint.memory_budget": 0.5})
    assert 0 < predict_step(budget, overlapped=False).recompute_ms < again[-1] / 2


def test_deepep_waits_for_less_beside_compute() -> None:
    cell = with_options(CELLS["fast"], FLASH)
    waits = [
        predict_step(with_options(cell, {"deepep.num_chunks": chunks})).terms_ms["EP, exposed"]
        for chunks in (1, 2)
    ]
    at_once = predict_step(cell, overlapped=False).terms_ms["EP, exposed"]
    assert 0 < waits[1] < 0.8 * waits[0] < 0.8 * 0.8 * at_once
    # The recipe computes again, and under that the first gradients travel.
    none = predict_step(with_options(cell, {MODE: "none", SAVES: []}))
    assert waits[1] < none.terms_ms["EP, exposed"]
    # In many chunks weights are read, and their gradients added, as often.
    steps = [predict_step(with_options(cell, {"deepep.num_chunks": n})).step_ms for n in (2, 16)]
    assert steps[0] < steps[1]
    standard = cell_of("deepseek_v3_671b_fast", precision="mxfp8", ep_backend="standard")
    released = dataclasses.replace(cell, hooks="none")
    for one in (standard, released):
        assert predict_step(one).terms_ms == predict_step(one, overlapped=False).terms_ms


def test_scored_activations_leave_less_to_do_again() -> None:
    scored = {"deepep.score_activations": True}
    for options, less in (
        # Two products of three again; nothing where they are saved; the way back.
        ({MODE: "full", SAVES: []}, {"grouped GEMMs": 11 / 12, "EP, exposed": 1}),
        ({SAVES: ["communication"]}, {"grouped GEMMs": 11 / 12}),
        ({SAVES: ["communication", "grouped_mm"]}, {"grouped GEMMs": 1}),
        ({MODE: "none", SAVES: []}, {"grouped GEMMs": 1}),
    ):
        cell = cell_of("deepseek_v3_16b", FLASH | SELECTIVE | options, ep_backend="deepep")
        steps = [predict_step(one, overlapped=False) for one in (cell, with_options(cell, scored))]
        assert steps[1].step_ms < steps[0].step_ms
        for kind in ("grouped GEMMs", "EP, exposed", "moving rows"):
            ratio = steps[1].terms_ms[kind] / steps[0].terms_ms[kind]
            if less.get(kind) == 1 and kind == "EP, exposed":
                # Six exchanges were five and a half of two kinds.
                assert 0.7 < ratio < 0.95
            elif kind in less:
                assert ratio == pytest.approx(less[kind], rel=1e-3), (options, kind)
        assert steps[1].terms_ms["moving rows"] < 0.9 * steps[0].terms_ms["moving rows"]
    standard = cell_of("deepseek_v3_16b", ep_backend="standard")
    assert predict_step(standard) == predict_step(with_options(standard, scored))


def test_the_fast_recipe_is_predicted_far_above_the_published_best() -> None:
    assert predict_step(CELLS["fast"]).tokens_per_second_per_gpu > 2.8 * 918


def test_quantizing_costs_and_pays() -> None:
    cells = {
        precision: cell_of("deepseek_v3_671b_fast", precision=precision, ep_backend="deepep")
        for precision in ("bf16", "mxfp8", "mxfp8_wgrad_hp", "mxfp8_linear")
    }
    steps = {name: predict_step(cell) for name, cell in cells.items()}
    assert "quantizing" not in steps["bf16"].terms_ms
    grouped = {name: step.terms_ms["grouped GEMMs"] for name, step in steps.items()}
    assert grouped["mxfp8"] < grouped["mxfp8_wgrad_hp"] < grouped["bf16"]
    # The dense layers change where linear layers are converted, and only those not filtered out.
    dense = {name: step.terms_ms["dense GEMMs"] for name, step in steps.items()}
    assert dense["mxfp8_linear"] < dense["mxfp8"] == dense["bf16"]
    assert dense["mxfp8_linear"] > 0.7 * dense["bf16"]


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    return list(compare(read_points()))


@pytest.mark.titan
def test_every_measured_point_is_predicted(comparisons: list[Comparison]) -> None:
    known = [one for one in comparisons if one.error is not None and not one.point.note]
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
        ("in turn: fast, FP8, DeepEP", "dep-batch8"),
        ("FlexAttention, none, batch 2", "fast-tp2"),
        ("TP 2, FlexAttention, full", "FlexAttention, full, standard"),
    }


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"parallelism.context_parallel_degree": 2}, "context parallelism"),
        ({"compile.enable": False}, "not compiled"),
        ({"compile.components": ["loss"]}, "not compiled"),
        ({"training.enable_cpu_offload": True}, "CPU offload"),
        ({"optimizer.implementation": "foreach"}, "not fused"),
        ({"training.dataset_path": "/data/mine"}, "documents of /data/mine"),
        ({"model.flavor": "17B"}, "not counted"),
    ],
)
def test_what_the_model_does_not_know_is_refused(options: dict[str, Any], word: str) -> None:
    cell = with_options(CELLS["16b"], {"training.dataset": "c4_test", **options})
    with pytest.raises(InputError, match=word):
        predict_step(cell)


def test_emulation_and_unknown_gpus_are_refused(tmp_path: Path) -> None:
    node = h200(tmp_path)
    options = {"parallelism.expert_parallel_degree": 4}
    emulated = cell_of("deepseek_v3_16b", options, cluster=node, precision="mxfp8")
    with pytest.raises(InputError, match="is emulated"):
        predict_step(emulated)
    plain = cell_of("deepseek_v3_16b", options, cluster=node)
    assert predict_step(plain).step_ms > 0
    other = dataclasses.replace(plain, cluster=dataclasses.replace(node, gpu=Gpu("H100", 9.0, 80)))
    with pytest.raises(InputError, match=r"nothing is known of the speed of a H100.*b200.yaml"):
        predict_step(other)
    # GB200 is not B200: another machine altogether.
    other = dataclasses.replace(plain, cluster=dataclasses.replace(node, gpu=Gpu("GB200", 10, 180)))
    with pytest.raises(InputError, match="GB200"):
        predict_step(other)
    none = dataclasses.replace(plain, cluster=dataclasses.replace(node, gpu=None))
    with pytest.raises(InputError, match="has no GPU"):
        predict_step(none)
    with pytest.raises(InputError, match="nothing of the network between nodes"):
        predict_step(dataclasses.replace(plain, nodes=2))


@pytest.mark.parametrize(
    "path", sorted(Path("recipes/hardware").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_fact_has_a_source(path: Path) -> None:
    hardware = load_hardware(path)
    assert all(hardware.sources[name] for name in hardware.sources)
    between = {name for name in FACTS if "infiniband" in name}
    assert set(hardware.sources) | between == set(FACTS)
    shares = [getattr(hardware, name) for name in hardware.sources if name.endswith("share")]
    assert all(0 < share <= 1 for share in shares)


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
