"""Write the tables and figures of these documents from their data: `make docs`.

    python -m docs.make [--check]      # --check: write nothing; status 1 if one is outdated

A table is between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import argparse
import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.fits import memory, step_times
from bench.proofs import convergence, gradient_table, peer
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table
from cookbook.cli.main import main as submit
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.options import Setting
from cookbook.config.recipe import load_recipe
from cookbook.config.resolve import cell_on, published_number
from cookbook.config.sweep import CellRequest, expand_sweep, load_sweep, sweep_of_recipe
from cookbook.predict.hardware import hardware_of
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import count_work, describe_ranks
from cookbook.predict.step import predict_step
from cookbook.results.columns import FIELDS
from docs import option_tables
from docs.figures import EVIDENCE, FIGURES, read_data


def _gradients(name: str, table: int) -> str:
    return gradient_table.render(read_data(f"numerics/{name}.json")).split("\n\n")[table]


def _measured() -> Iterator[tuple[str, str, str, float, float | None]]:
    """Yield machine, cell, documents, tokens/s/GPU and GiB; the first of a machine is the base."""
    for pair, speed in load_recipe("deepseek_v3_671b").published_numbers.items():
        yield "256 B200, 671B, published", pair, "short", speed, None
    for part in read_data("performance/h200x4-bars.json")["rounds"]:
        kind = {"tp2": ", TP 2", "real": ", real routing"}.get(part["command"], "")
        (base, first), *others = part["runs"].items()
        others.sort(key=lambda item: item[1]["tokens_per_second_per_gpu"])
        for name, run in ((base, first), *others):
            speed = run["tokens_per_second_per_gpu"]
            yield f"4 H200, 16B{kind}", name, part["corpus"], speed, run["memory_gib"]
    report = (EVIDENCE / "results/h200x2/report.md").read_text(encoding="utf-8")
    for name, cells in re.findall(r"^\| (\S+) +\| finished \|(.*%.*)\|$", report, re.M):
        _, speed, _, _, _, memory_gib, *_ = cells.replace(",", "").split("|")
        machine = f"2 H200, 8 layers, {name.split('-')[0]}"
        yield machine, name, "long", float(speed), float(memory_gib)
    for run in read_data("performance/h200-rows.json")["runs"]:
        kind = "" if run["options"]["debug.moe_force_load_balance"] else ", real routing"
        if run["run"] == ("third" if run["corpus"] == "long" and not kind else "fourth"):
            speed = run["tokens_per_second_per_gpu"]
            yield f"1 H200, 8 layers{kind}", run["cell"], run["corpus"], speed, run["memory_gib"]


def _speeds() -> str:
    rows: dict[tuple[str, str, str], list[str]] = {}
    base: dict[tuple[str, str], float] = {}
    for machine, cell, documents, speed, memory_gib in _measured():
        first = base.setdefault((machine, documents), speed)
        ratio = "" if first == speed else f"{speed / first:.2f}x"
        flavor = next(one for one in ("671B", "8 layers", "16B") if one in machine)
        mfu = f"{speed * _flops_share(flavor):.1%}"
        gib = "" if memory_gib is None else f"{memory_gib:.1f}"
        # The first of a cell's two rounds.
        rows.setdefault((machine, cell, documents), [f"{speed:,.0f}", ratio, mfu, gib])
    head = ["machine, model", "cell", "documents", "tokens/s/GPU", "over the first", "MFU", "GiB"]
    return markdown_table(head, [[*key, *row] for key, row in rows.items()], "lllrrrr")


@functools.cache
def _flops_share(flavor: str) -> float:
    """Return the share of the BF16 peak that one token a second takes, by TorchTitan's count."""
    cluster, recipe, size = {
        "671B": ("soperator-b200", "deepseek_v3_671b", "671B"),
        "16B": ("h200-node", _FAST, "16B"),
        "8 layers": ("h200-node", _FAST, "16B_8layers"),
    }[flavor]
    cell = cell_on(load_cluster(cluster), recipe, "bf16", "standard", {"model.flavor": size})
    peak = hardware_of(cell).bf16_peak_tflops * 1e12
    return count_work(cell, describe_ranks(cell)).flops_per_token / peak


def _predicted(cell: Cell) -> list[str]:
    """Return the predicted GiB and tokens/s/GPU of a cell."""
    ranks = describe_ranks(cell)
    total = max(predict_memory(cell, rank).total for rank in ranks)
    speed = predict_step(cell, ranks).tokens_per_second_per_gpu
    return [f"{total:.0f}", f"{speed:,.0f}"]


def _sweeps_671b() -> str:
    rows = []
    for name in ("matrix", "matrix_random", "fast"):
        for cell in expand_sweep(load_sweep(name), CellRequest(load_cluster("soperator-b200"))):
            published = published_number(cell) if name == "matrix" else None
            shown = f"{published:,.0f}" if published else ""
            rows.append([name, cell.name, shown, *reversed(_predicted(cell))])
    head = ["sweep", "cell", "published", "predicted tokens/s/GPU", "GiB of 178"]
    return markdown_table(head, rows, "llrrr")


