"""Rules that yield warnings and hints, which never keep a cell from running."""

import math
from pathlib import Path

from cookbook.base.paths import ROOT
from cookbook.config.cell import HINT, WARNING, Cell, CellRule, Problems, rule
from cookbook.config.cluster import seconds_of
from cookbook.config.dialect.classes import not_judged
from cookbook.config.dialect.names import (
    FLASH_ATTENTION,
    PIPELINING,
    SWITCHES,
    TORCHAO,
    TORCHTITAN,
)
from cookbook.config.facts import Facts
from cookbook.predict.operators import BYTES
from cookbook.predict.rank import count_parameters, model_of
from cookbook.predict.shapes import destinations

ADVICE: list[CellRule] = []  # for cells whose input is valid
# For cells whose model has also been built, and whose memory could be predicted.
BUILT_ADVICE: list[CellRule] = []

# Runs of at most this many steps only measure throughput; in longer runs the loss matters.
_LONG_RUN = 200
# Adam's second moments average over 20 steps and more.
_LEAST_WARM_UP = 100
_CHECKPOINT = f"{TORCHTITAN}/components/checkpoint.py"
_BLOG = (
    "https://pytorch.org/blog/enabling-up-to-41-faster-pre-training-mxfp8-and-deepep-"
    "for-deepseek-v3-on-b200-with-torchtitan"
)


@rule(ADVICE, level=WARNING, reference=f"{TORCHTITAN}/train.py")
def fewer_nodes(cell: Cell) -> Problems:
    """Warn if the cell has fewer nodes than its recipe is designed for."""
    wanted, facts = cell.recipe.nodes, cell.facts
    if cell.nodes >= wanted or cell.stand_in_for is not None or cell.cluster.scheduler == "local":
        return
    reason = f"{cell.recipe.name} is made for {wanted} nodes and runs on {cell.nodes}"
    if facts.global_batch < 0:
        local, replicas = facts.local_batch, facts.layout.replicas
        reason += f", and a step trains {local * replicas:,} sequences (local batch {local} x "
        reason += f"{replicas} data-parallel ranks)"
    yield "", reason, f"set {Facts.global_batch} to keep the batch"


@rule(ADVICE, level=HINT)
def passed_on(cell: Cell) -> Problems:
    """List the options that no rule knows."""
    for option in not_judged(cell.options):
        yield option, f"{cell.options[option]} is passed on to TorchTitan, not judged", ""


@rule(ADVICE, level=WARNING)
def without_effect(cell: Cell) -> Problems:
    """Warn of options that another one turns off, unless the recipe's own file has both."""
    facts, options = cell.facts, cell.options
    off = {prefix: switch for prefix, (switch, is_off) in SWITCHES.items() if is_off(options)}
    for option, setting in options.settings.items():
        switch = next((off[prefix] for prefix in off if option.startswith(prefix)), option)
        is_default = setting.value == options.stack.options[option].default
        if switch != option and not is_default and cell.recipe.settings.get(option) != setting:
            value = str(options[switch]).replace("False", "false")
            yield option, f"has no effect with {switch} {value}", "leave it out"
    if facts.load_excluded and not cell.resumes:
        is_all = facts.initial_load_path and not facts.initial_load_model_only
        if not (facts.checkpoints and is_all):
            yield (
                Facts.load_excluded,
                "has no effect: a new run loads no such state",
                "leave it out",
            )
    for option, found, what in (
        (Facts.validation_freq, facts.validates and facts.validation_freq, "validated"),
        (Facts.log_freq, facts.log_freq, "logged"),
    ):
        if found > facts.steps:
            reason = f"{found} is beyond the last step ({facts.steps}): only the first is {what}"
            yield option, reason, f"try {facts.steps}"
    if not facts.lr:
        yield Facts.lr, "is 0: no step changes a weight", ""


@rule(ADVICE, level=HINT)
def another_pair(cell: Cell) -> Problems:
    """Point out if the recipe was designed for a different precision or EP backend."""
    if own := cell.own_pair:
        yield "", f"{cell.recipe.name} is made for {own}, and this cell has {cell.pair}", ""


