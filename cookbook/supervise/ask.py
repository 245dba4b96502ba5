"""Has all nodes of a job look at themselves at once, and compares what they found."""

from __future__ import annotations

import json
from dataclasses import asdict

from cookbook.run.excluded import PASSING_H
from cookbook.supervise.compare import Fault, Faults, common_fault, differing, skewed
from cookbook.supervise.node import Question, Reader, Report
from cookbook.supervise.nodes import CannotStartError, JobNodes
from cookbook.supervise.step import StepEnd, python_of_job, run_step

# What a node must answer in: its own commands take up to half of it.
LIMIT_S = 30.0


def ask_nodes(job: JobNodes) -> None:
    """Have all nodes look at themselves, and compare what they found."""
    asked, reports, received = job.well, dict[str, Report](), dict[str, float]()
    if not asked:
        return
    reader = Reader()

    def on_line(line: str, moment: float) -> None:
        report = reader.read(line)
        if report is not None:
            reports[report.node], received[report.node] = report, moment

    question = _question(job)
    command = [python_of_job(), "-m", "cookbook.supervise.node", json.dumps(asdict(question))]
    left, waiting, silent = LIMIT_S, list(asked), dict[str, str]()
    # Where a node cannot start its task, Slurm ends the others' too, those that answer late.
    for _ in range(2):
        if not waiting or left < 1:
            break
        end = run_step(waiting, command, left, on_line)
        left -= end.seconds
        for node in waiting:
            silent[node] = end.not_launched.get(node) or _last_words(node, end)
        waiting = [node for node in waiting if node not in reports | end.not_launched]
        if not end.not_launched:
            break
    answers = [reports[node] for node in asked if node in reports]
    found: Faults = {}
    for node in asked:
        if node in reports:
            for check, (text, hours) in reports[node].problems.items():
                found.setdefault(node, []).append(Fault(check, text, hours))
        else:
            found[node] = [Fault("answer", silent[node], PASSING_H)]
    for faults in (differing(answers), skewed(answers, received)):
        for node, of_node in faults.items():
            found.setdefault(node, []).extend(of_node)
    if common := common_fault(found, asked):
        raise CannotStartError(f"{common}; no fault of single nodes, none is left out")
    job.faults |= found


def _question(job: JobNodes) -> Question:
    options, record = job.record.options, job.record
    deepep = options.get("parallelism.expert_parallel_comm_backend") == "deepep"
    degree = options.get("parallelism.expert_parallel_degree") or 1
    paths = {
        "tokenizer": options.get("model.hf_assets_path"),
        "data": options.get("training.dataset_path"),
    }
    return Question(
        cluster=job.cluster_name,
        folder=str(job.cell.path),
        deepep_between_nodes=deepep and degree > record.ranks_per_node,
        files={what: str(path) for what, path in paths.items() if path},
    )


def _last_words(node: str, end: StepEnd) -> str:
    """Why a node whose task was started said nothing."""
    if end.is_late:
        return f"no answer in {LIMIT_S:.0f} s"
    lines = end.errors.splitlines()
    by_srun = [line for line in lines if f"srun: error: {node}: " in line]
    # What the tasks wrote bears no name.
    by_tasks = [line for line in lines if line and "srun: " not in line]
    return "; ".join(["no answer", *by_tasks[-1:], *by_srun[-1:]])