_FAST, _LARGE = "deepseek_v3_16b_fast", "deepseek_v3_671b_fast"
_EP, _SAVED = "parallelism.expert_parallel_degree", "activation_checkpoint.op_sac_save_list"
_FULL = {"activation_checkpoint.mode": "full", _SAVED: []}
_EIGHT = {"model.overrides.n_layers": 8}
# GPUs a node, nodes, profile, recipe and options.
_PATHS: list[tuple[int, int, str, str, dict[str, Any]]] = [
    (1, 1, "h200-node", _FAST, {_EP: 1, **_EIGHT, "activation_checkpoint.num_layers_kept": 8}),
    (2, 1, "h200-node", _FAST, {_EP: 2, **_EIGHT}),
    (2, 1, "h200-node", _FAST, {_EP: 2, "training.local_batch_size": 1, **_FULL}),
    (4, 1, "h200-node", _FAST, {_EP: 4, _SAVED: ["attention", "communication", "grouped_mm"]}),
    (8, 1, "h200-node", _FAST, {}),
    (1, 1, "h100-node", _FAST, {_EP: 1, "model.overrides.n_layers": 6}),
    (2, 1, "h100-node", _FAST, {_EP: 2, **_EIGHT}),
    (8, 1, "h100-node", _FAST, {_SAVED: ["attention", "communication"]}),
    *((8, nodes, "soperator-b200", _FAST, {}) for nodes in (1, 2, 8, 64)),
    (8, 16, "soperator-b200", _LARGE, _FULL),
    *((8, nodes, "soperator-b200", _LARGE, {}) for nodes in (32, 64)),
]


def _paths() -> str:
    rows = []
    for gpus, nodes, profile, recipe, options in _PATHS:
        cluster = replace(load_cluster(profile), gpus_per_node=gpus, nodes=nodes)
        settings = {name: Setting(value, "--set") for name, value in options.items()}
        backend = "standard" if gpus == 1 else None
        request = CellRequest(cluster, ep_backend=backend, nodes=nodes, overrides=settings)
        (cell,) = expand_sweep(sweep_of_recipe(recipe), request)
        assert not cell.refused, cell.refused
        words = ["--ep-backend standard"] * (gpus == 1)
        for name, value in options.items():
            words.append(f"--set {name}={','.join(value) if isinstance(value, list) else value}")
        shown = "<br>".join(f"`{word}`" for word in words)
        machine = f"{nodes} x " * (nodes > 1) + cluster.ranks
        rows.append([machine, f"`{recipe}`", shown, *_predicted(cell)])
    head = ["GPUs", "recipe", "options", "GiB a GPU", "predicted tokens/s/GPU"]
    return markdown_table(head, rows, "lllrr")


def _plan() -> str:
    """Return what `plan` prints, without the columns and lines that a page has no room for."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        submit(["plan", _FAST, "--cluster", "h200-node", "--best", "3"])
    title, *lines = printed.getvalue().splitlines()
    head = next(place for place, line in enumerate(lines) if "tokens/s/GPU" in line)
    end = lines[head].index("precision+EP backend")
    shown = [title, *(line[:end].rstrip() for line in lines[head : head + 5])]
    return "\n".join(["```text", *shown, "```"])


def _report_fields() -> str:
    rows = [[f"`{name}`", meaning] for name, meaning, _ in FIELDS]
    return markdown_table(["field of a cell", "is"], rows, "ll")


@functools.cache
def _times() -> str:
    return step_times.tables([*step_times.compare(step_times.read_points())])


def _errors() -> str:
    """Return the summaries of both kinds of predictions, without their tables."""
    kinds = {"Memory": memory.render(), "Step time": _times()}
    return "\n".join(
        f"- **{kind}**: {part.strip()}"
        for kind, text in kinds.items()
        for part in text.split("\n\n")
        if part[0] not in "|*"
    )


def _megatron() -> list[peer.Run]:
    return [*map(peer.read_run, sorted(EVIDENCE.glob("performance/beside-megatron/*.json")))]


TABLES: dict[str, Callable[[], str]] = {
    "beside-megatron": lambda: peer.summary(_megatron()),
    "beside-megatron-trainings": lambda: "\n\n".join(map(peer.render, _megatron())),
    "convergence": convergence.render,
    "convergence-fp8": lambda: convergence.render(convergence.DATA / "fp8"),
    "errors": _errors,
    "faults": lambda: _gradients("gradients", 1),
    "gradients": lambda: _gradients("gradients", 0),
    "gradients-qwen3": lambda: _gradients("gradients-qwen3", 0),
    "gradients-qwen3-h200": lambda: _gradients("gradients-qwen3-h200", 0),
    "gradients-h200": lambda: _gradients("gradients-h200", 0),
    "keys-cluster": option_tables.cluster_keys,
    "keys-recipe": option_tables.recipe_keys,
    "memory": memory.render,
    "options": option_tables.titan_options,
    "own-options": option_tables.own_options,
    "paths": _paths,
    "plan": _plan,
    "report-fields": _report_fields,
    "speeds": _speeds,
    "sweeps-671b": _sweeps_671b,
    "time": _times,
}
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return every page of the documents."""
    return sorted(ROOT.glob("docs/**/*.md"))


def rewrite(text: str) -> str:
    """Return the text of a page with current tables."""

    def replace_table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]().strip()}\n\n{found[3]}"

    return _TABLE.sub(replace_table, text)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if one is old"
    )
    check, old = parser.parse_args(words).check, []
    made = {path: rewrite(path.read_text(encoding="utf-8")) for path in pages()}
    made |= {EVIDENCE / name: figure() for name, figure in FIGURES.items()}
    for path, after in made.items():
        if not path.exists() or path.read_text(encoding="utf-8") != after:
            old.append(path.name)
            if not check:
                write_whole(path, after)
    print(f"{'old' if check else 'written'}: {', '.join(old) or 'none'}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
