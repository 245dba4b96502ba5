"""Rules for values that TorchTitan accepts by mistake, or rejects only once all ranks run."""

import math
import re
from pathlib import Path

from cookbook.base.errors import nearest
from cookbook.config.cell import (
    LAYERS_KEPT,
    SAVE_LIST,
    SAVED_OPERATORS,
    Cell,
    Problems,
    Rule,
    rule,
    unknown,
)
from cookbook.config.stack import TORCHTITAN

RULES: list[Rule] = []
_REFERENCE = f"{TORCHTITAN}/config/job_config.py"
_RECOMPUTATION = f"{TORCHTITAN}/distributed/activation_checkpoint.py"
_CHECKPOINT = f"{TORCHTITAN}/components/checkpoint.py"
TEXT = "text"
_BOUNDS: dict[tuple[float, float], tuple[str, ...]] = {
    (1, math.inf): (
        *("training.steps", "training.gc_freq", "metrics.log_freq", "checkpoint.interval"),
        *("profiling.profile_freq", "comm.init_timeout_seconds", "comm.train_timeout_seconds"),
        *("deepep.num_chunks", "training.dataloader.prefetch_factor"),
        "validation.dataloader.prefetch_factor",
    ),
    (-1, math.inf): ("data.shuffle_seed",),
    (0, math.inf): (
        *("training.max_norm", "training.dataloader.num_workers", "checkpoint.interval_minutes"),
        "validation.dataloader.num_workers",
        *("checkpoint.keep_latest_k", "lr_scheduler.warmup_steps", "optimizer.lr", "optimizer.eps"),
        *("optimizer.weight_decay", "loss.num_chunks", LAYERS_KEPT),
    ),
    (0, 1): (
        *("lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor", "optimizer.beta1"),
        *("optimizer.beta2", "activation_checkpoint.memory_budget"),
    ),
    (0, 2**63 - 1): ("debug.seed",),
}
_STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
# Options that are lists of names, and the names that are allowed in each.
_NAMES: dict[str, tuple[str, ...]] = {
    "compile.components": ("model", "loss"),
    "model.converters": (
        *("quantize.grouped_mm.mx", "quantize.linear.mx"),
        *("quantize.grouped_mm.float8", "quantize.linear.float8"),
    ),
    "checkpoint.exclude_from_loading": _STATES,
    SAVE_LIST: SAVED_OPERATORS,
}


@rule(RULES, reference=_REFERENCE, is_input=True)
def bounds(cell: Cell) -> Problems:
    for (low, high), options in _BOUNDS.items():
        allowed = f"{low:g} and up" if high == math.inf else f"{low:g} to {high:g}"
        for name in options:
            if (value := cell.options[name]) is not None and not low <= value <= high:
                yield name, f"found {value}, allowed: {allowed}", ""


@rule(RULES, reference=_REFERENCE, is_input=True)
def names(cell: Cell) -> Problems:
    """Refuse unknown names: TorchTitan ignores some, and rejects others when the job runs."""
    datasets = {f"{section}.dataset": cell.options.stack.datasets for section in readers(cell)}
    for option, known in {**_NAMES, **datasets}.items():
        value = cell.options[option]
        for name in [value] if isinstance(value, str) else value:
            if name not in known:
                yield unknown(option, name, known)


@rule(RULES, reference=f"{TORCHTITAN}/tools/profiling.py", is_input=True)
def profiled_steps(cell: Cell) -> Problems:
    """The warmup and recording of one profile must fit into `profile_freq` steps."""
    options, option = cell.options, "profiling.profile_freq"
    needed = options["profiling.profiler_warmup"] + options["profiling.profiler_active"]
    found = options[option]
    if options["profiling.enable_profiling"] and 1 <= found < needed:
        reason = f"found {found}, allowed: {needed} and up (profiler_warmup + profiler_active)"
        yield option, reason, f"try {needed}"


