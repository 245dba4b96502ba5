"""What a plan ranks, counts, writes and draws, from layouts whose speed and memory are made up."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.dom.minidom
from pathlib import Path

import pytest

from cookbook.base.gpus import Gpu
from cookbook.base.paths import RECIPES
from cookbook.config.cell import Cell
from cookbook.config.options import Setting
from cookbook.config.recipe import load_recipe
from cookbook.plan import search as searching
from cookbook.plan.explain import walk
from cookbook.plan.figure import render_svg
from cookbook.plan.recipe_file import render_recipe
from cookbook.plan.report import as_mapping, published_lines, render_json, render_text
from cookbook.plan.search import FITS, TIGHT, TOO_LARGE, Candidate, Found, evaluate
from cookbook.plan.space import space_of
from cookbook.predict.documents import C4
from cookbook.predict.memory import StageMemory
from cookbook.predict.step import StepTime
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

TP, PP, EP = (f"parallelism.{word}_parallel_degree" for word in ("tensor", "pipeline", "expert"))
BATCH = "training.local_batch_size"
CELL = on_gpus(4)
NAMED = {"precision": "bf16", "ep_backend": "standard"}


def candidate(
    speed: float, gib: float, verdict: str = FITS, cell: Cell = CELL, **terms: float
) -> Candidate:
    """A layout of that many tokens/s/GPU; of its step's 100 ms half is dense GEMMs, by default."""
    shares = terms or {"dense GEMMs": 50.0, "EP, exposed": 30.0, "pipeline bubble": 20.0}
    step = StepTime(0, shares, 0.0, tokens_per_gpu=speed * sum(shares.values()) / 1000)
    memory = StageMemory(0, "the loss", {"activations": gib - 1, "parameters": 1.0}, 0.0)
    return Candidate(cell, memory, verdict, step if verdict == FITS else None)


ALL = [(90, 40), (100, 50), (80, 40), (95, 60), (70, 30)]
FOUND = Found([candidate(speed, gib) for speed, gib in ALL])


def places(found: list[Candidate]) -> list[tuple[float, float]]:
    return [
        (round(one.step.tokens_per_second_per_gpu), round(one.memory.total))
        for one in found
        if one.step
    ]


def test_the_fastest_come_first_and_the_front_has_what_none_beats() -> None:
    assert places(FOUND.ranked()) == [(100, 50), (95, 60), (90, 40), (80, 40), (70, 30)]
    assert places(FOUND.front()) == [(100, 50), (90, 40), (70, 30)]


def test_the_stage_that_needs_most_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CELL.cluster.gpu
    assert gpu
    for totals, verdict in (((0.1, 0.9), FITS), ((0.9, 1.0), TIGHT), ((1.2, 0.3), TOO_LARGE)):
        monkeypatch.setattr(searching, "describe_ranks", lambda cell, totals=totals: totals)
        monkeypatch.setattr(
            searching,
            "predict_memory",
            lambda cell, part: candidate(1, part * gpu.memory_gib).memory,
        )
        monkeypatch.setattr(searching, "predict_step", lambda *_: FOUND.candidates[0].step)
        one = evaluate(CELL)
        assert one.memory.total == pytest.approx(max(totals) * gpu.memory_gib)
        assert one.verdict == verdict
        # Only what fits well is timed.
        assert (one.step is not None) is (verdict == FITS)


def combinations(*vary: str, base: Cell = CELL, **overlays: str) -> list[Cell]:
    words = [f"{TP}=1", f"{EP}=4", *vary]
    return list(space_of(base, words, {}, NAMED | overlays).cells())


def test_the_recipes_own_batch_is_tried_beside_the_usual_ones() -> None:
    own = with_options(CELL, {BATCH: 24})
    pipelined = space_of(own, [f"{TP}=1", f"{EP}=2", f"{PP}=2"], {}, NAMED).cells()
    assert {cell.options[BATCH] for cell in pipelined} == {24, 32, 64, 128}
    assert {cell.options[BATCH] for cell in combinations(f"{PP}=1", base=own)} == {1, 2, 4, 8, 16}


def test_stages_are_interleaved_by_layers_where_they_come_out() -> None:
    def ways(pp: int) -> set[tuple[str, int | None]]:
        words = [f"{TP}=1", f"{EP}=1", f"{PP}={pp}", f"{BATCH}=64"]
        names = [
            f"parallelism.pipeline_parallel_{word}" for word in ("schedule", "layers_per_stage")
        ]
        cells = space_of(on_gpus(8), words, {}, NAMED).cells()
        return {(cell.options[names[0]], cell.options[names[1]]) for cell in cells}

    # 27 layers and both ends: 4 stages of 8, 8 of 4; on 8 ranks neither 16 nor 32 come out.
    assert ways(2) == {("1F1B", None), ("Interleaved1F1B", 8), ("Interleaved1F1B", 4)}
    assert ways(8) == {("1F1B", None), ("Interleaved1F1B", None)}


