"""TorchTitan's rules for dividing a job's ranks, layers and batch, and for pipeline schedules.

They are those of `ParallelDims`, `pipeline_llm` and the DeepSeek-V3 model in TorchTitan; each
names the option to change and, where one exists, the nearest value that would do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cookbook.base.errors import nearest
from cookbook.base.pipelines import is_v_shaped
from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, PIPELINING, TORCHTITAN, Finding, Problems, Rule, rule
from cookbook.config.options import DEGREES, Layout, Options, Setting, layout_of
from cookbook.config.overlay import COMM_BACKEND, EXCHANGES, STANDARD
from cookbook.config.stack import ModelSizes

# TorchTitan's default for each pipeline schedule; those with two take more if asked to.
STAGES_PER_RANK = {
    "1F1B": 1,
    "GPipe": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


@dataclass(frozen=True)
class _Problem:
    """Why an option's value cannot work; `candidates` are values that may."""

    option: str
    found: str
    remedy: str = ""
    candidates: Sequence[int] = ()


def layout_findings(options: Options, world: int) -> list[Finding]:
    """All that does not divide in a job of `world` ranks, the outermost degree first."""
    return [
        _finding(problem, problem.remedy or _suggestion(problem, options, world))
        for problem in _problems(options, world)
    ]


def impossible_findings(options: Options) -> list[Finding]:
    """Values that fit no job at all: models that there are not, degrees and batches below 1."""
    return [_finding(problem, problem.remedy) for problem in _impossible(options)]


def _finding(problem: _Problem, remedy: str) -> Finding:
    reference = f"{TORCHTITAN}/distributed/parallel_dims.py"
    return Finding(ERROR, "layout", problem.option, problem.found, remedy, reference, is_input=True)


def _suggestion(problem: _Problem, options: Options, world: int) -> str:
    """The candidate nearest to what was asked for that leaves no problem, or not this one."""
    name = problem.option
    candidates = list(problem.candidates)
    sizes = EXCHANGES.get(options[COMM_BACKEND], STANDARD).sizes
    if name == DEGREES["ep"] and sizes:
        candidates = [value for value in candidates if value in (1, *sizes)]
    # Of two that are as near, the smaller needs less.
    candidates.sort(key=lambda value: (abs(value - options[name]), value))
    left = {
        value: _problems(options.override({name: Setting(value, name)}), world)
        for value in candidates
    }
    without_any = [value for value, problems in left.items() if not problems]
    without_this = [
        value for value, problems in left.items() if all(other.option != name for other in problems)
    ]
    for value in without_any or without_this:
        # What stands in a file is easiest tried on the command line.
        is_in_file = name in options and ".y" in options.origin(name)
        return f"try {value}: --set {name}={value}" if is_in_file else f"try {value}"
    return ""


def _problems(options: Options, world: int) -> list[_Problem]:
    problems = list(_impossible(options))
    if problems:
        return problems
    layout = layout_of(options, world)
    problems = list(_degrees(layout))
    if problems:
        return problems
    model = options.model
    if model is not None:
        problems += [*_model(layout, model), *_stages(options, layout, model.n_layers)]
    return problems + list(_batch(options, layout))


def _impossible(options: Options) -> Iterator[_Problem]:
    yield from _flavor(options)
    for short, name in DEGREES.items():
        value = options[name]
        if value < 1 and not (short == "dp_shard" and value == -1):
            allowed = "-1 or 1 and up" if short == "dp_shard" else "1 and up"
            yield _Problem(name, f"found {value}, allowed: {allowed}")
    batch = options["training.local_batch_size"]
    if batch < 1:
        yield _Problem("training.local_batch_size", f"found {batch}, allowed: 1 and up")


def _flavor(options: Options) -> Iterator[_Problem]:
    models = options.stack.models
    name, flavor = options["model.name"], options["model.flavor"]
    for option, found, known in (
        ("model.name", name, models),
        ("model.flavor", flavor, models.get(name, {})),
    ):
        # Of a model that the table has not, TorchTitan knows the flavors.
        if known and found not in known:
            close = nearest(found.upper(), known) or nearest(found, known)
            yield _Problem(
                option,
                f"found {found!r}, allowed: {', '.join(known)}",
                f"did you mean {close[0]!r}?" if close else "choose one of these",
            )


