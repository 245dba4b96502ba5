"""Rules for values that TorchTitan accepts by mistake, or rejects only once all ranks run."""

import math
import os
import re
from pathlib import Path

from cookbook.base.errors import nearest
from cookbook.config.cell import Cell, CellRule, Problems, rule, unknown
from cookbook.config.dialect.classes import default_only
from cookbook.config.dialect.names import CONVERTERS, FACTS, LEAST_FP32, TORCHTITAN
from cookbook.config.facts import SAVED_OPERATORS, TEXT, Facts
from cookbook.run.folder import CellFolder

RULES: list[CellRule] = []
_REFERENCE = f"{TORCHTITAN}/config/job_config.py"
_RECOMPUTATION = f"{TORCHTITAN}/distributed/activation_checkpoint.py"
_CHECKPOINT = f"{TORCHTITAN}/components/checkpoint.py"
_INT32 = 2**31 - 1
_STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
# Options that are lists of names, and the names that are allowed in each.
_NAMES: dict[str, tuple[str, ...]] = {
    Facts.compiled_components: ("model", "loss"),
    Facts.converters: tuple(CONVERTERS),
    Facts.load_excluded: _STATES,
    Facts.ac_save_list: SAVED_OPERATORS,
}


@rule(RULES, reference=_REFERENCE, is_input=True)
def bounds(cell: Cell) -> Problems:
    within = {fact.option: fact.within for fact in FACTS}
    for option, setting in cell.options.settings.items():
        (low, high), value = within.get(option) or (-math.inf, math.inf), setting.value
        if not isinstance(value, int | float):
            continue
        if not low <= value <= high:
            allowed = f"{low:g} and up" if high == math.inf else f"{low:g} to {high:g}"
            if low == LEAST_FP32:
                allowed = "above 0 in FP32"
            elif high == math.nextafter(1, 0):
                allowed = f"{low:g} to below 1"
            yield option, f"found {value}, allowed: {allowed}", ""
        elif isinstance(value, int) and high == math.inf and abs(value) > _INT32:
            # C++ reads these, and raises std::out_of_range or wraps around.
            yield option, f"found {value}, allowed: up to {_INT32:,}", ""


@rule([], reference=_REFERENCE, is_input=True)
def refused_options(cell: Cell) -> Problems:
    """Refuse what breaks a promise of the cookbook, or what nothing has shown right."""
    for option, setting in cell.options.settings.items():
        default = cell.options.stack.options[option].default
        if setting.value != default and (words := default_only(option)):
            yield option, f"found {setting.value}, and {words[0]}", words[1] or "leave it out"


@rule(RULES, reference=_REFERENCE, is_input=True)
def names(cell: Cell) -> Problems:
    """Refuse unknown names: TorchTitan ignores some, and rejects others when the job runs."""
    datasets = {one.options[0]: cell.options.stack.datasets for one in cell.facts.readers}
    texts = {one.option: one.allowed for one in FACTS if one.allowed}
    for option, known in {**_NAMES, **texts, **datasets}.items():
        value = cell.options[option] if option else ()
        for name in [value] if isinstance(value, str) else value:
            if name not in known:
                yield unknown(option, name, known)


@rule(RULES, is_input=True)
def variables(cell: Cell) -> Problems:
    """Refuse environment variables that would end the job, or mean another folder, once it runs."""
    for name in ("CELL_DIR", "COOKBOOK_RUNS", "COOKBOOK_RECIPES", "VENV"):
        if (value := os.environ.get(name, "")).startswith(("~", "$")):
            yield name, f"found {value}, and nothing is expanded", "write the whole path"
    allowed = ("full", "nodes", "off")
    if (mode := os.environ.get("COOKBOOK_PREFLIGHT") or "full") not in allowed:
        yield unknown("COOKBOOK_PREFLIGHT", mode, allowed)


@rule(RULES, reference=f"{TORCHTITAN}/tools/profiling.py", is_input=True)
def profiled_steps(cell: Cell) -> Problems:
    """The warmup and recording of one profile must fit into the steps between two profiles."""
    facts, option = cell.facts, Facts.profile_freq
    needed, found = facts.profile_warmup + facts.profile_active, facts.profile_freq
    if facts.profiles and 1 <= found < needed:
        reason = f"found {found}, allowed: {needed} and up (profiler_warmup + profiler_active)"
        yield option, reason, f"try {needed}"
    elif facts.profiles and found > facts.steps:
        reason = f"found {found}, allowed: up to the {facts.steps} steps, or no profile is written"
        yield option, reason, f"try {max(needed, min(found, facts.steps))}"


