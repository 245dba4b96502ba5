"""The pinned TorchTitan's name for each fact of a job, and links to its source code.

Only this package spells option names. Other rooms read facts (`config/facts.py`): `facts.seq_len`
is a job's value, and `Facts.seq_len` the option's name, for messages and new settings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, overload

from cookbook.config.pins import read_pins

T = TypeVar("T")


class _Values(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...


@dataclass(frozen=True)
class Fact(Generic[T]):
    """An option: its name if read on the class, its value if read on an instance.

    If this TorchTitan lacks the option, its name is empty, and `value` holds for every job.
    `within`: the smallest and the largest value that makes sense. `allowed`: the texts that do.
    `decides`: what the option decides, of the columns below; a list of options that must hold all
    of a kind asks for these (`options_that`).
    """

    option: str = ""
    value: T | None = None
    within: tuple[float, float] | None = None
    allowed: tuple[str, ...] = ()
    decides: tuple[str, ...] = ()

    @overload
    def __get__(self, instance: None, owner: type) -> str: ...

    @overload
    def __get__(self, instance: "Names", owner: type) -> T: ...

    def __get__(self, instance: "Names | None", owner: type) -> Any:
        if instance is None:
            return self.option
        return instance.options[self.option] if self.option else self.value


_FROM_0, _FROM_1, _SHARE = (0, math.inf), (1, math.inf), (0, 1)
LEAST_FP32 = 2.0**-126  # what is smaller may be 0 on a device
_ABOVE_0, _BELOW_1 = (LEAST_FP32, math.inf), (0, math.nextafter(1, 0))
# Columns: what a step reads; what a saved position in it counts; which files hold it.
TEXTS, POSITION, FILES = "texts", "position", "files"


class Names:
    """The facts of a job that are options, TorchTitan's or added by the cookbook's hooks."""

    options: _Values

    # The model.
    model_name = Fact[str]("model.name")
    flavor = Fact[str]("model.flavor")
    assets = Fact[str | None]("model.hf_assets_path", decides=(TEXTS,))
    print_converted = Fact[bool]("model.print_after_conversion")
    converters = Fact[list[str]]("model.converters")
    attention = Fact[str]("model.attention")
    row_kernels = Fact[bool]("cookbook.row_kernels")
    self_check = Fact[bool]("cookbook.self_check")
    mx_experts = Fact[list[str]]("quantize.grouped_mm.mx.fqns")
    float8_experts = Fact[list[str]]("quantize.grouped_mm.float8.fqns")
    mx_recipe = Fact[str](
        "quantize.linear.mx.recipe_name", allowed=("mxfp8_cublas", "mxfp8_cublas_rceil")
    )

    # The batch, and how long to train.
    steps = Fact[int]("training.steps", within=_FROM_1)
    seq_len = Fact[int]("training.seq_len", decides=(TEXTS,))
    local_batch = Fact[int]("training.local_batch_size")
    global_batch = Fact[int]("training.global_batch_size")  # -1: local batch x replicas
    max_norm = Fact[float]("training.max_norm", within=_FROM_0)  # 0: no clipping
    max_skipped_steps = Fact[int]("training.max_skipped_steps", within=_FROM_0)
    gc_freq = Fact[int]("training.gc_freq", within=_FROM_1)

    # Number formats and where the state lives.
    dtype = Fact[str]("training.dtype")
    mixed_precision_param = Fact[str]("training.mixed_precision_param")
    mixed_precision_reduce = Fact[str]("training.mixed_precision_reduce")
    cpu_offload = Fact[bool]("training.enable_cpu_offload")
    is_compile_on = Fact[bool]("compile.enable")
    compiled_components = Fact[list[str]]("compile.components")
    compiler = Fact[str]("compile.backend", allowed=("inductor", "aot_eager", "eager"))

    # The layout over ranks.
    pp = Fact[int]("parallelism.pipeline_parallel_degree")
    dp_replicate = Fact[int]("parallelism.data_parallel_replicate_degree")
    dp_shard = Fact[int]("parallelism.data_parallel_shard_degree")
    cp = Fact[int]("parallelism.context_parallel_degree")
    tp = Fact[int]("parallelism.tensor_parallel_degree")
    ep = Fact[int]("parallelism.expert_parallel_degree")
    etp = Fact[int]("parallelism.expert_tensor_parallel_degree")
    fsdp_reshard = Fact[str]("parallelism.fsdp_reshard_after_forward")
    is_loss_parallel_off = Fact[bool]("parallelism.disable_loss_parallel")

    # Pipelines.
    schedule = Fact[str]("parallelism.pipeline_parallel_schedule")
    layers_per_stage = Fact[int | None]("parallelism.pipeline_parallel_layers_per_stage")
    first_stage_less = Fact[int](
        "parallelism.pipeline_parallel_first_stage_less_layers", within=_FROM_0
    )
    last_stage_less = Fact[int](
        "parallelism.pipeline_parallel_last_stage_less_layers", within=_FROM_0
    )
    microbatch = Fact[int]("parallelism.pipeline_parallel_microbatch_size")
    ep_overlap = Fact[bool]("parallelism.pipeline_parallel_expert_parallel_overlap")

    # Token dispatch and routing.
    comm_backend = Fact[str]("parallelism.expert_parallel_comm_backend")
    dispatch_precision = Fact[str]("parallelism.expert_parallel_a2a_dispatch_fwd_precision")
    combine_precision = Fact[str]("parallelism.expert_parallel_a2a_combine_bwd_precision")
    ep_chunks = Fact[int]("deepep.num_chunks", within=_FROM_1)
    score_activations = Fact[bool]("deepep.score_activations")
    is_balance_forced = Fact[bool]("debug.moe_force_load_balance")
    moe_routing = Fact[str]("debug.moe_routing")

    # Recomputation (activation checkpointing) and the loss.
    ac_mode = Fact[str]("activation_checkpoint.mode")
    ac_selective = Fact[str]("activation_checkpoint.selective_ac_option")
    ac_budget = Fact[float]("activation_checkpoint.memory_budget", within=_SHARE)
    ac_save_list = Fact[list[str]]("activation_checkpoint.op_sac_save_list")
    ac_determinism = Fact[str](
        "activation_checkpoint.determinism_check", allowed=("default", "none")
    )
    ac_layers_kept = Fact[int]("activation_checkpoint.num_layers_kept", within=_FROM_0)
    loss_chunks = Fact[int]("loss.num_chunks", within=_FROM_0)

    # The optimizer and the learning rate's schedule.
    optimizer_name = Fact[str]("optimizer.name", allowed=("Adam", "AdamW"))
    optimizer = Fact[str]("optimizer.implementation")
    lr = Fact[float]("optimizer.lr", within=_FROM_0)
    beta1 = Fact[float]("optimizer.beta1", within=_BELOW_1)
    beta2 = Fact[float]("optimizer.beta2", within=_BELOW_1)
    eps = Fact[float]("optimizer.eps", within=_ABOVE_0)
    weight_decay = Fact[float]("optimizer.weight_decay", within=_FROM_0)
    warmup_steps = Fact[int]("lr_scheduler.warmup_steps", within=_FROM_0)
    total_steps = Fact[int | None]("lr_scheduler.total_steps", within=_FROM_1)  # None: `steps`
    decay_type = Fact[str]("lr_scheduler.decay_type")
    decay_ratio = Fact[float | None]("lr_scheduler.decay_ratio", within=_SHARE)
    min_lr_factor = Fact[float]("lr_scheduler.min_lr_factor", within=_SHARE)
    seed = Fact[int | None]("debug.seed", within=(0, 2**63 - 1))

    # Texts, and validation on others.
    dataset = Fact[str]("training.dataset", decides=(TEXTS, POSITION))
    dataset_path = Fact[str | None]("training.dataset_path", decides=(TEXTS, FILES))
    data_workers = Fact[int]("training.dataloader.num_workers", within=_FROM_0, decides=(POSITION,))
    data_prefetch = Fact[int | None]("training.dataloader.prefetch_factor", within=_FROM_1)
    data_workers_stay = Fact[bool]("training.dataloader.persistent_workers")
    text_files = Fact[list[str]]("data.files", decides=(TEXTS, FILES))
    text_key = Fact[str]("data.text_key", decides=(TEXTS, FILES))
    shuffle_seed = Fact[int](
        "data.shuffle_seed", within=(-1, math.inf), decides=(TEXTS, POSITION)
    )  # -1: the files' order
    validates = Fact[bool]("validation.enable")
    validation_dataset = Fact[str]("validation.dataset")
    validation_path = Fact[str | None]("validation.dataset_path")
    validation_files = Fact[list[str]]("data.validation_files")
    validation_workers = Fact[int]("validation.dataloader.num_workers", within=_FROM_0)
    validation_prefetch = Fact[int | None]("validation.dataloader.prefetch_factor", within=_FROM_1)
    validation_workers_stay = Fact[bool]("validation.dataloader.persistent_workers")
    validation_steps = Fact[int]("validation.steps")
    validation_freq = Fact[int]("validation.freq")
    validation_seq_len = Fact[int]("validation.seq_len")
    validation_batch = Fact[int]("validation.local_batch_size")

    # Checkpoints: those that training writes, and the weights that it starts from.
    checkpoints = Fact[bool]("checkpoint.enable")
    checkpoint_folder = Fact[str]("checkpoint.folder")
    save_interval = Fact[int]("checkpoint.interval", within=_FROM_1)
    save_minutes = Fact[float]("checkpoint.interval_minutes", within=_FROM_0)
    saves_kept = Fact[int]("checkpoint.keep_latest_k", within=_FROM_0)
    async_mode = Fact[str]("checkpoint.async_mode")
    load_only = Fact[bool]("checkpoint.load_only")
    load_step = Fact[int]("checkpoint.load_step", within=(-1, math.inf))
    load_excluded = Fact[list[str]]("checkpoint.exclude_from_loading")
    last_save_model_only = Fact[bool]("checkpoint.last_save_model_only")
    last_save_in_hf = Fact[bool]("checkpoint.last_save_in_hf")
    initial_load_path = Fact[str | None]("checkpoint.initial_load_path")
    initial_load_in_hf = Fact[bool]("checkpoint.initial_load_in_hf")
    initial_load_quantized = Fact[bool]("checkpoint.initial_load_in_hf_quantized")
    initial_load_model_only = Fact[bool]("checkpoint.initial_load_model_only")

    # Logs, profiles and communication.
    log_freq = Fact[int]("metrics.log_freq", within=_FROM_1)
    is_tensorboard_on = Fact[bool]("metrics.enable_tensorboard")
    is_plain = Fact[bool]("metrics.disable_color_printing")
    is_wandb_on = Fact[bool]("metrics.enable_wandb")
    wandb_project = Fact[str | None]("wandb.project")
    wandb_name = Fact[str | None]("wandb.name")
    wandb_group = Fact[str | None]("wandb.group")
    wandb_tags = Fact[list[str]]("wandb.tags")
    profiles = Fact[bool]("profiling.enable_profiling")
    profile_freq = Fact[int]("profiling.profile_freq", within=_FROM_1)
    profile_warmup = Fact[int]("profiling.profiler_warmup", within=_FROM_0)
    profile_active = Fact[int]("profiling.profiler_active", within=_FROM_1)
    memory_snapshots = Fact[bool]("profiling.enable_memory_snapshot")
    comm_trace_events = Fact[int]("comm.trace_buf_size", within=_FROM_0)
    init_timeout = Fact[int]("comm.init_timeout_seconds", within=_FROM_1)
    train_timeout = Fact[int]("comm.train_timeout_seconds", within=_FROM_1)

    # What the job is, and what it must find active: set by the scripts alone.
    description = Fact[str]("job.description")
    config_file = Fact[str | None]("job.config_file")
    config_module = Fact[str]("job.custom_config_module")
    custom_import = Fact[str]("experimental.custom_import")
    dump_folder = Fact[str]("job.dump_folder")
    tensorboard_folder = Fact[str]("metrics.save_tb_folder")
    comm_traces_folder = Fact[str]("comm.save_traces_folder")
    profiles_folder = Fact[str]("profiling.save_traces_folder")
    snapshots_folder = Fact[str]("profiling.save_memory_snapshot_folder")
    precision = Fact[str]("cookbook.precision")
    ep_backend = Fact[str]("cookbook.ep_backend")
    grouped_gemms = Fact[str]("cookbook.grouped_gemms")
    linear_layers = Fact[str]("cookbook.linear_layers")
    dispatch = Fact[str]("cookbook.dispatch")
    emulated = Fact[bool]("cookbook.emulated")


OVERRIDES = "model.overrides."  # prefix of the options that replace sizes of the flavor
# The options of the parallel degrees.
DEGREES: dict[str, str] = {
    degree: getattr(Names, degree)
    for degree in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
}
# The keys of an overlay's `expect` block.
EXPECTED = {
    "grouped_gemms": Names.grouped_gemms,
    "linear_layers": Names.linear_layers,
    "dispatch": Names.dispatch,
}
_IN_ATTEMPT = "it is in the attempt's folder"
# Options that only the scripts may set, and what a user can do instead.
SET_BY_SCRIPTS = {
    Names.dump_folder: "set CELL_DIR or COOKBOOK_RUNS in the environment",
    Names.tensorboard_folder: _IN_ATTEMPT,
    Names.comm_traces_folder: _IN_ATTEMPT,
    Names.profiles_folder: _IN_ATTEMPT,
    Names.snapshots_folder: _IN_ATTEMPT,
    Names.config_module: "add options to the stack's job_config.py in cookbook/titan",
    Names.custom_import: "add it to the stack's package in cookbook/titan",
    Names.precision: "use --precision, or PRECISION before sbatch",
    Names.ep_backend: "use --ep-backend, or EP_BACKEND before sbatch",
    Names.grouped_gemms: "set grouped_gemms in the precision's `expect` block",
    Names.linear_layers: "set linear_layers in the precision's `expect` block",
    Names.dispatch: "set dispatch in the EP backend's `expect` block",
    Names.emulated: "it follows from precision and cluster",
}
# Options that 0 turns off, as do null and inf; the value is what TorchTitan takes for it.
OFF = {Names.max_norm: "inf"}
# What other projects call an option.
ALIASES = {
    **dict.fromkeys(("learning_rate", "max_lr"), Names.lr),
    **dict.fromkeys(("max_steps", "num_steps", "train_iters"), Names.steps),
    **dict.fromkeys(("batch_size", "micro_batch_size"), Names.local_batch),
    **dict.fromkeys(("seq_length", "max_length", "context"), Names.seq_len),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_grad_norm"), Names.max_norm),
    **dict.fromkeys(("dp", "fsdp"), Names.dp_shard),
    **dict.fromkeys(("save_interval", "save_steps"), Names.save_interval),
}
FACTS: list[Fact[Any]] = [fact for fact in vars(Names).values() if isinstance(fact, Fact)]


def options_that(decide: str) -> list[str]:
    """Return the options of a column: those that decide the texts, say."""
    return [fact.option for fact in FACTS if decide in fact.decides and fact.option]


@dataclass(frozen=True)
class Converter:
    """A model converter that quantizes GEMMs; `name` is a value of `converters`."""

    name: str
    gemms: str  # `grouped_gemms` or `linear_layers`
    format: str  # the active format as logs name it
    multiple: int  # every dimension of the weights must be a multiple of this
    recipe: str = ""  # the option whose value is the format instead; empty if there is none
    emulate: str = ""  # the option that turns on emulation in software; empty if there is none
    filter: str = ""  # the option that lists modules to leave out; empty if there is none
    modules: str = ""  # the option that lists modules to convert; empty if there is none

    @property
    def is_mx(self) -> bool:
        return self.name.endswith("mx")

    def format_of(self, options: Any) -> str:
        """Return the active format, as logs name it, under these options."""
        return str(options[self.recipe]) if self.recipe else self.format


CONVERTERS = {
    one.name: one
    for one in (
        Converter(
            *("quantize.grouped_mm.mx", "grouped_gemms", "mxfp8", 32),
            recipe="quantize.grouped_mm.mx.recipe_name",
            emulate="quantize.grouped_mm.mx.emulate",
            modules=Names.mx_experts,
        ),
        Converter(
            *("quantize.linear.mx", "linear_layers", "mx", 32),
            emulate="quantize.linear.mx.emulate",
            filter="quantize.linear.mx.filter_fqns",
        ),
        Converter(
            *("quantize.grouped_mm.float8", "grouped_gemms", "fp8", 16),
            modules=Names.float8_experts,
        ),
        Converter(
            *("quantize.linear.float8", "linear_layers", "fp8", 16),
            filter="quantize.linear.float8.filter_fqns",
        ),
    )
}

# Options, by name or prefix, that another one turns off, and when it does.
Switch = tuple[str, Callable[[_Values], bool]]


def _unless(*options: str) -> Switch:
    return options[0], lambda own: not any(own[one] for one in options)


def _if(option: str, *values: object) -> Switch:
    return option, lambda own: own[option] in values


def _without_converter(name: str) -> Switch:
    return Names.converters, lambda own: name not in own[Names.converters]


SWITCHES: dict[str, Switch] = {
    "deepep.": _if(Names.comm_backend, "standard"),
    "validation.": _unless(Names.validates),
    Names.validation_files: _unless(Names.validates),
    "checkpoint.": _unless(Names.checkpoints),
    "checkpoint.export_dtype": _unless(Names.last_save_model_only),
    "profiling.": _unless(Names.profiles, Names.memory_snapshots),
    "compile.": _unless(Names.is_compile_on),
    "metrics.save_for_all_ranks": _unless(Names.is_tensorboard_on, Names.is_wandb_on),
    "debug.deterministic_warn_only": _unless("debug.deterministic"),
    Names.ac_budget: _if(Names.ac_mode, "none", "selective", "full"),
    Names.ac_selective: _if(Names.ac_mode, "none", "full", "memory_budget"),
    "activation_checkpoint.": _if(Names.ac_mode, "none"),
    "parallelism.pipeline_parallel_": _if(Names.pp, 1),
    Names.is_loss_parallel_off: _if(Names.tp, 1),
    Names.decay_type: _if(Names.decay_ratio, 0),
    Names.min_lr_factor: _if(Names.decay_ratio, 0),
    **{f"{name}.": _without_converter(name) for name in CONVERTERS},
}

# URLs of source code at the stack's versions; for FlashAttention, of the main branch.
_PINS = {pin.name: pin.value for pin in read_pins()}
PACKAGE = f"cookbook.titan.tt_{_PINS['torchtitan'].replace('.', '_')}"
TORCHTITAN = f"https://github.com/pytorch/torchtitan/blob/v{_PINS['torchtitan']}/torchtitan"
TORCHAO = f"https://github.com/pytorch/ao/blob/v{_PINS['torchao']}/torchao"
PIPELINING = (
    f"https://github.com/pytorch/pytorch/blob/v{_PINS['torch']}/torch/distributed/pipelining/"
    "schedules.py"
)
FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute"
