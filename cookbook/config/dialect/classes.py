"""The class of every option of the stack: understood, refused or passed on.

- understood: a fact in `names.py`, or a size of the model; rules, predictions and records know it
- refused: set by the scripts, or broken by any other value than the default
- passed on: no value changes what is trained; `check` lists those that a cell sets

An option of a new TorchTitan is in no class until it is judged, and a test fails.
"""

from collections.abc import Mapping
from typing import Any

from cookbook.config.dialect.names import CONVERTERS, FACTS, OVERRIDES, SET_BY_SCRIPTS, Names

UNDERSTOOD, REFUSED, PASSED_ON = "understood", "refused", "passed on"
_UNPROVED = "no test or measurement has shown it right"
# Options that may only have their default, by name or section: why, and the way to what they do.
DEFAULT_ONLY: Mapping[str, tuple[str, str]] = {
    Names.config_file: ("no check would read its options", "write them into a recipe"),
    "model.tokenizer_path": ("TorchTitan dropped it", f"set {Names.assets}"),
    "experimental.custom_args_module": (
        "its options would be unknown to every check",
        "add options to the stack's job_config.py in cookbook/titan",
    ),
    "optimizer.early_step_in_backward": ("it skips the clipping of gradients", ""),
    "parallelism.enable_async_tensor_parallel": (_UNPROVED, ""),
    Names.cp: ("context parallelism is unproved: on CPU ranks it fails", "set it to 1"),
    "parallelism.context_parallel_load_balancer": (_UNPROVED, ""),
    "parallelism.context_parallel_rotate_method": (_UNPROVED, ""),
    "parallelism.module_fqns_per_model_part": (_UNPROVED, f"set {Names.layers_per_stage}"),
    "parallelism.pipeline_parallel_schedule_csv": (_UNPROVED, f"set {Names.schedule}"),
    "checkpoint.create_seed_checkpoint": (
        "the job would end without a step",
        f"set {Names.seed}: it determines the initial weights in every layout",
    ),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (_UNPROVED, ""),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (_UNPROVED, ""),
    "quantize.linear.float8.recipe_name": ("TorchAO's recipes were slower than BF16", ""),
    "quantize.linear.float8.emulate": ("a device without FP8 emulates it by itself", ""),
    "comm.mode": ("the ranks would exchange nothing", "for a rehearsal, run: submit.py check"),
    "memory_estimation": ("the job would train nothing", "submit.py check predicts the memory"),
    "fault_tolerance": ("torchft is not part of the stack", "the supervisor restarts what fails"),
}
PASSED_ON_OPTIONS = frozenset(
    {
        *("job.print_config", "job.save_config_file", "metrics.save_for_all_ranks"),
        *(
            "training.gc_debug",
            "training.dataloader.pin_memory",
            "validation.dataloader.pin_memory",
        ),
        *("checkpoint.enable_ft_dataloader_checkpoints", "checkpoint.export_dtype"),
        *("checkpoint.enable_first_step_checkpoint", "activation_checkpoint.debug"),
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        *("activation_checkpoint.early_stop", "activation_checkpoint.preserve_rng_state"),
        "activation_checkpoint.visualize_memory_budget_pareto",
        *("comm.save_traces_file_prefix", "debug.deterministic", "debug.deterministic_warn_only"),
        "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice",
    }
)
_KNOWN = {fact.option for fact in FACTS}
_KNOWN |= {part for one in CONVERTERS.values() for part in (one.recipe, one.emulate, one.filter)}


def default_only(name: str) -> tuple[str, str] | None:
    """Return why option `name` may only have its default, and a remedy; None if it may differ."""
    return DEFAULT_ONLY.get(name) or DEFAULT_ONLY.get(name.partition(".")[0])


def class_of(name: str) -> str | None:
    """Return the class of option `name`; None if nobody has judged it."""
    if name in SET_BY_SCRIPTS or default_only(name):
        return REFUSED
    if name in _KNOWN or name.startswith(OVERRIDES):
        return UNDERSTOOD
    return PASSED_ON if name in PASSED_ON_OPTIONS else None


def not_judged(options: Any) -> list[str]:
    """Return the options that are passed on, of those that `options` sets to other than default."""
    default = options.stack.options
    set_here = {name: one.value for name, one in options.settings.items()}
    changed = [name for name, value in set_here.items() if value != default[name].default]
    return sorted(name for name in changed if class_of(name) == PASSED_ON)
