"""TorchTitan's rules for dividing a job's ranks, layers and batch, and for pipeline schedules.

The rules mirror `ParallelDims`, `pipeline_llm` and the models in TorchTitan. Each error names the
option to change and, if there is one, the nearest valid value.
"""

import math
from collections.abc import Iterator

from cookbook.base.family import Model, is_v_shaped
from cookbook.config.cell import ERROR, Cell, CellRule, Finding, Problems, rule, unknown
from cookbook.config.dialect.names import DEGREES, OVERRIDES, PIPELINING, TORCHTITAN
from cookbook.config.facts import EXCHANGES, STAGES_PER_RANK, STANDARD, Facts, Layout
from cookbook.config.options import Setting

# An error: the option, the reason, and either a remedy or candidate values for the option.
_Problem = tuple[str, str, str | list[int]]


def layout_findings(facts: Facts) -> list[Finding]:
    """Return the errors that keep TorchTitan from dividing the job among its ranks."""
    reference, found = f"{TORCHTITAN}/distributed/parallel_dims.py", []
    for option, reason, remedy in _problems(facts):
        if not isinstance(remedy, str):
            remedy = _suggestion(option, remedy, facts)
        found.append(Finding(ERROR, "layout", option, reason, remedy, reference, is_input=True))
    return found


def _suggestion(name: str, values: list[int], facts: Facts) -> str:
    options, sizes = facts.options, EXCHANGES.get(facts.comm_backend, STANDARD).sizes
    if name == Facts.ep and sizes:
        values = [value for value in values if value in (1, *sizes)]
    # Of two equally near values prefer the smaller, which needs fewer resources.
    left: dict[int, list[str]] = {}
    for value in sorted(values, key=lambda value: (abs(value - options[name]), value)):
        other = Facts(options.override({name: Setting(value, name)}), facts.world)
        left[value] = [option for option, *_ in _problems(other)]
    # Suggest first the values that would resolve every layout error.
    nearest_first = sorted(left, key=lambda value: bool(left[value]))
    best = next(value for value in nearest_first if name not in left[value])
    is_in_file = name in options and ".y" in options.origin(name)
    return f"try {best}: --set {name}={best}" if is_in_file else f"try {best}"


