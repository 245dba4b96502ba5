"""Predicted steps beside measured ones, as the tables of docs/time.md.

    python -m bench.step_times                        # print the tables, anywhere
    python -m bench.step_times --note OUT/throughput.json --gpus 2 --layers 8
                                                      # note in docs/time.json what was measured

`--keep` writes what is predicted now to `docs/time-predicted.json`, to be committed before the run
that it is about; `--note` puts it beside what was measured, where it stays whatever the model says
later.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.step_points import POINTS, Comparison, compare, read_points
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table

PREDICTED = ROOT / "docs/time-predicted.json"


def tables(comparisons: Sequence[Comparison]) -> str:
    """A table of what was measured for each group, one of what was not, and the mean errors."""
    parts = []
    for group in dict.fromkeys(one.point.group for one in comparisons):
        own = [one for one in comparisons if one.point.group == group]
        measured = [one for one in own if one.error is not None]
        waiting = [one for one in own if one.error is None]
        if measured:
            parts += [f"**{group}**", _measured(measured)]
        if waiting:
            parts += [f"**{group}, not measured yet**", _waiting(waiting)]
    return "\n\n".join([*parts, *_summary(comparisons)]) + "\n"


def _measured(comparisons: Sequence[Comparison]) -> str:
    head = [
        "cell",
        "documents",
        "measured ms",
        "predicted ms",
        "error",
        "predicted before",
        "largest terms, ms",
        "used",
    ]
    return markdown_table(head, [[*_row(one)] for one in comparisons], "llrrrrll")


def _row(one: Comparison) -> Iterator[str]:
    point, predicted = one.point, one.predicted
    assert point.measured is not None
    assert one.error is not None
    yield f"{point.name} ({point.note})" if point.note else point.name
    yield point.documents
    yield f"{1000 * predicted.tokens_per_gpu / point.measured:,.0f}"
    yield f"{predicted.step_ms:,.0f}"
    yield f"{one.error:+.1%}"
    foretold = point.error_of(point.foretold)
    yield "" if foretold is None else f"{foretold:+.1%}"
    yield _largest(one)
    yield f"to fit {point.fitted}" if point.fitted else "held out"


def _largest(one: Comparison) -> str:
    terms = sorted(one.predicted.terms_ms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {time_ms:,.0f}" for name, time_ms in terms[:4])


def _waiting(comparisons: Sequence[Comparison]) -> str:
    head = ["cell", "documents", "predicted tokens/s/GPU", "predicted ms", "largest terms, ms"]
    rows = [
        [
            one.point.name,
            one.point.documents,
            f"{one.predicted.tokens_per_second_per_gpu:,.0f}",
            f"{one.predicted.step_ms:,.0f}",
            _largest(one),
        ]
        for one in comparisons
    ]
    return markdown_table(head, rows, "llrrl")


def _summary(comparisons: Sequence[Comparison]) -> Iterator[str]:
    known = [one for one in comparisons if one.error is not None and not one.point.note]
    foretold = [one.point.error_of(one.point.foretold) for one in known]
    for title, found in (
        ("used to fit something", [one.error for one in known if one.point.fitted]),
        ("held out", [one.error for one in known if not one.point.fitted]),
        ("predicted before they were measured, as predicted then", foretold),
    ):
        errors = [abs(error) for error in found if error is not None]
        if errors:
            yield (
                f"{len(errors)} points {title}: mean error {statistics.fmean(errors):.1%}, "
                f"worst {max(errors):.1%}."
            )


def note(path: Path, gpus: int, layers: int) -> int:
    """Put the speeds of a `throughput.json` beside the points of the same name; how many."""
    measured: dict[tuple[str, str], list[float]] = {}
    for one in json.loads(path.read_text(encoding="utf-8"))["rounds"]:
        for name, run in one["runs"].items():
            if not run["reason"]:
                speed = float(run["tokens_per_second_per_gpu"])
                measured.setdefault((name, one["corpus"]), []).append(speed)
    content: dict[str, Any] = json.loads(POINTS.read_text(encoding="utf-8"))
    kept = json.loads(PREDICTED.read_text(encoding="utf-8"))["points"]
    foretold = {_key(one): one["tokens_per_second_per_gpu"] for one in kept}
    found = 0
    for point in content["points"]:
        speeds = measured.get((point["name"], point["documents"]))
        if speeds and point["group"] == f"{layers} layers, {gpus} H200":
            point["measured"] = statistics.median(speeds)
            if _key(point) in foretold:
                point["foretold"] = foretold[_key(point)]
            found += 1
    write_whole(POINTS, json.dumps(content, indent=1) + "\n")
    return found


def _key(point: dict[str, Any]) -> tuple[str, ...]:
    return point["group"], point["name"], point["documents"]


def keep(comparisons: Sequence[Comparison]) -> None:
    """Write what is predicted of the points that were not measured yet, beside what was then."""
    before = json.loads(PREDICTED.read_text(encoding="utf-8"))["points"]
    measured = {_key(asdict(one.point)) for one in comparisons if one.error is not None}
    content = [one for one in before if _key(one) in measured]
    content += [
        {
            "group": one.point.group,
            "name": one.point.name,
            "documents": one.point.documents,
            "tokens_per_second_per_gpu": round(one.predicted.tokens_per_second_per_gpu),
            "terms_ms": {name: round(ms, 1) for name, ms in one.predicted.terms_ms.items()},
        }
        for one in comparisons
        if one.error is None
    ]
    write_whole(PREDICTED, json.dumps({"points": content}, indent=1) + "\n")


def main() -> int:
    """Print the tables; status 1 where a file of measurements has none of the points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--note", type=Path, metavar="THROUGHPUT.json")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    if asked.note and not note(asked.note, asked.gpus, asked.layers):
        print(f"{asked.note}: none of the points of {POINTS.name}")
        return 1
    comparisons = list(compare(read_points()))
    if asked.keep:
        keep(comparisons)
    print(tables(comparisons), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
