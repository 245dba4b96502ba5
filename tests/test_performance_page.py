"""docs/performance.md and docs/numerics.md say of the runs on 2 H200 what their data says."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.throughput_cells import CELLS, cell_of
from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.config.resolve import this_machine
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import describe_ranks

LAUNCHES = json.loads((ROOT / "docs/performance/h200x2-launches.json").read_text())["runs"]
GEMMS = json.loads((ROOT / "docs/performance/h200-gemms.json").read_text())
STARTS = json.loads((ROOT / "docs/performance/h200-starts.json").read_text())
TRAINED = json.loads((ROOT / "docs/numerics/attention-trained-h200.json").read_text())


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def runs(cell: str) -> list[dict[str, Any]]:
    return [run[cell] | {"code": run["code"]} for run in LAUNCHES if cell in run]


def speeds(found: list[dict[str, Any]]) -> list[float]:
    return [run["tokens_per_second_per_gpu"] for run in found]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["losses"], other["losses"], strict=True)
    return max(abs(float(a) - float(b)) / float(a) for a, b in pairs)


def test_fewer_launches_brought_what_the_page_says() -> None:
    kept = runs("kept8")
    before = [run for run in kept if run["code"].startswith("c7ad604")]
    after = [run for run in kept if run["code"].startswith("36489da")]
    assert len(before) == len(after) == 2 and len(kept) == 4
    (b1, b2), (a1, a2) = speeds(before), speeds(after)
    text = page("docs/performance.md")
    assert f"{b1:,.0f} and {b2:,.0f} tokens/s/GPU before, {a1:,.0f} and {a2:,.0f} after" in text
    assert f"{a1 / b1:.3f}x and {a2 / b2:.3f}x: less than was predicted" in text
    assert all(apart(one, other) < 1e-5 for one in before for other in after)


def test_twenty_steps_with_real_routing_are_as_the_page_says() -> None:
    (released,), (quick,) = runs("published"), runs("quick")
    assert len(released["losses"]) == len(quick["losses"]) == 20
    text = page("docs/performance.md")
    assert f"within {apart(released, quick):.1e}".replace("e-0", "e-") in text
    assert f"({quick['losses'][-1]} and {released['losses'][-1]} at the last)" in text
    (fast,), (slow,) = speeds([quick]), speeds([released])
    after = [run for run in runs("kept8") if run["code"].startswith("36489da")]
    assert f"at {fast / slow:.2f} times the speed ({fast:,.0f} and {slow:,.0f} tokens" in text
    (host,) = speeds(runs("host-kept"))
    kept = statistics.median(speeds(after))
    assert f"a step of 8 layers takes {1000 * 512 / host:.0f} ms" in text
    assert f"of the {1000 * 4 * 8192 / kept:.0f} ms that `kept8` takes" in text


def row(kind: dict[str, Any]) -> tuple[float, float]:
    """Of the gradients the largest error, and of all the largest of a document and head."""
    errors = kind["errors"]
    whole = max(error["whole"] for name, error in errors.items() if name != "out")
    return whole, max(error["part"] for error in errors.values())


@pytest.mark.parametrize(
    ("place", "kept"),
    [("6, 1", 3), ("1, 1", 8), ("6, 61", 483), ("1, 61", 488)],
)
def test_errors_with_what_attention_gets_in_training(place: str, kept: int) -> None:
    (case,) = [one for one in TRAINED["cases"] if one["inputs"] == f"kept-{kept}.pt"]
    flash = case["flash_attention_4"]
    cells = [flash["errors"]["out"]["whole"], *row(flash)]
    cells += row(case["flex"]) if "flex" in case else []
    shown = [f"{cell:.4f}" for cell in cells] + [""] * (5 - len(cells))
    line = " ".join(f"| {place} | {' | '.join(shown)} |".split())
    assert line in page("docs/numerics.md")
    assert case["ok"] and TRAINED["ok"]


def test_what_was_not_tried_is_bounded_by_the_profile() -> None:
    figure = (ROOT / "docs/performance/step-fast-short.svg").read_text()
    bar = figure.split("rank 1 (slowest)")[1].split("rank 3 (fastest)")[0]
    parts = re.findall(r"<title>([^<]*): ([\d.]+) ms</title>", bar)
    slowest = {title: float(ms) for title, ms in parts}
    step = sum(slowest.values())
    idle = sum(ms for title, ms in slowest.items() if title.startswith("idle"))
    text = page("docs/performance.md")
    assert f"profile of `fast` ({step:,.0f} ms, short documents)" in text
    for change, saved, ms in (
        ("CUDA graphs", "all of the GPU's idle time", idle),
        (
            "BF16 moments and gradients",
            "less than half of the optimizer and the gradient norm",
            slowest["optimizer and gradient norm"],
        ),
        (
            "FSDP prefetch further ahead",
            "FSDP's exposed part",
            slowest["FSDP communication, exposed"],
        ),
        (
            "stragglers at the all-reduce",
            "their exposed part",
            slowest["all-reduce of norm, loss, counts, exposed"],
        ),
    ):
        assert f"| {change} | {saved} | {ms:,.0f} | {100 * ms / step:.1f}% |" in text


def test_starts_took_what_the_page_says() -> None:
    runs = STARTS["runs"]
    text = page("docs/performance.md")
    for start in ("released", "fast", "compiled", "again"):
        cells = []
        for run in runs:
            if not (note := run["starts"].get(start)):
                cells.append("")
                continue
            assert note["reason"] is None and run["gpus"] == 1
            took, released = note["start_seconds"], run["starts"]["released"]["start_seconds"]
            ratio = f", {took / released:.3f}x" if start == "compiled" else ""
            cells.append(f"{took}{ratio}")
        (shown,) = re.findall(
            rf"\| `{start}`[^|]*\| [\d -]+ \| (.*?) \| [\d -]+ \| (.*?) \|(.*?)\|", text
        )
        assert [one.strip() for one in shown] == cells
    for row, start, part in (
        ("imports of `released`", "released", "imports"),
        ("self-check of `compiled`", "compiled", "self-check"),
        ("first step of `compiled`", "compiled", "step 1"),
    ):
        parts = [str(run["starts"][start]["parts"][part]) for run in runs]
        assert f"| {row} | | {parts[0]} | | {parts[1]} | {parts[2]} |" in text
    # The bars, and which run missed one.
    kept = [run["starts"] for run in runs if run["bytecode"]]
    assert [run["bytecode"] for run in runs] == [False, True, True]
    halves = [one["compiled"]["start_seconds"] / one["released"]["start_seconds"] for one in kept]
    assert max(halves) <= 0.5 and max(one["again"]["start_seconds"] for one in kept[:1]) < 60
    quick, slow = (
        [round(one[start]["start_seconds"]) for one in reversed(kept)]
        for start in ("compiled", "released")
    )
    readme = page("README.md")
    assert f"{quick[0]} and {quick[1]} s, where they take {slow[0]} and {slow[1]} (8 lay" in readme
    assert f"it takes {kept[0]['again']['start_seconds']:.0f} s." in readme
    first, second = (run["starts"] for run in runs[:2])
    assert first["compiled"]["start_seconds"] > first["released"]["start_seconds"] / 2
    compiled, again = second["compiled"]["parts"], second["again"]["parts"]
    left = [round(compiled[part] - again[part]) for part in ("step 1", "self-check")]
    assert f"{left[0]} in the first step and {left[1]} in the self-check" in text
    attention = [
        next(seconds for name, seconds in second[start]["proofs"].items() if "attention" in name)
        for start in ("fast", "compiled")
    ]
    assert f"took {attention[0]:.1f} s without and {attention[1]:.1f} s with them" in text
    # The same losses in every start, whatever it compiled.
    losses = [note["losses"] for run in runs for note in run["starts"].values()]
    assert len(losses) == 10
    assert all(abs(a - b) < 1e-5 * b for one in losses for a, b in zip(one, losses[0], strict=True))


def test_saved_gemms_brought_what_the_page_says() -> None:
    text = page("docs/performance.md")
    worst = 0.0
    for documents, joint in (("short", "tokens/s/GPU before"), ("long", "before")):
        rounds = [run for run in GEMMS["runs"] if run["documents"] == documents]
        before, after = (speeds([run[cell] for run in rounds]) for cell in ("saved", "saved-gemms"))
        (b1, b2), (a1, a2) = ([round(speed) for speed in found] for found in (before, after))
        r1, r2 = (a / b for a, b in zip(after, before, strict=True))
        assert (
            f"{b1:,} and {b2:,} {joint}, {a1:,} and {a2:,} after, {r1:.3f}x and {r2:.3f}x" in text
        )
        worst = max([worst, *(apart(run["saved"], run["saved-gemms"]) for run in rounds)])
        more = {run["saved-gemms"]["memory_gib"] - run["saved"]["memory_gib"] for run in rounds}
        assert {f"{gib:.1f}" for gib in more} == {"3.8"}
    assert "after, 1.034x and 1.036x; 3.8 GiB more." in text
    assert f"Losses of 13 steps agree within {worst:.1e}" in text


SAVED = "activation_checkpoint.op_sac_save_list"


@pytest.mark.parametrize(
    ("cell", "gpus", "options", "saved", "said"),
    [
        ("fast-standard-8layers", 1, {}, ["attention", "grouped_mm"], "({} and {} GiB, measured"),
        (
            "fast-8layers",
            2,
            {"training.local_batch_size": 2, "parallelism.expert_parallel_degree": 2},
            ["attention", "communication", "grouped_mm"],
            "(`check`: {} and {})",
        ),
    ],
)
def test_check_says_of_their_memory_what_the_page_says(
    cell: str, gpus: int, options: dict[str, Any], saved: list[str], said: str
) -> None:
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    machine = this_machine(gpus, Gpu("NVIDIA H200", 9.0, 139.8), environment)
    found = []
    for names in (saved, [*saved, "mm"]):
        one = CELLS[cell]
        settings = {**one.options, **options, SAVED: names}
        settings["activation_checkpoint.num_layers_kept"] = 0
        made = cell_of(cell, replace(one, options=settings), machine, Path(), Path(), 1)
        views = describe_ranks(made)
        found.append(max(predict_memory(made, one, environment).reserved for one in views))
    assert said.format(*(f"{gib:.1f}" for gib in found)) in page("docs/performance.md")