@rule(RULES, reference=_REFERENCE, is_input=True)
def kept_checkpoints(cell: Cell) -> Problems:
    if cell.options["checkpoint.enable"] and cell.options["checkpoint.keep_latest_k"] == 1:
        reason = "1 would leave none while the next is being written, and TorchTitan refuses it"
        yield "checkpoint.keep_latest_k", reason, "set it to 2, or to 0 to keep all"


@rule(RULES, reference=_REFERENCE, is_input=True)
def pinned_memory(cell: Cell) -> Problems:
    """Refuse `async_with_pinned_mem` without GPUs, because the first save would fail."""
    option = "checkpoint.async_mode"
    pinned = cell.options[option] == "async_with_pinned_mem"
    if cell.options["checkpoint.enable"] and pinned and cell.cluster.gpu is None:
        reason = f"async_with_pinned_mem needs GPUs, cluster {cell.cluster.name} runs on the CPU"
        yield option, reason, "set it to async"


@rule(RULES, reference=_RECOMPUTATION, is_input=True)
def selected(cell: Cell) -> Problems:
    """Require that `selective_ac_option` is `op` or a whole number above 0."""
    option = "activation_checkpoint.selective_ac_option"
    chosen = cell.options[option]
    remedy = "did you mean 'op'?" if nearest(chosen, ["op"]) else ""
    if chosen and not chosen.strip("0"):
        remedy = "set activation_checkpoint.mode=full to recompute every layer"
    if not re.fullmatch("op|0*[1-9][0-9]*", chosen):
        reason = f"found {chosen!r}, allowed: op, or n from 1 up to recompute every n-th layer"
        yield option, reason, remedy


@rule(RULES, reference=_RECOMPUTATION, is_input=True)
def unused(cell: Cell) -> Problems:
    mode = cell.options["activation_checkpoint.mode"]
    if cell.options[SAVE_LIST] and not cell.saves:
        remedy = "set activation_checkpoint.mode=selective and selective_ac_option=op"
        reason = f"activation_checkpoint.mode {mode} has no use for a list of operators"
        yield SAVE_LIST, reason, remedy
    if cell.options[LAYERS_KEPT] and mode not in ("full", "selective"):
        reason = f"activation_checkpoint.mode {mode} recomputes no layer as a whole"
        yield LAYERS_KEPT, reason, "set activation_checkpoint.mode=selective or full"


@rule(RULES, reference=f"{TORCHTITAN}/components/validate.py", is_input=True)
def validation(cell: Cell) -> Problems:
    """Require a fixed number of validation batches, each of the same size as a training batch."""
    options = cell.options
    if not options["validation.enable"]:
        return
    for name, things, best in (("steps", " batches a validation", 10), ("freq", "", 100)):
        if (found := options[f"validation.{name}"]) < 1:
            yield f"validation.{name}", f"found {found}, allowed: 1 and up{things}", f"try {best}"
    for name in ("seq_len", "local_batch_size"):
        asked, training = f"validation.{name}", options[f"training.{name}"]
        if asked in options.settings and options[asked] != training:
            reason = f"found {options[asked]}, and validation runs with training's {training}"
            yield asked, reason, "leave it out"


def readers(cell: Cell) -> dict[str, str]:
    """Map `training`, and `validation` if enabled, to the option that lists its text files."""
    validation = {"validation": "data.validation_files"}
    return {"training": "data.files"} | (validation if cell.options["validation.enable"] else {})


@rule(RULES, reference=f"{TORCHTITAN}/hf_datasets/text_datasets.py")
def c4_test(cell: Cell) -> Problems:
    for section in readers(cell):
        path = f"{section}.dataset_path"
        if cell.options[f"{section}.dataset"] == "c4_test" and not cell.options[path]:
            found = "is not set, and TorchTitan's package lacks the texts of c4_test"
            yield path, found, "set it to a folder of JSON lines"