def test_what_the_user_varies_is_left_to_him() -> None:
    varied = combinations(f"{PP}=1", "loss.num_chunks=0,4", "model.attention=flavor")
    assert {cell.options["loss.num_chunks"] for cell in varied} == {0, 4}
    assert {cell.options["model.attention"] for cell in varied} == {"flavor"}
    assert {cell.options["loss.num_chunks"] for cell in combinations(f"{PP}=1")} == {8}


@pytest.mark.parametrize(("capability", "kind"), [(8.0, "flavor"), (9.0, "flash_attention_4")])
def test_flash_attention_is_tried_where_there_are_kernels(capability: float, kind: str) -> None:
    cluster = dataclasses.replace(CELL.cluster, gpu=Gpu("a GPU", capability, 80))
    found = combinations(f"{PP}=1", base=dataclasses.replace(CELL, cluster=cluster))
    assert {cell.options["model.attention"] for cell in found} == {kind}


def test_another_precision_keeps_what_was_set() -> None:
    asked = {"training.seq_len": Setting(4096, "--set training.seq_len")}
    base = dataclasses.replace(CELL, options=CELL.options.override(asked))
    found = combinations(f"{PP}=1", f"{BATCH}=4", "precision=bf16,float8", base=base)
    assert {cell.precision.name for cell in found} == {"bf16", "float8"}
    assert {cell.options["training.seq_len"] for cell in found} == {4096}


def test_a_recipe_says_where_it_runs_and_what_limits_it() -> None:
    planned = dataclasses.replace(cell_of("deepseek_v3_671b", nodes=32), nodes=16)
    base = cell_of("deepseek_v3_671b")
    text = render_recipe("mine", candidate(123.4, 56.7, cell=planned), base)
    assert "\nnodes: 16\n" in text
    assert "# 123 tokens/s/GPU, 57 GiB a GPU, limited by dense GEMMs (50% of a step).\n" in text
    assert "stand_in" in text
    # Nothing differs, so no line says what the recipe had.
    assert not re.search(r"# deepseek_v3_671b: ", text)
    changed = with_options(planned, {BATCH: 17})
    text = render_recipe("mine", candidate(1, 2, cell=changed), base)
    assert re.findall(r"# deepseek_v3_671b: .*\n +(\w+: .*)", text) == ["local_batch_size: 17"]


def test_a_layout_for_programs() -> None:
    slow, fast = candidate(100, 50), candidate(250, 40.04)
    found = as_mapping(fast, slow)
    assert (found["tokens_per_second_per_gpu"], found["times_the_recipe"]) == (250, 2.5)
    assert (found["step_ms"], found["exposed_ms"], found["bubble_ms"]) == (100, 30, 20)
    assert (found["memory_gib"], found["memory_largest"]) == (40.0, "activations")
    # 25 tokens a GPU on four of them.
    assert found["tokens_per_step"] == 100
    assert fast.times(None) is candidate(1, 1, TIGHT).times(slow) is None
    unknown = as_mapping(candidate(1, 200, TOO_LARGE), slow)
    assert {unknown[key] for key in ("step_ms", "tokens_per_step", "exposed_ms")} == {None}


def test_the_table_has_shares_of_the_step_and_counts_every_layout() -> None:
    found = Found([*FOUND.candidates, candidate(1, 150, TIGHT)], larger=3)
    found.candidates += [candidate(1, 200, TOO_LARGE)] * 2
    text = render_text(found, CELL, candidate(50, 70), 2, C4, 40)
    assert "11 of 40 layouts; 5 fit, 1 are tight, 5 do not fit" in text
    rows = [line.split() for line in text.splitlines() if re.match(r" *(recipe|[0-9]) ", line)]
    assert [row[0] for row in rows] == ["recipe", "1", "2"]
    assert rows[1][1:3] == ["100", "2.00x"]
    assert rows[1][-5:] == ["30%", "20%", "dense", "GEMMs", "(50%)"]
    content = json.loads(render_json(found, CELL, candidate(50, 70), 2, None))
    assert content["layouts"] == {"looked_at": 11, "fit": 5, "tight": 1, "too_large": 5}
    assert [one["tokens_per_second_per_gpu"] for one in content["best"]] == [100, 95]
    assert len(content["front"]) == 3


