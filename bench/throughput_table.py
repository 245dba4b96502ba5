"""What the measurements of `bench.gpu_throughput` say, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cookbook.base.tables import markdown_table

Run = dict[str, Any]
Round = dict[str, Any]


def render_report(content: Mapping[str, Any]) -> str:
    """A table for each corpus, with the cells of `throughput.json` beside its first one."""
    lines = []
    if content["device"] == "cpu":
        lines += ["**Tried out on a CPU with the debug model: not a result.**", ""]
    else:
        gpus = f"{content['ranks']} x {content['gpu']}"
        lines += [f"{gpus}; {content['steps']} steps after {content['warm_up']}", ""]
    for corpus in content["corpora"]:
        rounds = [one for one in content["rounds"] if one["corpus"] == corpus["name"]]
        if rounds:
            lines += [f"## {corpus['name'].capitalize()} documents", "", _described(corpus), ""]
            lines += [_speeds(content["cells"], rounds), ""]
    return "\n".join(lines)


def ratios(rounds: Sequence[Round], name: str, base: str) -> list[float]:
    """How many times as fast `name` was as `base`, in each round that has both."""
    pairs = [(speed_in(one, name), speed_in(one, base)) for one in rounds]
    return [own / other for own, other in pairs if own and other]


def speed_in(of_round: Round, name: str) -> float | None:
    """Tokens/s/GPU of a cell in a round; None where it did not train to the end."""
    run = of_round["runs"].get(name)
    speed: float | None = run["tokens_per_second_per_gpu"] if run and not run["reason"] else None
    return speed


def _described(corpus: Mapping[str, Any]) -> str:
    return (
        f"{corpus['documents']:,} documents of {corpus['mean_length']:,.0f} tokens on average "
        f"(median {corpus['median_length']:,.0f}). Mean attended length in sequences of "
        f"{corpus['seq_len']:,}: {corpus['mean_attended_length']:,.0f} tokens."
    )


def _speeds(names: Sequence[str], rounds: Sequence[Round]) -> str:
    base = names[0]
    head = ["cell", "rounds", "tokens/s/GPU", "by round", "single steps", "memory (GiB)"]
    head += ["start (s)", "last loss", f"over {base}", "lowest and highest round", "status"]
    rows = [_row(name, base, rounds) for name in names]
    return markdown_table(head, rows, "lrrlrrrrrll")


def _row(name: str, base: str, rounds: Sequence[Round]) -> list[str]:
    runs = [one["runs"][name] for one in rounds if name in one["runs"]]
    ended = [run for run in runs if not run["reason"]]
    speeds = [run["tokens_per_second_per_gpu"] for run in ended]
    steps = [speed for run in ended for speed in run["by_step"]]
    memory = [run["memory_gib"] for run in ended if run["memory_gib"]]
    found = ratios(rounds, name, base) if name != base else []
    return [
        name,
        str(len(ended)),
        f"{statistics.median(speeds):,.0f}" if speeds else "",
        "; ".join(f"{speed:,.0f}" for speed in speeds),
        f"{min(steps):,.0f} to {max(steps):,.0f}" if steps else "",
        f"{max(memory):.1f}" if memory else "",
        "; ".join(f"{run['start_seconds'] or math.nan:.0f}" for run in ended),
        f"{ended[-1]['losses'][-1]:.5f}" if ended else "",
        f"{statistics.median(found):.3f}x" if found else "",
        f"{min(found):.3f} to {max(found):.3f}" if found else "",
        "" if ended else runs[-1]["reason"] if runs else "not run",
    ]