@rule(RULES, is_input=True)
def texts(cell: Cell) -> Problems:
    options = cell.options
    used = {section: options[f"{section}.dataset"] for section in readers(cell)}
    for section, files in readers(cell).items():
        is_text = used[section] == TEXT
        if is_text and not options[files]:
            remedy = f"set {files} to globs or folders of .jsonl, .txt or .parquet files"
            yield files, f"is empty, and {section}.dataset is text", remedy
        if options[files] and not is_text:
            found = used[section]
            yield files, f"is set, and {section}.dataset is {found}", f"set {section}.dataset: text"
    for name in ("data.text_key", "data.shuffle_seed"):
        is_set = options[name] != options.stack.options[name].default
        if is_set and TEXT not in used.values():
            found = f"has no effect with training.dataset {used['training']}"
            yield name, found, "leave it out, or set training.dataset: text and data.files"
    # The default is C4, streamed from the hub.
    is_local = used["training"] == TEXT or options["training.dataset_path"]
    asked = ("validation.dataset", "validation.dataset_path", "data.validation_files")
    if "validation" in used and is_local and not any(name in options for name in asked):
        found = f"is {used['validation']}, of the hub, and the recipe trains on texts of its own"
        yield asked[0], found, "set it to text, and data.validation_files to texts held out"


@rule(RULES, reference=f"{TORCHTITAN}/models/moe/moe.py", is_input=True)
def routing(cell: Cell) -> Problems:
    """Refuse routing other than round-robin if TorchTitan's forced load balance is on."""
    option, forced = "debug.moe_routing", "debug.moe_force_load_balance"
    found = cell.options[option]
    if cell.options[forced] and option in cell.options.settings and found != "round_robin":
        yield option, f"found {found}, and {forced} means round_robin", f"set {forced}: false"


@rule(RULES, reference=_CHECKPOINT, is_input=True)
def addresses(cell: Cell) -> Problems:
    """Refuse checkpoint URLs, and a checkpoint folder with `..` in its path."""
    for name in ("checkpoint.folder", "checkpoint.initial_load_path"):
        if (value := cell.options[name]) and "://" in value:
            remedy = "mount the store and name a path on it"
            yield name, f"found {value}, allowed: a path of a file system", remedy
    folder = cell.options["checkpoint.folder"]
    if ".." in Path(folder).parts:
        reason = f"found {folder}, which leaves the cell's folder, where it starts"
        yield "checkpoint.folder", reason, "name an absolute path; each cell gets a folder in it"


@rule(RULES, reference=_CHECKPOINT, is_input=True)
def formats(cell: Cell) -> Problems:
    options, model, in_hf = cell.options, cell.options.model, "checkpoint.initial_load_in_hf"
    alone, save = "checkpoint.initial_load_model_only", "checkpoint.last_save_in_hf"
    if not options["checkpoint.enable"]:
        for name in (in_hf, "checkpoint.initial_load_path", save):
            if options[name]:
                yield name, "has no effect without checkpoints", "set checkpoint.enable: true"
        return
    if options[f"{in_hf}_quantized"] and not options[in_hf]:
        yield f"{in_hf}_quantized", "is for published weights", f"set {in_hf}: true"
    if options[in_hf] and not options[alone]:
        yield alone, "is false, and published weights hold the model alone", "set it to true"
    if options[save] and model:
        # Size of the routed experts' FP32 weights in GB, as an estimate of the whole model's size.
        layers = model.n_layers - model.n_dense_layers
        size = 12.0 * layers * model.num_experts * model.dim * model.expert_hidden / 1e9
        # Rank 0 writes all weights. The other ranks wait in a collective, which may time out.
        if size > 60:
            reason = f"rank 0 would write {size:,.0f} GB as one file, until a collective times out"
            remedy = "leave it out, and run: python submit.py export RUN/CELL --to FOLDER"
            yield save, reason, remedy