def _degrees(layout: Layout) -> Iterator[_Problem]:
    product = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp * layout.pp
    if product != layout.world:
        for short in ("pp", "tp", "cp", "dp_replicate"):
            degree = getattr(layout, short)
            if layout.world % degree:
                yield _Problem(
                    DEGREES[short],
                    f"{degree} does not divide {layout.world} ranks",
                    candidates=_divisors(layout.world),
                )
                return
        yield _Problem(
            DEGREES["dp_shard"],
            f"PP {layout.pp} x DP replicate {layout.dp_replicate} x DP shard {layout.dp_shard} x "
            f"CP {layout.cp} x TP {layout.tp} is {product} ranks, the job has {layout.world}",
            "set it to -1 (all ranks that are left), or change another degree",
        )
        return
    if layout.ep > 1 and layout.etp not in (1, layout.tp):
        yield _Problem(
            DEGREES["etp"],
            f"found {layout.etp}, allowed: 1 or the tensor parallel degree ({layout.tp})",
            candidates=(1,),
        )
        return
    # TorchTitan takes EP from the data-parallel ranks, and from TP's as well where ETP is 1.
    ranks = layout.dp_shard * layout.cp * layout.tp
    if ranks % layout.etp:
        yield _Problem(
            DEGREES["etp"],
            f"{layout.etp} does not divide {ranks} ranks of a stage",
            candidates=_divisors(ranks),
        )
    elif ranks // layout.etp % layout.ep:
        ranks //= layout.etp
        yield _Problem(
            DEGREES["ep"],
            f"{layout.ep} does not divide {ranks} ranks of a stage",
            candidates=_divisors(ranks),
        )
    elif layout.ep > 1 and layout.dp_shard * layout.cp == 1:
        # apply_fsdp asks for the dense layers' FSDP mesh as soon as there is EP.
        yield _Problem(
            DEGREES["dp_shard"],
            f"comes to {layout.dp_shard} with CP 1, allowed with EP above 1: 2 and up",
            f"use fewer TP or PP ranks, or set {DEGREES['ep']} 1",
        )


def _model(layout: Layout, model: ModelSizes) -> Iterator[_Problem]:
    if model.num_experts % layout.ep:
        yield _Problem(
            DEGREES["ep"],
            f"{layout.ep} does not divide {model.num_experts} experts",
            candidates=_divisors(model.num_experts),
        )
    if model.n_heads % layout.tp:
        yield _Problem(
            DEGREES["tp"],
            f"{layout.tp} does not divide {model.n_heads} attention heads",
            candidates=_divisors(model.n_heads),
        )


def _stages(options: Options, layout: Layout, num_layers: int) -> Iterator[_Problem]:
    """What `pipeline_llm` would refuse: embedding and output count as layers of their stages."""
    by_hand = options["parallelism.module_fqns_per_model_part"]
    from_file = options["parallelism.pipeline_parallel_schedule_csv"]
    if layout.pp == 1 or by_hand or from_file:
        return
    schedule = options["parallelism.pipeline_parallel_schedule"]
    known = {name.lower(): count for name, count in STAGES_PER_RANK.items()}
    if schedule.lower() not in known:
        close = nearest(schedule, STAGES_PER_RANK)
        yield _Problem(
            "parallelism.pipeline_parallel_schedule",
            f"found {schedule!r}, allowed: {', '.join(STAGES_PER_RANK)}",
            f"did you mean {close[0]!r}?" if close else "choose one of these",
        )
        return
    first = options["parallelism.pipeline_parallel_first_stage_less_layers"]
    last = options["parallelism.pipeline_parallel_last_stage_less_layers"]
    per_stage_name = "parallelism.pipeline_parallel_layers_per_stage"
    per_stage = options[per_stage_name]
    layers = num_layers + first + last
    at_least = known[schedule.lower()]
    stages = layout.pp * at_least
    if per_stage is not None:
        stages = math.ceil(layers / per_stage) if per_stage > 0 else 0
        per_rank, left = divmod(stages, layout.pp)
        if left or per_rank < at_least or (at_least == 1 and per_rank != 1):
            yield _Problem(
                per_stage_name,
                f"{per_stage} layers a stage make {stages} stages of {num_layers} layers, which "
                f"{schedule} cannot divide among {layout.pp} pipeline ranks",
                f"try {math.ceil(layers / (layout.pp * at_least))}",
            )
            return
    if max(first, last, 1) > layers // stages:
        yield _Problem(
            DEGREES["pp"],
            f"{layout.pp} pipeline ranks ({stages} stages of {schedule}) are too many for "
            f"{num_layers} layers",
            candidates=[degree for degree in _divisors(layout.world) if degree < layout.pp],
        )