@rule(ADVICE, level=WARNING, reference="https://slurm.schedmd.com/sbatch.html#OPT_time")
def short_time_limit(cell: Cell) -> Problems:
    """Warn of a time limit like `04:00`, which sbatch reads as four minutes, not four hours."""
    limit = cell.cluster.time or ""
    if cell.cluster.scheduler == "slurm" and limit.count(":") == 1 and "-" not in limit:
        minutes = (seconds_of(limit) or 0) / 60
        yield "", f"time {limit} is {minutes:g} minutes to sbatch", f"write {limit}:00 for hours"


@rule(ADVICE, level=WARNING, reference=PIPELINING)
def starved_pipeline(cell: Cell) -> Problems:
    count, ranks = cell.facts.microbatches, cell.layout.pp
    if count is not None and count < ranks:
        size = cell.facts.microbatch
        reason = f"{count} microbatches cannot keep {ranks} pipeline ranks busy"
        yield Facts.local_batch, reason, f"raise it to {4 * ranks * size} or more"


@rule(ADVICE, level=HINT, reference=PIPELINING)
def pipeline_bubble(cell: Cell) -> Problems:
    count, ranks = cell.facts.microbatches, cell.layout.pp
    if count is not None and ranks <= count < 4 * ranks:
        idle = f"{(ranks - 1) / (count + ranks - 1):.0%} of the time is bubble"
        reason = f"with {count} microbatches for {ranks} pipeline ranks about {idle} (less with an"
        yield Facts.local_batch, f"{reason} interleaved schedule)", "raise it where memory allows"


@rule(ADVICE, level=WARNING, reference=_CHECKPOINT)
def checkpoints_resume(cell: Cell) -> Problems:
    """Warn of checkpoint settings with which a resumed run loses progress or state."""
    steps, facts = cell.steps, cell.facts
    if not facts.checkpoints:
        if steps > _LONG_RUN:
            reason = f"no checkpoint in {steps} steps: a lost node costs the whole run"
            yield Facts.checkpoints, reason, f"set {Facts.checkpoints} true"
        return
    if facts.last_save_model_only:
        reason = "the last step is saved without optimizer and cannot be resumed"
        yield Facts.last_save_model_only, reason, "leave it out to be able to continue"
    interval = facts.save_interval
    if interval > steps and not facts.save_minutes:
        reason = f"{interval} is beyond the last step ({steps}): nothing is saved before the end"
        yield Facts.save_interval, reason, f"try {max(steps // 6, 1)}"
    if facts.load_only:
        reason = "nothing is saved: a requeued job begins where this one did"
        yield Facts.load_only, reason, "set it to false"


def _routing_option(cell: Cell) -> str:
    return Facts.is_balance_forced if cell.facts.is_balance_forced else Facts.moe_routing


@rule(ADVICE, level=WARNING, reference=f"{TORCHTITAN}/components/lr_scheduler.py")
def warm_up_ends(cell: Cell) -> Problems:
    """Warn of a warm-up that is longer than the schedule, except in benchmarks."""
    facts = cell.facts
    total = facts.total_steps or facts.steps
    # Do not warn about the published convergence experiment, which ends during its warm-up.
    is_published = (facts.warmup_steps, total) == (2000, 1500)
    if facts.warmup_steps > total and not (is_published or facts.is_balance_forced):
        reason = f"{facts.warmup_steps} steps are longer than the run, whose {total} steps all "
        yield Facts.warmup_steps, f"{reason}warm up", f"try {max(1, total // 10)}"


@rule(ADVICE, level=WARNING, reference=_CHECKPOINT)
def cold_optimizer(cell: Cell) -> Problems:
    """Warn of weights that are loaded without Adam's moments, and then trained at the full rate."""
    facts = cell.facts
    if cell.resumes or not (facts.checkpoints and facts.initial_load_path):
        return
    is_lowered = cell.options.origin(Facts.lr).startswith("--set")
    is_cold = facts.initial_load_in_hf or facts.initial_load_model_only
    if is_cold and not is_lowered and facts.warmup_steps < _LEAST_WARM_UP:
        reason = f"Adam starts without moments, at the full rate after {facts.warmup_steps} steps"
        remedy = f"set it to {_LEAST_WARM_UP} or more, or lower {Facts.lr} by --set"
        yield Facts.warmup_steps, f"{reason}: the loss may rise at first", remedy


