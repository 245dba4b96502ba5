"""In: a cell's options and ranks. Out: what TorchTitan would refuse about their division.

The rules are those of `ParallelDims`, `pipeline_llm` and the DeepSeek-V3 model in TorchTitan; each
names the option to change and, where one exists, the nearest value that would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.stack import DEGREES, Layout, ModelSizes, Stack, layout_of


@dataclass(frozen=True)
class Problem:
    """Why an option's value cannot work, and what to do."""

    option: str
    found: str
    remedy: str


def layout_problems(stack: Stack, options: Mapping[str, Any], world: int) -> list[Problem]:
    """All that does not divide in a job of `world` ranks, the outermost degree first."""
    problems = [
        Problem(name, f"found {value}, allowed: {'-1 or ' if short == 'dp_shard' else ''}1 and up", "")
        for short, name in DEGREES.items()
        if (value := stack.value(options, name)) < 1 and not (short == "dp_shard" and value == -1)
    ]
    if problems:
        return problems
    layout = layout_of(stack, options, world)
    problems = list(_degrees(layout))
    if problems:
        return problems
    model = stack.model(options)
    if model is not None:
        problems += _model(layout, model)
    return problems + list(_batch(stack, options, layout))


def _degrees(layout: Layout) -> Iterator[Problem]:
    product = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp * layout.pp
    if product != layout.world:
        for short in ("pp", "tp", "cp", "dp_replicate"):
            degree = getattr(layout, short)
            if layout.world % degree:
                yield Problem(
                    DEGREES[short],
                    f"{degree} does not divide {layout.world} ranks",
                    _try(degree, layout.world),
                )
                return
        yield Problem(
            DEGREES["dp_shard"],
            f"PP {layout.pp} x DP replicate {layout.dp_replicate} x DP shard {layout.dp_shard} x CP "
            f"{layout.cp} x TP {layout.tp} is {product} ranks, the job has {layout.world}",
            "set it to -1 (all ranks that are left), or change another degree",
        )
        return
    if layout.ep > 1:
        if layout.etp not in (1, layout.tp):
            yield Problem(
                DEGREES["etp"],
                f"found {layout.etp}, allowed: 1 or the tensor parallel degree ({layout.tp})",
                "",
            )
            return
        # TorchTitan takes EP from the data-parallel ranks, and from TP's as well where ETP is 1.
        ranks = layout.dp_shard * layout.cp * (layout.tp if layout.etp == 1 else 1)
        if ranks % layout.ep:
            yield Problem(
                DEGREES["ep"],
                f"{layout.ep} does not divide {ranks} ranks of a stage",
                _try(layout.ep, ranks),
            )


def _model(layout: Layout, model: ModelSizes) -> Iterator[Problem]:
    if model.num_experts % layout.ep:
        yield Problem(
            DEGREES["ep"],
            f"{layout.ep} does not divide {model.num_experts} experts",
            _try(layout.ep, model.num_experts),
        )
    if model.n_heads % layout.tp:
        yield Problem(
            DEGREES["tp"],
            f"{layout.tp} does not divide {model.n_heads} attention heads",
            _try(layout.tp, model.n_heads),
        )


def _batch(stack: Stack, options: Mapping[str, Any], layout: Layout) -> Iterator[Problem]:
    seq_len = stack.value(options, "training.seq_len")
    divisor = layout.tp * layout.cp * 2
    if seq_len < 1 or seq_len % divisor:
        yield Problem(
            "training.seq_len",
            f"{seq_len} is not a multiple of TP x CP x 2 = {divisor}",
            f"try {max(seq_len // divisor, 1) * divisor}",
        )
    local = stack.value(options, "training.local_batch_size")
    if local < 1:
        yield Problem("training.local_batch_size", f"found {local}, allowed: 1 and up", "")
        return
    replicas = layout.dp_replicate * layout.dp_shard
    total = stack.value(options, "training.global_batch_size")
    if total >= 0 and (total == 0 or total % (local * replicas)):
        yield Problem(
            "training.global_batch_size",
            f"{total} is not a multiple of local batch {local} x {replicas} data-parallel ranks",
            f"try {max(total // (local * replicas), 1) * local * replicas}",
        )
    microbatch = stack.value(options, "parallelism.pipeline_parallel_microbatch_size")
    if layout.pp > 1 and (microbatch < 1 or local % microbatch):
        yield Problem(
            "parallelism.pipeline_parallel_microbatch_size",
            f"{microbatch} does not divide the local batch of {local}",
            _try(microbatch, local),
        )


def _try(degree: int, total: int) -> str:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    below = [number for number in divisors if number <= degree]
    return f"try {max(below) if below else divisors[0]}"
