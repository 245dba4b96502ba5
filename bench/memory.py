"""Compare predicted memory with the measured jobs of docs/evidence/prediction/memory.json.

    python -m bench.memory        # the table of docs/evidence/prediction.md, anywhere

Commit bbdf732 has the script that measured them (bench/gpu_memory.py). A job of your own is
measured by `submit.py run`; its report has the largest `memory` of any rank.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table
from cookbook.config.cell import Cell
from cookbook.config.resolve import cell_on, this_machine
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import describe_ranks

MEASURED = ROOT / "docs/evidence/prediction/memory.json"


@dataclass(frozen=True)
class Comparison:
    """A measured job's reserved memory in GiB, with the predicted peak."""

    name: str
    measured: float
    predicted: float
    moment: str
    terms: Mapping[str, float]
    earlier: bool

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1


def cell_of(job: Mapping[str, Any], gpu: Gpu) -> Cell:
    """Return a measured job as a cell; the 16B at EP 4, balanced, unless its options differ."""
    recipe = job.get("recipe", "deepseek_v3_16b")
    options: dict[str, Any] = {
        "training.dataset": "c4_test",
        "training.dataset_path": "assets/local/corpus",
        "model.hf_assets_path": "assets/local/tokenizer",
        "checkpoint.enable": False,
        "metrics.enable_tensorboard": False,
    }
    if recipe == "deepseek_v3_16b":
        options |= {"parallelism.expert_parallel_degree": 4, "debug.moe_force_load_balance": True}
    is_expandable = job.get("expandable_segments")
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if is_expandable else {}
    machine = this_machine(job.get("ranks", 4), gpu, environment)
    overlays = job.get("precision", "bf16"), job.get("ep_backend", "standard")
    return cell_on(machine, recipe, *overlays, options | job["options"])


def compare(measured: Mapping[str, Any]) -> list[Comparison]:
    """Predict all jobs in the file, including those of the earlier machine."""
    gpu, found = Gpu(**measured["gpu"]), []
    for run, earlier in ((measured["points"], False), (measured["earlier"]["points"], True)):
        for name, job in measured["jobs"].items():
            if not (reserved := run.get(name, {}).get("reserved_gib")):
                continue
            cell = cell_of(job, gpu)
            ranks = describe_ranks(cell)
            stages = [predict_memory(cell, one) for one in ranks]
            peak = max(stages, key=lambda stage: stage.reserved)
            predicted = (peak.reserved, peak.moment, peak.terms)
            found.append(Comparison(name, reserved, *predicted, earlier))
    return found


def read_measured() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return content


def render() -> str:
    """Return the predictions beside the measurements and their errors, as Markdown."""
    comparisons = compare(read_measured())
    rows = []
    for one in comparisons:
        largest = sorted(one.terms.items(), key=lambda term: -term[1])[:3]
        terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
        sizes = [f"{one.predicted:.1f}", f"{one.measured:.1f}", f"{one.error:+.0%}"]
        rows.append([one.name + " (earlier)" * one.earlier, *sizes, one.moment, terms])
    head = ["job", "predicted GiB", "measured GiB", "error", "peak at", "largest terms"]
    errors = [one.error for one in comparisons]
    return (
        f"{markdown_table(head, rows, 'lrrrll')}\n\n"
        f"{len(errors)} jobs: off by {statistics.fmean(map(abs, errors)):.1%} on average, "
        f"{min(errors):+.0%} to {max(errors):+.0%}."
    )


if __name__ == "__main__":
    print(render())