@rule(RULES, reference=f"{TORCHTITAN}/components/dataloader.py", is_input=True)
def without_workers(cell: Cell) -> Problems:
    """Refuse options of a loader's processes where there are none: TorchTitan drops them."""
    facts = cell.facts
    own: list[tuple[int, str, object]] = [
        (facts.data_workers, Facts.data_workers_stay, facts.data_workers_stay),
        (facts.data_workers, Facts.data_prefetch, facts.data_prefetch),
    ]
    if facts.validates:
        own += [
            (
                facts.validation_workers,
                Facts.validation_workers_stay,
                facts.validation_workers_stay,
            ),
            (facts.validation_workers, Facts.validation_prefetch, facts.validation_prefetch),
        ]
    for workers, option, value in own:
        if value and not workers and option in cell.options:
            number = f"{option.rpartition('.')[0]}.num_workers"
            yield option, f"has no effect with {number} 0", f"leave it out, or set {number}"


@rule(RULES, reference=_REFERENCE, is_input=True)
def kept_checkpoints(cell: Cell) -> Problems:
    if cell.facts.checkpoints and cell.facts.saves_kept == 1:
        reason = "1 would leave none while the next is being written, and TorchTitan refuses it"
        yield Facts.saves_kept, reason, "set it to 2, or to 0 to keep all"


@rule(RULES, reference=_REFERENCE, is_input=True)
def needs_gpus(cell: Cell) -> Problems:
    """Refuse what asks CUDA for memory where there is no GPU: its first use would fail."""
    facts, where = cell.facts, f"needs GPUs, cluster {cell.cluster.name} runs on the CPU"
    if cell.cluster.gpu is not None:
        return
    if facts.checkpoints and facts.async_mode == "async_with_pinned_mem":
        yield Facts.async_mode, f"async_with_pinned_mem {where}", "set it to async"
    for option, value in (
        (Facts.memory_snapshots, facts.memory_snapshots),
        (Facts.cpu_offload, facts.cpu_offload),
    ):
        if value:
            yield option, where, "set it to false"


@rule(RULES, reference=_RECOMPUTATION, is_input=True)
def selected(cell: Cell) -> Problems:
    """Require that selective recomputation names `op` or a whole number above 0."""
    chosen = cell.facts.ac_selective
    remedy = "did you mean 'op'?" if nearest(chosen, ["op"]) else ""
    if chosen and not chosen.strip("0"):
        remedy = f"set {Facts.ac_mode}=full to recompute every layer"
    if not re.fullmatch("op|0*[1-9][0-9]*", chosen):
        reason = f"found {chosen!r}, allowed: op, or n from 1 up to recompute every n-th layer"
        yield Facts.ac_selective, reason, remedy


@rule(RULES, reference=_RECOMPUTATION, is_input=True)
def unused(cell: Cell) -> Problems:
    facts, mode = cell.facts, f"{Facts.ac_mode} {cell.facts.ac_mode}"
    if facts.ac_save_list and not facts.saves:
        remedy = f"set {Facts.ac_mode}=selective and {Facts.ac_selective.rpartition('.')[2]}=op"
        yield Facts.ac_save_list, f"{mode} has no use for a list of operators", remedy
    if facts.ac_layers_kept and facts.ac_mode not in ("full", "selective"):
        remedy = f"set {Facts.ac_mode}=selective or full"
        yield Facts.ac_layers_kept, f"{mode} recomputes no layer as a whole", remedy


@rule(RULES, reference=f"{TORCHTITAN}/components/validate.py", is_input=True)
def validation(cell: Cell) -> Problems:
    """Require a fixed number of validation batches, each of the same size as a training batch."""
    facts = cell.facts
    if not facts.validates:
        return
    for option, found, things, best in (
        (Facts.validation_steps, facts.validation_steps, " batches a validation", 10),
        (Facts.validation_freq, facts.validation_freq, "", 100),
    ):
        if found < 1:
            yield option, f"found {found}, allowed: 1 and up{things}", f"try {best}"
    for option, found, training in (
        (Facts.validation_seq_len, facts.validation_seq_len, facts.seq_len),
        (Facts.validation_batch, facts.validation_batch, facts.local_batch),
    ):
        if option in cell.options and found != training:
            reason = f"found {found}, and validation runs with training's {training}"
            yield option, reason, "leave it out"


@rule(RULES, reference=f"{TORCHTITAN}/hf_datasets/text_datasets.py")
def c4_test(cell: Cell) -> Problems:
    for reader in cell.facts.readers:
        if reader.dataset == "c4_test" and not reader.path:
            found = "is not set, and TorchTitan's package lacks the texts of c4_test"
            yield reader.options[2], found, "set it to a folder of JSON lines"