def test_the_best_is_held_to_what_was_published() -> None:
    base = cell_of("deepseek_v3_671b")
    lines = published_lines(base, [candidate(1302, 50)])
    assert lines[0] == (
        "published bf16+standard: 651 tokens/s/GPU; the first is predicted at 2.00x"
    )
    assert published_lines(base, []) == published_lines(CELL, [candidate(1, 1)]) == []


def test_a_walk_goes_on_to_its_end_past_what_the_rules_refuse() -> None:
    start = on_gpus(8, {TP: 8, EP: 1})
    end = on_gpus(8, {TP: 1, EP: 8, BATCH: 2})
    stops = walk(start, end, C4).stops
    # At EP 8 and TP 8 nothing would be left to FSDP.
    assert [stop.changed for stop in stops] == ["from", "TP", "EP", "pipeline and batch"]
    back = walk(end, start, C4).stops
    assert [stop.changed for stop in back] == ["from", "TP + EP", "pipeline and batch"]
    for stop, cell in ((stops[-1], end), (back[-1], start)):
        assert stop.step == evaluate(cell, C4).step
    large = on_gpus(8, {TP: 1, EP: 8, BATCH: 64, "activation_checkpoint.mode": "none"})
    fits = [stop.fits for stop in walk(end, large, C4).stops]
    assert (fits[0], fits[-1]) == (True, False)


def test_overlays_change_on_the_way_and_the_rest_behind_them() -> None:
    end = on_gpus(4, {BATCH: 2}, precision="float8", ep_backend="deepep")
    first, second, third = walk(CELL, end, C4).stops
    names = [stop.changed for stop in (first, second, third)]
    assert names == ["from", "precision and EP backend", "pipeline and batch"]
    between = on_gpus(4, precision="float8", ep_backend="deepep")
    assert second.step == evaluate(between, C4).step
    assert third.step == evaluate(end, C4).step
    assert "quantizing" in second.step.terms_ms


def test_a_picture_has_memory_to_the_right_speed_upwards_and_the_card() -> None:
    document = xml.dom.minidom.parseString(render_svg(FOUND, CELL, candidate(50, 70)))
    groups = {one.getAttribute("id"): one for one in document.getElementsByTagName("g")}

    def at(gid: str) -> list[tuple[float, float]]:
        marks = groups[gid].getElementsByTagName("use")
        return [(float(one.getAttribute("x")), float(one.getAttribute("y"))) for one in marks]

    by_place = dict(zip(places(FOUND.ranked()), at("layouts"), strict=True))
    assert len({x for x, _ in by_place.values()}) == 4
    x_scale = (by_place[95, 60][0] - by_place[70, 30][0]) / 30
    y_scale = (by_place[100, 50][1] - by_place[70, 30][1]) / 30
    assert x_scale > 0 > y_scale
    for (speed, gib), (x, y) in by_place.items():
        assert x - by_place[70, 30][0] == pytest.approx(x_scale * (gib - 30), abs=0.1)
        assert y - by_place[70, 30][1] == pytest.approx(y_scale * (speed - 70), abs=0.1)
    assert at("front") == [by_place[one] for one in places(FOUND.front())]
    assert len(at("recipe")) == 1
    # A line at the card's memory, on the same axis.
    (path,) = groups["card"].getElementsByTagName("path")
    start, end = re.findall(r"[ML] ([\d.]+) ", path.getAttribute("d"))
    assert start == end
    card = by_place[70, 30][0] + x_scale * (139.8 - 30)
    assert float(start) == pytest.approx(card, abs=0.1)
    assert 'id="recipe"' not in render_svg(Found(), CELL, None)


def test_a_planned_recipe_keeps_what_the_recipe_says_beside_options(tmp_path: Path) -> None:
    """But for what was published, which was not of this layout."""
    text = (RECIPES / "deepseek_v3_671b.yaml").read_text()
    own = {"spare_nodes": 1, "too_few_nodes": "stop", "max_restarts": 0, "stand_in": "debug"}
    rest = "\n".join(line for line in text.splitlines() if line.partition(":")[0] not in own)
    source = tmp_path / "own.yaml"
    source.write_text(rest + "\n" + "".join(f"{key}: {own[key]}\n" for key in own))
    base = cell_of(str(source), nodes=16)
    planned = tmp_path / "planned.yaml"
    planned.write_text(render_recipe("planned", candidate(1, 2, cell=base), base))
    kept, recipe = load_recipe(str(planned)), base.recipe
    said_anew = {"name", "short_name", "description", "nodes", "settings", "path", "published"}
    own |= {"precision": "bf16", "ep_backend": "standard"}
    for field in dataclasses.fields(recipe):
        if field.name not in said_anew:
            assert getattr(kept, field.name) == own[field.name] == getattr(recipe, field.name)
    assert recipe.published is not None and kept.published is None