@rule(ADVICE, level=HINT, reference=_CHECKPOINT)
def weights_are_read(cell: Cell) -> Problems:
    """Mention how many GB of published weights the ranks read when the job first starts."""
    facts = cell.facts
    if not (facts.checkpoints and facts.initial_load_in_hf):
        return
    shown = facts.initial_load_path or facts.assets or ""
    files = filter(Path.is_file, (ROOT / shown).glob("*.safetensors"))
    if size := sum(file.stat().st_size for file in files) / 1e9:
        part = f"each of {cell.world} ranks reads the tensors of its own shards"
        reason = f"{size:,.2f} GB are read from {shown}: {part}, and nothing is expanded on disk"
        yield Facts.initial_load_in_hf, reason, ""


@rule(ADVICE, level=WARNING, reference=f"{TORCHTITAN}/models/moe/moe.py")
def balance_is_real(cell: Cell) -> Problems:
    """Warn of forced routing in a long run, because it makes the loss meaningless."""
    if (routing := cell.facts.routing) != "trained" and cell.steps > _LONG_RUN:
        how = "round-robin" if routing == "round_robin" else "at random"
        reason = f"experts are dealt out {how} for {cell.steps} steps, and the loss says nothing"
        value = "false" if cell.facts.is_balance_forced else "trained"
        yield (
            _routing_option(cell),
            f"{reason} about convergence",
            f"set it to {value} where the loss matters",
        )


@rule(ADVICE, level=HINT, reference=f"{TORCHTITAN}/protocols/state_dict_adapter.py")
def routing_bias_stays_here(cell: Cell) -> Problems:
    model = cell.options.model
    if model and not model.publishes_bias and cell.facts.checkpoints:
        reason = f"{cell.options.model_title}'s published format has no routing bias: transformers "
        yield "", f"{reason}routes an export without it; published weights start it at zero", ""


@rule(ADVICE, level=WARNING, reference=f"{TORCHTITAN}/distributed/utils.py")
def parameters_are_sharded(cell: Cell) -> Problems:
    layout = cell.layout
    if layout.tp * layout.pp > 1 and not layout.has_fsdp and cell.facts.param_dtype == "float32":
        reason = "TP or PP without FSDP computes in FP32: mixed precision comes with FSDP"
        yield Facts.dp_shard, reason, "leave at least 2 ranks to data-parallel shards"


@rule(ADVICE, level=WARNING, reference=f"{TORCHTITAN}/models/llama3/infra/parallelize.py")
def replicas_are_summed(cell: Cell) -> Problems:
    layout = cell.layout
    if layout.dp_replicate > 1 and not layout.has_fsdp:
        reason = "without shards DDP averages gradients that are divided by all replicas' tokens"
        reason += f" already: they are {layout.dp_replicate} times too small where they are clipped"
        remedy = f"set it to 1 and {Facts.dp_shard} to -1: FSDP sums"
        yield Facts.dp_replicate, reason, remedy


@rule(ADVICE, level=WARNING, reference=f"{TORCHTITAN}/distributed/parallel_dims.py")
def tp_in_a_node(cell: Cell) -> Problems:
    """Warn if a TP group spans nodes: TP communicates in every layer, so it should use NVLink."""
    degree, per_node = cell.layout.tp, cell.cluster.ranks_per_node
    if degree > per_node or per_node % degree:
        reason = f"{degree} ranks do not lie within one node of {per_node}"
        yield Facts.tp, reason, f"set it to a divisor of {per_node}"


@rule(ADVICE, level=HINT, reference="https://github.com/deepseek-ai/DeepEP/blob/main/README.md")
def exchange_within_a_node(cell: Cell) -> Problems:
    """Point out that an EP backend built for InfiniBand may gain little within one node."""
    exchange, ep = cell.facts.exchange, cell.layout.ep
    if exchange.sends_once_per_rank and 1 < ep <= exchange.ranks_per_node:
        reason = f"at EP {ep} {exchange.title} may gain little over the all-to-all, or lose to it:"
        yield Facts.comm_backend, f"{reason} tokens travel over NVLink alone", "measure both"