@rule(RULES, is_input=True)
def texts(cell: Cell) -> Problems:
    facts = cell.facts
    for reader in facts.readers:
        dataset, files, _ = reader.options
        is_text = reader.dataset == TEXT
        if is_text and not reader.files:
            remedy = f"set {files} to globs or folders of .jsonl, .txt or .parquet files"
            yield files, f"is empty, and {dataset} is text", remedy
        if is_text and not facts.text_key:
            yield Facts.text_key, "is empty", "name the key of a text in its line of JSON"
        if reader.files and not is_text:
            yield files, f"is set, and {dataset} is {reader.dataset}", f"set {dataset}: text"
    own = cell.options.stack.options
    for option, value in (
        (Facts.text_key, facts.text_key),
        (Facts.shuffle_seed, facts.shuffle_seed),
    ):
        if value != own[option].default and all(one.dataset != TEXT for one in facts.readers):
            found = f"has no effect with {Facts.dataset} {facts.dataset}"
            remedy = f"leave it out, or set {Facts.dataset}: text and {Facts.text_files}"
            yield option, found, remedy
    # The default is C4, streamed from the hub.
    is_local = facts.dataset == TEXT or facts.dataset_path
    asked = (Facts.validation_dataset, Facts.validation_files)
    is_asked = asked[0] in cell.options or facts.validation_path or facts.validation_files
    if facts.validates and is_local and not is_asked:
        found = (
            f"is {facts.validation_dataset}, of the hub, and the recipe trains on texts of its own"
        )
        remedy = f"set it to text, and {asked[1]} to texts held out"
        yield asked[0], found, remedy


@rule(RULES, reference=f"{TORCHTITAN}/models/moe/moe.py", is_input=True)
def routing(cell: Cell) -> Problems:
    """Refuse routing other than round-robin if TorchTitan's forced load balance is on."""
    option, forced, found = Facts.moe_routing, Facts.is_balance_forced, cell.facts.moe_routing
    if cell.facts.is_balance_forced and option in cell.options and found != "round_robin":
        yield option, f"found {found}, and {forced} means round_robin", f"set {forced}: false"


@rule(RULES, reference=_CHECKPOINT, is_input=True)
def addresses(cell: Cell) -> Problems:
    """Refuse checkpoint URLs, and a checkpoint folder with `..` in its path."""
    folder = cell.facts.checkpoint_folder
    named = {Facts.checkpoint_folder: folder, Facts.initial_load_path: cell.facts.initial_load_path}
    for option, value in named.items():
        if value and "://" in value:
            remedy = "mount the store and name a path on it"
            yield option, f"found {value}, allowed: a path of a file system", remedy
    first, *_ = (*Path(folder).parts, ".")
    why, remedy = "", "name an absolute path; each cell gets a folder in it"
    if ".." in Path(folder).parts:
        why = "which leaves the cell's folder, where it starts"
    elif first[0] in "~$":
        why, remedy = "and nothing is expanded", "write the whole path"
    elif (folder and first in (".", *CellFolder.names)) or first.startswith("attempt-"):
        why, remedy = "the name of another file of the cell", "leave it out"
    if why:
        yield Facts.checkpoint_folder, f"found {folder}, {why}", remedy


@rule(RULES, reference=_CHECKPOINT, is_input=True)
def formats(cell: Cell) -> Problems:
    facts, model, in_hf = cell.facts, cell.options.model, Facts.initial_load_in_hf
    if not facts.checkpoints:
        for option, value in (
            (in_hf, facts.initial_load_in_hf),
            (Facts.initial_load_path, facts.initial_load_path),
            (Facts.last_save_in_hf, facts.last_save_in_hf),
        ):
            if value:
                yield option, "has no effect without checkpoints", f"set {Facts.checkpoints}: true"
        return
    if facts.initial_load_quantized and not facts.initial_load_in_hf:
        yield Facts.initial_load_quantized, "is for published weights", f"set {in_hf}: true"
    if facts.initial_load_in_hf and not facts.initial_load_model_only:
        reason = "is false, and published weights hold the model alone"
        yield Facts.initial_load_model_only, reason, "set it to true"
    if not (facts.last_save_in_hf and model):
        return
    if why := cell.options.family and cell.options.family.unpublished(model):
        yield Facts.last_save_in_hf, f"no published format: {why}", "leave it out"
    else:
        # Size of the routed experts' FP32 weights in GB, as an estimate of the whole model's size.
        layers = model.n_layers - model.n_dense_layers
        size = 12.0 * layers * model.num_experts * model.dim * model.expert_hidden / 1e9
        # Rank 0 writes all weights. The other ranks wait in a collective, which may time out.
        if size > 60:
            reason = f"rank 0 would write {size:,.0f} GB as one file, until a collective times out"
            remedy = "leave it out, and run: python submit.py export RUN/CELL --to FOLDER"
            yield Facts.last_save_in_hf, reason, remedy
        elif not facts.last_save_model_only:
            reason = "needs the model alone: the run would end with an error in its last save"
            yield Facts.last_save_in_hf, reason, f"set {Facts.last_save_model_only}: true"
