"""TorchTitan's rules for dividing a job's ranks, layers and batch, and for pipeline schedules.

The rules mirror `ParallelDims`, `pipeline_llm` and the models in TorchTitan. Each error names the
option to change and, if there is one, the nearest valid value.
"""

import math
from collections.abc import Iterator

from cookbook.base.family import is_v_shaped
from cookbook.config.cell import ERROR, Cell, Finding, Problems, Rule, rule, unknown
from cookbook.config.options import DEGREES, OVERRIDES, Layout, Options, Setting, layout_of
from cookbook.config.recipe import COMM_BACKEND, EXCHANGES, STANDARD
from cookbook.config.stack import PIPELINING, TORCHTITAN

# TorchTitan's default number of stages per pipeline rank, by schedule; looped schedules allow more.
STAGES_PER_RANK = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2}
STAGES_PER_RANK |= {"InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
# An error: the option, the reason, and either a remedy or candidate values for the option.
_Problem = tuple[str, str, str | list[int]]
_BATCH = "training.local_batch_size"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"


def layout_findings(options: Options, world: int) -> list[Finding]:
    """Return the errors that keep TorchTitan from dividing the job among `world` ranks."""
    reference, found = f"{TORCHTITAN}/distributed/parallel_dims.py", []
    for option, reason, remedy in _problems(options, world):
        if not isinstance(remedy, str):
            remedy = _suggestion(option, remedy, options, world)
        found.append(Finding(ERROR, "layout", option, reason, remedy, reference, is_input=True))
    return found


def _suggestion(name: str, values: list[int], options: Options, world: int) -> str:
    sizes = EXCHANGES.get(options[COMM_BACKEND], STANDARD).sizes
    if name == DEGREES["ep"] and sizes:
        values = [value for value in values if value in (1, *sizes)]
    # Of two equally near values prefer the smaller, which needs fewer resources.
    left = {
        value: [one[0] for one in _problems(options.override({name: Setting(value, name)}), world)]
        for value in sorted(values, key=lambda value: (abs(value - options[name]), value))
    }
    # Suggest first the values that would resolve every layout error.
    nearest_first = sorted(left, key=lambda value: bool(left[value]))
    best = next(value for value in nearest_first if name not in left[value])
    is_in_file = name in options and ".y" in options.origin(name)
    return f"try {best}: --set {name}={best}" if is_in_file else f"try {best}"


def _problems(options: Options, world: int) -> list[_Problem]:
    layout, family, model = layout_of(options, world), options.family, options.model
    problems: list[_Problem] = [*impossible(options)] or [*_degrees(layout)]
    if problems:
        return problems
    if family is not None and model is not None:
        of = f"of {options.model_title}"
        kind = "attention" if model.heads == model.kv_heads else "key and value"
        problems += _undivided("ep", layout.ep, model.num_experts, f"experts {of}")
        problems += _undivided("tp", layout.tp, model.kv_heads, f"{kind} heads {of}")
        problems += _stages(options, layout, model.n_layers)
        if layout.pp > 1 and not family.has_pipelines:
            reason = f"TorchTitan has no pipeline parallelism for {family.title}"
            problems = [(DEGREES["pp"], f"{layout.pp}: {reason}", [1])]
    seq_len, divisor = options["training.seq_len"], layout.tp * layout.cp * 2
    if seq_len < 1 or seq_len % divisor:
        found = f"{seq_len} is not a multiple of TP x CP x 2 = {divisor}"
        best = max(seq_len // divisor, 1) * divisor
        problems.append(("training.seq_len", found, f"try {best}"))
    local, total = options[_BATCH], options["training.global_batch_size"]
    replicas = layout.dp_replicate * layout.dp_shard
    if total >= 0 and (total == 0 or total % (local * replicas)):
        found = f"{total} is not a multiple of local batch {local} x {replicas} data-parallel ranks"
        best = max(total // (local * replicas), 1) * local * replicas
        problems.append(("training.global_batch_size", found, f"try {best}"))
    microbatch = options[_MICROBATCH]
    if layout.pp > 1 and (microbatch < 1 or local % microbatch):
        found = f"{microbatch} does not divide the local batch of {local}"
        problems.append((_MICROBATCH, found, _divisors(local)))
    return problems


def impossible(options: Options) -> Problems:
    """Yield values that no job may have: unknown models or sizes, degrees or batches below 1."""
    family, refused = options.family, options.stack.refused_families
    known = {"model.name": options.stack.families, "model.flavor": family and family.flavors}
    for option, names in known.items():
        found = options[option]
        if option == "model.name" and found in refused:
            yield option, f"found {found!r}: {refused[found]}", f"choose {' or '.join(names or ())}"
        elif names and found not in names:
            _, reason, remedy = unknown(option, found, names)
            reason = reason if option in options else f"is not set; {reason.partition(', ')[2]}"
            yield option, f"{family.title}: {reason}" if family else reason, remedy
    if family and options.model:
        for name, reason in family.impossible(options.model, options.overrides):
            yield f"{OVERRIDES}{name}", reason, ""
    for option in (*DEGREES.values(), _BATCH):
        is_auto = option == DEGREES["dp_shard"]
        if options[option] < 1 and not (is_auto and options[option] == -1):
            allowed = "-1 or 1 and up" if is_auto else "1 and up"
            yield option, f"found {options[option]}, allowed: {allowed}", ""


def _undivided(short: str, degree: int, total: int, things: str) -> list[_Problem]:
    if total % degree == 0:
        return []
    return [(DEGREES[short], f"{degree} does not divide {total} {things}", _divisors(total))]


def _degrees(layout: Layout) -> Iterator[_Problem]:
    product = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp * layout.pp
    # TorchTitan forms EP groups from the ranks of DP shard and CP, and of TP too if ETP is 1.
    ranks = layout.dp_shard * layout.cp * layout.tp
    if product != layout.world:
        for short in ("pp", "tp", "cp", "dp_replicate"):
            if problems := _undivided(short, getattr(layout, short), layout.world, "ranks"):
                yield from problems
                return
        reason = f"PP {layout.pp} x DP replicate {layout.dp_replicate} x DP shard {layout.dp_shard}"
        reason += f" x CP {layout.cp} x TP {layout.tp} is {product} ranks, the job has "
        remedy = "set it to -1 (all ranks that are left), or change another degree"
        yield DEGREES["dp_shard"], f"{reason}{layout.world}", remedy
    elif layout.ep > 1 and layout.etp not in (1, layout.tp):
        found = f"found {layout.etp}, allowed: 1 or the tensor parallel degree ({layout.tp})"
        yield DEGREES["etp"], found, [1]
    elif problems := (
        _undivided("etp", layout.etp, ranks, "ranks of a stage")
        or _undivided("ep", layout.ep, ranks // layout.etp, "ranks of a stage")
    ):
        yield from problems
    elif layout.ep > 1 and not layout.has_fsdp:
        # With EP, apply_fsdp needs the dense layers' FSDP mesh. A single rank has no such mesh.
        reason = f"comes to {layout.dp_shard} with CP 1, allowed with EP above 1: 2 and up"
        yield DEGREES["dp_shard"], reason, f"use fewer TP or PP ranks, or set {DEGREES['ep']} 1"


def _stages(options: Options, layout: Layout, num_layers: int) -> Iterator[_Problem]:
    """Yield the errors that `pipeline_llm` would raise; embedding and output count as layers."""
    by_hand = options["parallelism.module_fqns_per_model_part"]
    if layout.pp == 1 or by_hand or options["parallelism.pipeline_parallel_schedule_csv"]:
        return
    schedule = options[_SCHEDULE]
    known = {name.lower(): count for name, count in STAGES_PER_RANK.items()}
    if schedule.lower() not in known:
        yield unknown(_SCHEDULE, schedule, STAGES_PER_RANK)
        return
    first, last = less_layers(options)
    per_stage, at_least = options[_PER_STAGE], known[schedule.lower()]
    layers, stages = num_layers + first + last, layout.pp * at_least
    if per_stage is not None:
        stages = math.ceil(layers / per_stage) if per_stage > 0 else 0
        per_rank, left = divmod(stages, layout.pp)
        if left or per_rank < at_least or (at_least == 1 and per_rank != 1):
            reason = f"{per_stage} layers a stage make {stages} stages of {num_layers} layers, "
            reason += f"which {schedule} cannot divide among {layout.pp} pipeline ranks"
            yield _PER_STAGE, reason, f"try {math.ceil(layers / (layout.pp * at_least))}"
            return
    if max(first, last, 1) > layers // stages:
        reason = f"{layout.pp} pipeline ranks ({stages} stages of {schedule}) are too many for "
        fewer = [degree for degree in _divisors(layout.world) if degree < layout.pp]
        yield DEGREES["pp"], f"{reason}{num_layers} layers", fewer


def less_layers(options: Options) -> tuple[int, int]:
    """Return how many fewer layers the first and last stages get, due to embedding and output."""
    section = "parallelism.pipeline_parallel"
    first, last = (options[f"{section}_{end}_stage_less_layers"] for end in ("first", "last"))
    return first, last


def _divisors(total: int) -> list[int]:
    return [number for number in range(1, total + 1) if total % number == 0]


RULES: list[Rule] = []


def microbatches(cell: Cell) -> int | None:
    """Return how many microbatches a step has; None without a pipeline or for an uneven split."""
    size, batch = cell.options[_MICROBATCH], cell.options[_BATCH]
    if cell.layout.pp == 1 or size < 1 or batch % size:
        return None
    return int(batch // size)


@rule(RULES, reference=PIPELINING)
def enough_microbatches(cell: Cell) -> Problems:
    count, ranks = microbatches(cell), cell.layout.pp
    if count is None:
        return
    size, schedule = cell.options[_MICROBATCH], cell.options[_SCHEDULE]
    needed = {"1f1b": ranks, "gpipe": ranks, "dualpipev": 2 * ranks}.get(schedule.lower(), 0)
    rounds = max(1, count // ranks)
    if count < needed:
        reason = f"{count} microbatches are fewer than {schedule}'s {needed} stages"
        yield _BATCH, reason, f"try {needed * size}"
    elif schedule.lower() in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
        reason = f"{count} microbatches are not a multiple of the schedule's {rounds} rounds"
        yield _BATCH, reason, f"try {count // ranks * ranks * size}"


@rule(RULES, reference=PIPELINING)
def splittable_backward(cell: Cell) -> Problems:
    schedule = cell.options[_SCHEDULE]
    splits = schedule.lower() in ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
    if cell.layout.pp > 1 and splits and cell.is_compiled:
        reason = f"{schedule} splits the backward, which compiled layers cannot do"
        yield _SCHEDULE, reason, "set compile.components loss, or take Interleaved1F1B"


@rule(RULES, reference=PIPELINING)
def two_stages(cell: Cell) -> Problems:
    ranks, per_stage = cell.layout.pp, cell.options[_PER_STAGE]
    schedule, model = cell.options[_SCHEDULE], cell.options.model
    if ranks == 1 or not is_v_shaped(schedule) or not per_stage or model is None:
        return
    layers = model.n_layers + sum(less_layers(cell.options))
    if (stages := math.ceil(layers / per_stage)) != 2 * ranks:
        reason = f"{per_stage} layers a stage make {stages} stages; {schedule} needs two on each of"
        yield _PER_STAGE, f"{reason} {ranks} ranks", f"try {math.ceil(layers / (2 * ranks))}"


@rule(RULES, reference=f"{TORCHTITAN}/distributed/dual_pipe_v.py")
def dual_pipe_v_overlap(cell: Cell) -> Problems:
    """Refuse DualPipeV's expert-parallel overlap if DeepEP is used: the first step would fail."""
    option = "parallelism.pipeline_parallel_expert_parallel_overlap"
    is_overlapped = cell.options[option] and cell.options[_SCHEDULE].lower() == "dualpipev"
    if cell.exchange.has_own_layer and is_overlapped and cell.layout.pp > 1 and cell.layout.ep > 1:
        reason = "DualPipeV overlaps the exchanges of the standard backend, not those of "
        reason += f"{cell.exchange.title}, which overlap with the shared experts already"
        yield option, reason, "set it to false, or take EP backend standard"