@rule(ADVICE, level=HINT, reference=f"{TORCHAO}/prototype/moe_training/README.md")
def emulated_has_no_speed(cell: Cell) -> Problems:
    if cell.emulated:
        name = cell.emulated_parts[0].name
        yield "", f"{name} is emulated here: its numerics are right, its speed means nothing", ""


@rule(ADVICE, level=HINT, reference=f"{FLASH_ATTENTION}/interface.py")
def reference_has_no_speed(cell: Cell) -> Problems:
    if cell.attends_by_reference:
        reason = "a reference computes attention on the CPU, document by document: its numerics are"
        yield Facts.attention, f"{reason} right, its speed means nothing", ""


@rule(BUILT_ADVICE, level=HINT, reference=_BLOG)
def small_experts(cell: Cell) -> Problems:
    """Point out that MXFP8 may not pay off for small experts, for which FP8 does."""
    hidden, is_mx = model_of(cell).expert_hidden, any(one.is_mx for one in cell.facts.quantizes)
    if is_mx and not cell.emulated and hidden < 2048:
        reason = f"for experts of hidden size {hidden} quantizing may cost more than faster GEMMs"
        reason += " bring (published for 2,048, of the 671B; not gained on the 16B)"
        yield Facts.converters, reason, "compare with --precision bf16"


@rule(BUILT_ADVICE, level=HINT, reference=f"{TORCHTITAN}/models/moe/moe.py")
def forced_balance_flatters(cell: Cell) -> Problems:
    """Point out that the EP backend is faster with round-robin routing than with real routing."""
    ep, exchange = cell.layout.ep, cell.facts.exchange
    if cell.facts.routing != "round_robin" or not exchange.sends_once_per_rank:
        return
    dealt, routed = (destinations(model_of(cell), ep, one) for one in ("round_robin", "random"))
    if dealt < 0.8 * routed:
        reason = f"dealt out round-robin, a token's experts live on {dealt:.1f} of {ep} ranks, with"
        reason += f" real routing on {routed:.1f}: {exchange.title} looks faster than it will be"
        yield _routing_option(cell), reason, "measure with real routing as well"


@rule(BUILT_ADVICE, level=HINT, reference="https://doi.org/10.1016/j.future.2004.11.016")
def saving(cell: Cell) -> Problems:
    """Suggest the save interval that loses the least time to saves and to failures."""
    cluster, facts = cell.cluster, cell.facts
    if not facts.checkpoints or cluster.node_failure_days is None:
        return
    # A checkpoint holds the parameters and Adam's two moments.
    parameters, _ = count_parameters(model_of(cell))
    size_gb = 3 * parameters * BYTES[facts.dtype] / 1e9
    waits_s = written_s = size_gb / cluster.write_gb_per_s if cluster.write_gb_per_s else None
    if facts.async_mode != "disabled":
        # Training waits only for the copy to host memory, at about 10 GB/s. TorchTitan logs the
        # actual time as `Finished saving the checkpoint ...`.
        waits_s = size_gb / cell.world / 10.0
    if waits_s is None:
        reason = f"training waits until {size_gb:,.0f} GB are written, at each save"
        yield Facts.async_mode, reason, "set it to async"
        return
    days = cluster.node_failure_days / cell.nodes
    best_s = max(math.sqrt(2 * waits_s * days * 86_400), written_s or 0.0)
    found_s = 60 * facts.save_minutes
    # The cost is flat around its minimum: an interval 3 times longer or shorter costs little more.
    if found_s and best_s / 3.0 <= found_s <= best_s * 3.0:
        return
    found = f"every {found_s / 60:g} minutes" if found_s else "by steps, not by minutes"
    reason = f"saved {found}; a save of {size_gb:,.0f} GB keeps training waiting for about "
    reason += f"{waits_s:.2g} s, and one of {cell.nodes} nodes fails about every {days:.2g} days"
    remedy = f"set it to about {max(1, round(best_s / 60))} (Young and Daly)"
    yield Facts.save_minutes, reason, remedy
