"""The bars of docs/performance.md: what was predicted, measured and asked for, and the figure.

    python -m bench.bars            # the tables, and docs/performance/h200x4-bars.svg, anywhere

The figures are those of docs/performance/h200x4-bars.json. Speeds are compared within one round
only. Speeds were predicted before (docs/time.json); memory is what `check` says today.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.step_points import Point, cell_of_point, read_points
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import describe_ranks
from cookbook.results import charts
from cookbook.results.columns import gain_text, tokens_text
from cookbook.results.draw import draw_chart

MEASURED = ROOT / "docs/performance/h200x4-bars.json"
FIGURE = ROOT / "docs/performance/h200x4-bars.svg"
# One change after another, as docs/performance.md names them.
STAIRS = (
    "released-standard",
    "released-deepep",
    "deepep",
    "fast-attention",
    "fast-worker",
    "fast-ep2",
    "fast-saved",
    "fast",
)

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One cell over another in a round, and how many times as fast it had to be."""

    cell: str
    base: str
    command: str
    wanted: float


BARS = (
    Bar("fast", "released-deepep", "long", 1.6),
    Bar("fast", "released-deepep", "short", 1.6),
    Bar("fast", "released-standard", "long", 2.0),
    Bar("fast-real", "released-deepep-real", "real", 1.5),
    Bar("fast-tp2", "deepep-tp2", "tp2", 1.4),
)


def read_runs() -> dict[str, dict[str, Run]]:
    """What each cell did, by the round's command and the cell's name."""
    rounds = json.loads(MEASURED.read_text(encoding="utf-8"))["rounds"]
    return {one["command"]: one["runs"] for one in rounds}


def measured_table() -> str:
    """Every cell: its speed and what was predicted of it, memory, start and last loss."""
    points = {
        (point.name, point.documents): point
        for point in read_points()
        if point.group == "27 layers, 4 H200" and point.foretold
    }
    head = ["cell", "documents", "predicted", "measured", "over the first", "error of the step"]
    head += ["GiB, by check", "GiB", "start (s)", "last loss", "loss, off by"]
    rows = [row for runs in read_runs().items() for row in _rows(*runs, points)]
    return markdown_table(head, rows, "llrrrrrrrrr")


def _rows(
    command: str, runs: Mapping[str, Run], points: Mapping[tuple[str, str], Point]
) -> Iterator[list[str]]:
    documents = "short" if command == "short" else "long"
    first = next(iter(runs.values()))
    for name, run in runs.items():
        point = points[name, documents]
        error = point.error_of(point.foretold)
        speed = run["tokens_per_second_per_gpu"]
        yield [
            name,
            documents,
            f"{point.foretold:,.0f}",
            f"{speed:,.0f}",
            "" if run is first else f"{speed / first['tokens_per_second_per_gpu']:.3f}x",
            f"{error:+.1%}",
            f"{_memory_gib(point):.1f}",
            f"{run['memory_gib']:.1f}",
            f"{run['start_seconds']:.0f}",
            f"{run['losses'][-1]:.5f}",
            "" if run is first else f"{_off(run, first):.1e}",
        ]


def _memory_gib(point: Point) -> float:
    """What PyTorch reserves, as `check` predicts it; the cells had expandable segments."""
    cell = cell_of_point(point)
    expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return max(predict_memory(cell, view, expandable).reserved for view in describe_ranks(cell))


def _off(run: Run, base: Run) -> float:
    """The largest relative difference of the losses of all steps."""
    pairs = zip(run["losses"], base["losses"], strict=True)
    return float(max(abs(own - other) / other for own, other in pairs))


def judged() -> str:
    """Each bar with what was measured."""
    runs = read_runs()
    rows = []
    for bar in BARS:
        own, base = (runs[bar.command][name] for name in (bar.cell, bar.base))
        ratio = own["tokens_per_second_per_gpu"] / base["tokens_per_second_per_gpu"]
        documents = "short" if bar.command == "short" else "long"
        verdict = "met" if ratio >= bar.wanted else "**missed**"
        rows.append([f"`{bar.cell}` over `{bar.base}`", documents, f"{bar.wanted:g}x"])
        rows[-1] += [f"{ratio:.3f}x", verdict]
    return markdown_table(["bar", "documents", "wanted", "measured", ""], rows, "llrrl")


def draw() -> str:
    """The stairs from the published options to the fast ones, on long documents; an SVG."""
    runs = read_runs()["long"]
    base = runs["released-deepep"]["tokens_per_second_per_gpu"]
    bars = []
    for place, name in enumerate(STAIRS):
        tokens = runs[name]["tokens_per_second_per_gpu"]
        gain = "baseline" if name == "released-deepep" else gain_text(tokens / base)
        text = f"{tokens_text(tokens)}, {gain}"
        colour = place % len(charts.COLOURS)
        bars.append(charts.Bar(name, colour, text, tokens, None, None, base, None, ""))
    high = 1.02 * max(bar.value or 0.0 for bar in bars)
    chart = charts.Chart("bars", "", "", "tokens/s per GPU", 0, high, bars=tuple(bars))
    return draw_chart(chart)["svg"].decode()


def main() -> int:
    """Print the tables and write the figure."""
    print(judged(), measured_table(), sep="\n\n")
    write_whole(FIGURE, draw())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