def _problems(facts: Facts) -> list[_Problem]:
    layout, options = facts.layout, facts.options
    family, model = options.family, options.model
    problems: list[_Problem] = [*impossible(facts)] or [*_degrees(layout)]
    if problems:
        return problems
    if family is not None and model is not None:
        of = f"of {options.model_title}"
        kind = "attention" if model.heads == model.kv_heads else "key and value"
        problems += _undivided("ep", layout.ep, model.num_experts, f"experts {of}")
        problems += _undivided("tp", layout.tp, model.kv_heads, f"{kind} heads {of}")
        problems += _stages(facts, model.n_layers)
        problems += [] if problems else _expert_shards(facts, model)
        if layout.pp > 1 and not family.has_pipelines:
            reason = f"TorchTitan has no pipeline parallelism for {family.title}"
            problems = [(Facts.pp, f"{layout.pp}: {reason}", [1])]
    seq_len, divisor = facts.seq_len, layout.tp * layout.cp * 2
    if seq_len < 1 or seq_len % divisor:
        found = f"{seq_len} is not a multiple of TP x CP x 2 = {divisor}"
        best = max(seq_len // divisor, 1) * divisor
        problems.append((Facts.seq_len, found, f"try {best}"))
    local, total = facts.local_batch, facts.global_batch
    replicas = layout.replicas
    if total >= 0 and (total == 0 or total % (local * replicas)):
        found = f"{total} is not a multiple of local batch {local} x {replicas} data-parallel ranks"
        best = max(total // (local * replicas), 1) * local * replicas
        problems.append((Facts.global_batch, found, f"try {best}"))
    microbatch = facts.microbatch
    if layout.pp > 1 and (microbatch < 1 or local % microbatch):
        found = f"{microbatch} does not divide the local batch of {local}"
        problems.append((Facts.microbatch, found, _divisors(local)))
    return problems


def impossible(facts: Facts) -> Problems:
    """Yield values that no job may have: unknown models or sizes, degrees or batches below 1."""
    options = facts.options
    family, refused = options.family, options.stack.refused_families
    known = {Facts.model_name: options.stack.families, Facts.flavor: family and family.flavors}
    for option, names in known.items():
        found = options[option]
        if option == Facts.model_name and found in refused:
            yield option, f"found {found!r}: {refused[found]}", f"choose {' or '.join(names or ())}"
        elif names and found not in names:
            _, reason, remedy = unknown(option, found, names)
            reason = reason if option in options else f"is not set; {reason.partition(', ')[2]}"
            yield option, f"{family.title}: {reason}" if family else reason, remedy
    if family and options.model:
        for name, reason in family.impossible(options.model, options.overrides):
            yield f"{OVERRIDES}{name}", reason, ""
    for option in (*DEGREES.values(), Facts.local_batch):
        is_auto = option == Facts.dp_shard
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
        yield Facts.dp_shard, f"{reason}{layout.world}", remedy
    elif layout.ep > 1 and layout.etp not in (1, layout.tp):
        found = f"found {layout.etp}, allowed: 1 or the tensor parallel degree ({layout.tp})"
        yield Facts.etp, found, [1]
    elif problems := (
        _undivided("etp", layout.etp, ranks, "ranks of a stage")
        or _undivided("ep", layout.ep, ranks // layout.etp, "ranks of a stage")
    ):
        yield from problems
    elif layout.ep > 1 and not layout.has_fsdp:
        # With EP, apply_fsdp needs the dense layers' FSDP mesh. A single rank has no such mesh.
        reason = f"comes to {layout.dp_shard} with CP 1, allowed with EP above 1: 2 and up"
        yield Facts.dp_shard, reason, f"use fewer TP or PP ranks, or set {Facts.ep} 1"


def _stages(facts: Facts, num_layers: int) -> Iterator[_Problem]:
    """Yield the errors that `pipeline_llm` would raise; embedding and output count as layers."""
    layout, schedule = facts.layout, facts.schedule
    if layout.pp == 1:
        return
    if facts.known_schedule is None:
        yield unknown(Facts.schedule, schedule, STAGES_PER_RANK)
        return
    first, last = facts.less_layers
    per_stage, at_least = facts.layers_per_stage, STAGES_PER_RANK[facts.known_schedule]
    layers, stages = num_layers + first + last, layout.pp * at_least
    if per_stage is not None:
        stages = math.ceil(layers / per_stage) if per_stage > 0 else 0
        per_rank, left = divmod(stages, layout.pp)
        if left or per_rank < at_least or (at_least == 1 and per_rank != 1):
            reason = f"{per_stage} layers a stage make {stages} stages of {num_layers} layers, "
            reason += f"which {schedule} cannot divide among {layout.pp} pipeline ranks"
            most = math.ceil(layers / (layout.pp * at_least))
            yield Facts.layers_per_stage, reason, f"try {most}"
            return
    if max(first, last, 1) > layers // stages:
        reason = f"{layout.pp} pipeline ranks ({stages} stages of {schedule}) are too many for "
        fewer = [degree for degree in _divisors(layout.world) if degree < layout.pp]
        yield Facts.pp, f"{reason}{num_layers} layers", fewer


def _expert_shards(facts: Facts, model: Model) -> Iterator[_Problem]:
    """Yield where FSDP, which cuts few experts by width, cannot cut it evenly (`apply_fsdp`)."""
    layout = facts.layout
    shards = layout.dp_shard * layout.cp * layout.tp // (layout.etp * layout.ep)
    widths = (model.expert_hidden // layout.etp, model.dim)
    if layout.ep == 1 or shards * layout.ep <= model.num_experts:
        return
    if any(width % shards for width in widths):
        reason = f"FSDP cannot cut experts of {widths[0]} x {widths[1]} into {shards} even shards"
        replicas = [n for n in _divisors(shards) if not any(w % (shards // n) for w in widths)]
        fit = [n for n in replicas if layout.dp_shard % n == 0]
        remedy = f"set {Facts.dp_replicate} to {fit[0] * layout.dp_replicate}" if fit else ""
        yield Facts.ep, f"at EP {layout.ep} {reason}", remedy or "use another number of nodes"


def _divisors(total: int) -> list[int]:
    return [number for number in range(1, total + 1) if total % number == 0]


RULES: list[CellRule] = []


@rule(RULES, reference=PIPELINING)
def enough_microbatches(cell: Cell) -> Problems:
    facts, ranks = cell.facts, cell.layout.pp
    if (count := facts.microbatches) is None:
        return
    size, schedule = facts.microbatch, facts.schedule
    needed = {"1f1b": ranks, "gpipe": ranks, "dualpipev": 2 * ranks}.get(schedule.lower(), 0)
    rounds = max(1, count // ranks)
    if count < needed:
        reason = f"{count} microbatches are fewer than {schedule}'s {needed} stages"
        yield Facts.local_batch, reason, f"try {needed * size}"
    elif schedule.lower() in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
        reason = f"{count} microbatches are not a multiple of the schedule's {rounds} rounds"
        yield Facts.local_batch, reason, f"try {count // ranks * ranks * size}"


@rule(RULES, reference=PIPELINING)
def splittable_backward(cell: Cell) -> Problems:
    schedule = cell.facts.schedule
    splits = schedule.lower() in ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
    if cell.layout.pp > 1 and splits and cell.facts.is_compiled:
        reason = f"{schedule} splits the backward, which compiled layers cannot do"
        remedy = f"set {Facts.compiled_components} loss, or take Interleaved1F1B"
        yield Facts.schedule, reason, remedy


@rule(RULES, reference=PIPELINING)
def two_stages(cell: Cell) -> Problems:
    facts, ranks, model = cell.facts, cell.layout.pp, cell.options.model
    per_stage = facts.layers_per_stage
    if ranks == 1 or not is_v_shaped(facts.schedule) or not per_stage or model is None:
        return
    if (stages := facts.num_stages(model.n_layers)) != 2 * ranks:
        reason = f"{per_stage} layers a stage make {stages} stages; {facts.schedule} needs two on "
        best = math.ceil((model.n_layers + sum(facts.less_layers)) / (2 * ranks))
        yield Facts.layers_per_stage, f"{reason}each of {ranks} ranks", f"try {best}"


@rule(RULES, reference=f"{TORCHTITAN}/distributed/dual_pipe_v.py")
def dual_pipe_v_overlap(cell: Cell) -> Problems:
    """Refuse DualPipeV's expert-parallel overlap if DeepEP is used: the first step would fail."""
    facts, layout = cell.facts, cell.layout
    is_overlapped = facts.ep_overlap and facts.schedule.lower() == "dualpipev"
    if facts.exchange.has_own_layer and is_overlapped and layout.pp > 1 and layout.ep > 1:
        reason = "DualPipeV overlaps the exchanges of the standard backend, not those of "
        reason += f"{facts.exchange.title}, which overlap with the shared experts already"
        yield Facts.ep_overlap, reason, "set it to false, or take EP backend standard"
