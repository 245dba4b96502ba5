"""Render the results of a check as text for people or as one JSON object for programs."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from cookbook.base.tables import text_table
from cookbook.check.check import CellCheck
from cookbook.config.cell import PARTS, Finding
from cookbook.predict.hardware import attended_text
from cookbook.predict.memory import state_gib


def render_json(checks: Sequence[CellCheck]) -> str:
    """Return the checks as `{"may_run": ..., "cells": [...]}`; unknown values are null."""
    may_run, cells = all(check.may_run for check in checks), list(map(_as_mapping, checks))
    return json.dumps({"may_run": may_run, "cells": cells}, indent=2) + "\n"


def _as_mapping(check: CellCheck) -> dict[str, object]:
    cell, gpu, built = check.cell, check.cell.cluster.gpu, check.built
    judged, parts = check.judged, ("rules", "built", "here")
    return {
        "name": cell.name,
        **{part: getattr(cell, part).name for part in PARTS},
        "ranks": cell.world,
        "may_run": check.may_run,
        "summary": check.summary,
        "looked_at": {part: getattr(judged, part) is not None for part in parts},
        "findings": [finding.as_mapping() for finding in check.findings],
        "active": check.active or None,
        "built": check.is_built,
        "build_seconds": built.seconds if built and check.is_built else None,
        "not_exercised": built.noted("not_exercised") if built else None,
        "memory": check.peak
        and {
            "verdict": check.verdict,
            "gpu_gib": gpu and gpu.memory_gib,
            "total_gib": round(check.peak.total, 2),
            "largest": check.peak.largest,
            "stages": [
                {
                    "rank": stage.rank,
                    "pipeline_stages": rank.stages,
                    "local_parameters": rank.local_parameters,
                    "state_gib": round(state_gib(rank), 3),
                    "moment": stage.moment,
                    "terms_gib": {name: round(size, 3) for name, size in stage.terms.items()},
                    "reserved_gib": round(stage.reserved, 2),
                    "outside_gib": round(stage.outside, 2),
                    "total_gib": round(stage.total, 2),
                }
                for stage, rank in zip(check.stages, check.ranks, strict=True)
            ],
        },
        "work": check.work and asdict(check.work),
        "step": check.step and check.step.as_mapping(),
        "no_step": check.no_step or None,
    }


def render_text(name: str, checks: Sequence[CellCheck], width: int | None = None) -> str:
    """Return one line per cell, then the findings that all cells share, then details by cell."""
    first, cluster = checks[0].cell, checks[0].cell.cluster
    words = {True: "may run", False: "REFUSED"}
    verdicts = [[check.cell.name, words[check.may_run], check.summary] for check in checks]
    lines = [f"{name} on cluster {cluster.name}: {first.nodes} node(s) x {cluster.ranks}"]
    lines.append(text_table(verdicts, width=width, indent=2))
    lines += [f"  {parts}" for parts in dict.fromkeys(check.judged.parts for check in checks)]
    everywhere = [one for one in checks[0].findings if all(one in c.findings for c in checks)]
    shared = everywhere if len(checks) > 1 else []
    if shared:
        lines += ["", "every cell", _findings(shared, width)]
    figures: dict[tuple[str, ...], str] = {}
    for check in checks:
        own = [finding for finding in check.findings if finding not in shared]
        block = (*_memory(check), *_work(check), *_step(check))
        active = [f"{key.replace('_', ' ')} {kind}" for key, kind in check.active.items()]
        if own or active or block:
            lines += ["", check.cell.name]
        if own:
            lines.append(_findings(own, width))
        if active:
            lines.append(f"  active: {', '.join(active)}")
        if block and block in figures:
            lines.append(f"  memory, work and time: as {figures[block]}")
        else:
            figures[block] = check.cell.name
            lines += block
        if check.built and check.is_built:
            notes = check.built.noted("not_exercised")
            version = check.cell.options.stack.pins["torchtitan"]
            lines.append(f"  built by TorchTitan {version} in a fake world; not exercised:")
            lines += [f"    {note}" for note in notes]
            read = [one for one in ("tokenizer", "texts") if f"{one}: not read" not in notes]
            lines += [f"  read: {' and '.join(read)}"] if read else []
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    # Repeat the verdicts where the first lines have left the screen.
    return f"{text}\n{lines[1]}\n" if text.count("\n") > 24 else text


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def _findings(findings: Iterable[Finding], width: int | None) -> str:
    rows = [[f"{one.level}:", f"{one}\n{one.reference}".rstrip()] for one in findings]
    return text_table(rows, width=width, indent=2)


def _memory(check: CellCheck) -> Iterator[str]:
    if check.peak is None:
        return
    stages = check.stages
    terms = {name: None for stage in stages for name in stage.terms}
    rows = {name: [stage.terms.get(name, 0.0) for stage in stages] for name in terms}
    rows["reserved (`memory` in the log)"] = [stage.reserved for stage in stages]
    rows["CUDA, NCCL, DeepEP"] = [stage.outside for stage in stages]
    rows["total"] = [stage.total for stage in stages]
    owner = "a GPU" if check.cell.cluster.gpu else "a rank"
    unit, factor, digits = ("GiB", 1, 1) if check.peak.total >= 1 else ("MiB", 1024, 0)
    table = [[f"memory, {unit} {owner}", *(f"rank {stage.rank}" for stage in stages), ""]]
    for name, sizes in rows.items():
        mark = "largest" if name == check.peak.largest else ""
        table.append([f"  {name}", *(f"{factor * size:.{digits}f}" for size in sizes), mark])
    yield text_table(table, align="l" + "r" * len(stages), indent=2)
    of = f"{check.verdict} in {check.room_gib:.4g} GiB" if check.room_gib else "no GPU to fit into"
    yield f"    {of}; the peak is at {' or '.join(dict.fromkeys(one.moment for one in stages))}"
    for rank in check.ranks:
        state = f"{factor * state_gib(rank):.{digits}f} {unit} with gradients and Adam"
        yield f"    rank {rank.rank}: {_count(rank.local_parameters)} parameters, {state}"


def _work(check: CellCheck) -> Iterator[str]:
    work = check.work
    if work is None:
        return
    active = f"{_count(work.active_parameters)} active; {work.flops_per_token / 1e9:.1f} GFLOP"
    yield "  work"
    yield f"    {_count(work.parameters)} parameters, {active} a token (TorchTitan's count)"
    done, owner = work.flops_per_gpu_step, "a GPU" if check.cell.cluster.gpu else "a rank"
    flops = f"{done / 1e12:,.0f} TFLOP" if done >= 1e12 else f"{done / 1e9:,.0f} GFLOP"
    yield f"    {work.tokens_per_step:,} tokens and {flops} {owner} in a step"


def _step(check: CellCheck) -> Iterator[str]:
    step = check.step
    if step is None:
        if check.no_step:
            yield f"  time: not predicted: {check.no_step}"
        return
    yield f"  attention: {attended_text(step.documents, check.cell.facts.seq_len)}"
    speed = f"{step.step_ms:,.0f} ms a step, {step.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    source = "predicted (docs/evidence/prediction.md)"
    yield f"  time, {source}: {speed}; milliseconds of rank {step.rank}:"
    terms = sorted(step.terms_ms.items(), key=lambda item: -item[1])
    rows = [[name, f"{time_ms:,.0f}", f"{time_ms / step.step_ms:.0%}"] for name, time_ms in terms]
    rows.append(["of which recomputed or sent again", f"{step.recompute_ms:,.0f}", ""])
    yield text_table(rows, align="lrr", indent=4)