def _batch(options: Options, layout: Layout) -> Iterator[_Problem]:
    seq_len = options["training.seq_len"]
    divisor = layout.tp * layout.cp * 2
    if seq_len < 1 or seq_len % divisor:
        yield _Problem(
            "training.seq_len",
            f"{seq_len} is not a multiple of TP x CP x 2 = {divisor}",
            f"try {max(seq_len // divisor, 1) * divisor}",
        )
    local = options["training.local_batch_size"]
    replicas = layout.dp_replicate * layout.dp_shard
    total = options["training.global_batch_size"]
    if total >= 0 and (total == 0 or total % (local * replicas)):
        yield _Problem(
            "training.global_batch_size",
            f"{total} is not a multiple of local batch {local} x {replicas} data-parallel ranks",
            f"try {max(total // (local * replicas), 1) * local * replicas}",
        )
    microbatch = options["parallelism.pipeline_parallel_microbatch_size"]
    if layout.pp > 1 and (microbatch < 1 or local % microbatch):
        yield _Problem(
            "parallelism.pipeline_parallel_microbatch_size",
            f"{microbatch} does not divide the local batch of {local}",
            candidates=_divisors(local),
        )


def _divisors(total: int) -> list[int]:
    return [number for number in range(1, total + 1) if total % number == 0]


RULES: list[Rule] = []
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"
_SPLIT_BACKWARD = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")


def microbatches(cell: Cell) -> int | None:
    """Microbatches of a step; None without a pipeline, or where the batch does not divide."""
    size, batch = cell.options[_MICROBATCH], cell.options["training.local_batch_size"]
    if cell.layout.pp == 1 or size < 1 or batch % size:
        return None
    return int(batch // size)


@rule(RULES, reference=PIPELINING)
def enough_microbatches(cell: Cell) -> Problems:
    """The schedules' own demands on the number of microbatches."""
    count, ranks = microbatches(cell), cell.layout.pp
    if count is None:
        return
    option, size = "training.local_batch_size", cell.options[_MICROBATCH]
    schedule = cell.options[_SCHEDULE]
    needed = {"1f1b": ranks, "gpipe": ranks, "dualpipev": 2 * ranks}.get(schedule.lower(), 0)
    rounds = max(1, count // ranks)
    if count < needed:
        reason = (
            f"{count} microbatches are fewer than the {needed} stages, which {schedule} refuses"
        )
        yield option, reason, f"try {needed * size}"
    elif schedule.lower() in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
        reason = f"{count} microbatches are not a multiple of the schedule's {rounds} rounds"
        yield option, reason, f"try {count // ranks * ranks * size}"


@rule(RULES, reference=PIPELINING)
def splittable_backward(cell: Cell) -> Problems:
    """Schedules that run the backward in two halves cannot split a compiled layer's."""
    schedule = cell.options[_SCHEDULE]
    if cell.layout.pp > 1 and schedule.lower() in _SPLIT_BACKWARD and cell.is_compiled:
        reason = f"{schedule} splits the backward, which compiled layers cannot do"
        yield _SCHEDULE, reason, "set compile.components loss, or take Interleaved1F1B"


@rule(RULES, reference=PIPELINING)
def two_stages(cell: Cell) -> Problems:
    """V-shaped schedules need two stages on each rank."""
    ranks, per_stage = cell.layout.pp, cell.options[_PER_STAGE]
    schedule, model = cell.options[_SCHEDULE], cell.options.model
    if ranks == 1 or not is_v_shaped(schedule) or not per_stage or model is None:
        return
    first = cell.options["parallelism.pipeline_parallel_first_stage_less_layers"]
    last = cell.options["parallelism.pipeline_parallel_last_stage_less_layers"]
    layers = model.n_layers + first + last
    stages = math.ceil(layers / per_stage)
    if stages != 2 * ranks:
        yield (
            _PER_STAGE,
            f"{per_stage} layers a stage make {stages} stages; {schedule} "
            f"needs two on each of {ranks} ranks",
            f"try {math.ceil(layers / (2 * ranks))}",
        )


@rule(RULES, reference=f"{TORCHTITAN}/distributed/dual_pipe_v.py")
def dual_pipe_v_overlap(cell: Cell) -> Problems:
    """DualPipeV's hooks call TorchTitan's dispatch and combine; an own layer has its own.

    They fit the standard backend and `mxfp8_a2a`, whose classes have both. TorchTitan builds such a
    cell, and it stops in its first step.
    """
    is_own = cell.exchange.has_own_layer and cell.hooks == cell.options.stack.hooks
    is_overlapped = cell.options[_OVERLAP] and cell.options[_SCHEDULE].lower() == "dualpipev"
    if is_own and is_overlapped and cell.layout.pp > 1 and cell.layout.ep > 1:
        yield (
            _OVERLAP,
            "DualPipeV overlaps the exchanges of the standard backend, not those of "
            f"{cell.exchange.title}, which overlap with the shared experts already",
            "set it to false, or take EP backend standard",
        )
