"""The options that the cookbook adds to TorchTitan's `JobConfig`, and the table of all options.

`--job.custom_config_module` names this module. TorchTitan merges these dataclasses, section by
section and field by field, into its own. The merge and `option_table` read the types at run time,
so do not add `from __future__ import annotations`.

    python -m cookbook.titan.tt_0_2_2.job_config > cookbook/titan/tt_0_2_2/options.json

prints the table of all options and models. The driver reads this table instead of importing torch,
so `submit.py` responds at once; a test compares the table with the installed TorchTitan.
"""

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config import ConfigManager
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from cookbook.titan.tt_0_2_2.families import FAMILIES, REFUSED
from cookbook.titan.tt_0_2_2.text_data import DATASET


@dataclass
class Cookbook:
    precision: str = ""
    """The name of the precision overlay, for the log and the report."""

    ep_backend: str = ""
    """The name of the EP backend overlay, for the log and the report."""

    grouped_gemms: str = ""
    """What the precision overlay declares for the routed experts' grouped GEMMs: `bf16`, `mxfp8`,
    `mxfp8_wgrad_with_hp` or `fp8`. The run ends at its first step if another is active.
    Empty declares nothing, here and in the next two options."""

    linear_layers: str = ""
    """What the precision overlay declares for linear layers: `bf16`, `mx` or `float8`."""

    dispatch: str = ""
    """What the EP backend overlay declares for the exchange of tokens: `standard`, `deepep` or
    `mxfp8` (both exchanges quantized). Not checked if expert_parallel_degree is 1."""

    emulated: bool = False
    """Whether the driver asked for emulated low precision (numerics only, never a speed-up)."""

    self_check: bool = True
    """Compare every kernel of the job with a reference on its own GPU, before the first step. A
    wrong kernel ends the job; the message names it and an option that avoids it."""

    row_kernels: bool = False
    """For the EP backends `standard` and `mxfp8_a2a`: group the routed rows by expert and sum them
    back into tokens with the cookbook's kernels, and apply the routing scores to the experts'
    activations. The sum is the same up to rounding. `deepep` always uses such kernels.
    The log's `cookbook active` line names them."""


@dataclass
class MoEOverrides:
    num_experts: int | None = None
    """The number of routed experts in a layer."""

    num_shared_experts: int | None = None
    """The number of shared experts in a layer, each as wide as a routed one; 0 for none."""

    top_k: int | None = None
    """The number of routed experts that a token goes to."""

    num_expert_groups: int | None = None
    """The number of groups for a router that limits a token to some groups; 0 for no limit."""

    num_limited_groups: int | None = None
    """The number of groups that a token's experts may be in."""


@dataclass
class Overrides:
    n_layers: int | None = None
    """The number of layers, dense ones included. Unset, here and below: the flavor's size."""

    n_dense_layers: int | None = None
    """DeepSeek-V3: the number of first layers that have no experts."""

    dim: int | None = None
    """The hidden size."""

    inter_dim: int | None = None
    """DeepSeek-V3: the width of a dense layer's feed-forward."""

    moe_inter_dim: int | None = None
    """The width of one expert."""

    n_heads: int | None = None
    """The number of attention heads."""

    n_kv_heads: int | None = None
    """Qwen3-MoE: the number of key and value heads."""

    q_lora_rank: int | None = None
    """DeepSeek-V3: the width of the query latent; 0 to project queries directly."""

    kv_lora_rank: int | None = None
    """DeepSeek-V3: the width of the key and value latent."""

    vocab_size: int | None = None
    """The number of tokens in the vocabulary."""

    moe_args: MoEOverrides = field(default_factory=MoEOverrides)


@dataclass
class Model:
    attention: Literal["flavor", "flash_attention_4"] = "flavor"
    """The flavor's attention (FlexAttention from 16B on, as published), or FlashAttention-4 with
    the same mask. The log's `cookbook active` line names the one that ran."""

    overrides: Overrides = field(default_factory=Overrides)


@dataclass
class ActivationCheckpoint:
    op_sac_save_list: list[str] = field(default_factory=list)
    """The operators whose results are saved by `mode=selective` with `selective_ac_option=op`:
    `attention`, `communication` (dispatch and combine), `grouped_mm` (the routed experts'
    GEMMs) and `mm` (other GEMMs: in compiled layers with experts, those whose inner dimension is at
    least the hidden size; elsewhere every second one). Empty means TorchTitan's own list: all but
    `grouped_mm`, and no `mm` in compiled layers with experts. The log's `cookbook active` line
    names the saved ones."""

    num_layers_kept: int = 0
    """The number of final layers of each pipeline stage that `mode=full` or `selective` does not
    recompute, to use spare memory one layer at a time."""


@dataclass
class Checkpoint:
    interval_minutes: float = 0.0
    """Save after the first step that ends this many minutes after the last save began, instead of
    every `checkpoint.interval` steps; 0 counts steps. Rank 0's clock decides, and never while
    another checkpoint is being written."""

    last_save_model_only: bool = False
    """Save the last step without the optimizer, in a third of the space: nothing can continue from
    it. TorchTitan's own default is true."""


@dataclass
class Debug:
    moe_routing: Literal["trained", "round_robin", "random"] = "trained"
    """How tokens reach experts: by the trained router, or forced for benchmarks. `round_robin` is
    `debug.moe_force_load_balance`: at EP 32 each token goes to one rank. `random` deals experts
    uniformly under the router's group limit: a token goes to as many ranks as in trained routing.
    """


@dataclass
class Loss:
    num_chunks: int = 0
    """The number of chunks into which the loss splits a batch's tokens, so that only one chunk's
    logits exist at a time (8 is a good number, as in later TorchTitan). 0 means TorchTitan's own
    loss, over all logits at once. The gradients are the same."""


@dataclass
class DeepEP:
    num_chunks: int = 1
    """The number of chunks into which an MoE layer splits its tokens: while the experts compute
    one chunk, the next is being dispatched and the previous one combined."""

    score_activations: bool = False
    """Apply the routing scores to the experts' activations instead of their outputs. The sum is
    the same up to rounding. No gradient then needs the outputs: they are not kept, and
    recomputation skips them and their combine."""


@dataclass
class Training:
    max_skipped_steps: int = 0
    """How many steps may be skipped because the gradient norm is not finite; the job fails at the
    next such step. 0 skips none, as in TorchTitan."""


@dataclass
class Data:
    files: list[str] = field(default_factory=list)
    """The texts of `training.dataset=text`: globs, files or folders of .jsonl, .txt or .parquet
    files, also .gz and .zst. `0.7:web/*.jsonl,0.3:code/*.parquet#content` mixes sources by their
    share of the tokens; the key after `#` replaces `data.text_key` for its files. A .txt file is a
    document; above 256 KiB it is cut at line ends. `hub:OWNER/NAME@REVISION:CONFIG:SPLIT` streams a
    data set of the Hugging Face hub; all but the name can be left out (`train` is the split)."""

    validation_files: list[str] = field(default_factory=list)
    """The same for `validation.dataset=text`."""

    text_key: str = "text"
    """The key, or the column, that holds a document's text where its source names no other."""

    shuffle_seed: int = -1
    """Shuffle files and documents anew in each epoch, 4,096 documents at a time; -1 keeps the
    order of the files."""


@dataclass
class Parallelism:
    expert_parallel_a2a_dispatch_fwd_precision: Literal["default", "mxfp8"] = "default"
    """Precision of the tokens that the standard all-to-all sends to the experts in the forward."""

    expert_parallel_a2a_combine_bwd_precision: Literal["default", "mxfp8"] = "default"
    """Precision of the gradients that the combine's all-to-all sends back in the backward."""


@dataclass
class MXLinear:
    emulate: bool = False
    """Quantize with PyTorch operations and multiply in high precision; runs on any device."""


@dataclass
class MXGroupedMM:
    recipe_name: Literal["mxfp8", "mxfp8_wgrad_with_hp"] = "mxfp8"
    """`mxfp8_wgrad_with_hp` leaves the weight gradient's GEMM in high precision."""

    emulate: bool = False
    """Quantize with PyTorch operations and multiply in high precision; runs on any device."""


@dataclass
class Float8Linear:
    recipe_name: Literal["power_of_two"] = "power_of_two"
    """A tensor is quantized once, with a power-of-two scale a row; the weight gradient reads a
    transposed copy of the same rows with one scale. TorchAO's recipes were slower than BF16."""


@dataclass
class QuantizedLinear:
    mx: MXLinear = field(default_factory=MXLinear)
    float8: Float8Linear = field(default_factory=Float8Linear)


@dataclass
class QuantizedGroupedMM:
    mx: MXGroupedMM = field(default_factory=MXGroupedMM)


@dataclass
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)


@dataclass
class Wandb:
    project: str | None = None
    """The project in Weights & Biases; unset: moe-cookbook. Where the environment has the variable
    of one of these options (WANDB_PROJECT, WANDB_RUN_NAME, WANDB_RUN_GROUP, WANDB_TAGS), that
    counts."""

    name: str | None = None
    """The run's name; unset: the cell's."""

    group: str | None = None
    """The group of runs to which this one belongs."""

    tags: list[str] = field(default_factory=list)
    """The run's tags."""


@dataclass
class JobConfig:
    """Options added to TorchTitan's sections, and new sections, from cookbook to wandb."""

    cookbook: Cookbook = field(default_factory=Cookbook)
    model: Model = field(default_factory=Model)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    debug: Debug = field(default_factory=Debug)
    loss: Loss = field(default_factory=Loss)
    deepep: DeepEP = field(default_factory=DeepEP)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    quantize: Quantize = field(default_factory=Quantize)
    wandb: Wandb = field(default_factory=Wandb)


def option_table() -> dict[str, dict[str, Any]]:
    """Return three tables, each keyed by option name.

    `options` has the default of every option. `optional` has the types of options that may be None.
    `choices` has the values of Literal options.
    """
    merged = ConfigManager._merge_configs(TitanJobConfig, JobConfig)
    table: dict[str, dict[str, Any]] = {"options": {}, "optional": {}, "choices": {}}
    for name, kind, default in _options(merged(), ""):
        table["options"][name] = default
        optional = kind | None
        # `optional` is always a union, so `get_args` works even if `kind` is a single type.
        kinds = typing.get_args(optional)
        for one in kinds:
            if typing.get_origin(one) is typing.Literal:
                table["choices"][name] = list(typing.get_args(one))
        if kind == optional:
            named = {list[str]: "list", bool: "bool", float: "float", int: "int", str: "str"}
            rest = "choice" if name in table["choices"] else "lists"
            table["optional"][name] = next((named[k] for k in named if k in kinds), rest)
    return table


def _options(section: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name, type and default of each option."""
    for one in dataclasses.fields(section):
        default = getattr(section, one.name)
        if dataclasses.is_dataclass(default):
            yield from _options(default, f"{prefix}{one.name}.")
        else:
            yield f"{prefix}{one.name}", one.type, default


def main() -> None:
    table = {
        **option_table(),
        "families": [dataclasses.asdict(parts.family) for parts in FAMILIES.values()],
        "refused_families": REFUSED,
        "datasets": [*DATASETS, DATASET],
    }
    # Put short lists and a flavor's sizes on as few lines as possible, for readability.
    inner = re.compile(r"(?<=[\[{])\n {3,}([^][{}]*?)\s+(?=[]}])")
    print(inner.sub(_fold, json.dumps(table, indent=1)))


def _fold(found: re.Match[str]) -> str:
    # Break lines only between items, never at a space within a string.
    items = " ".join(line.strip().replace(" ", "\0") for line in found[1].splitlines())
    lines = textwrap.fill(
        items, 78, subsequent_indent="     ", break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


if __name__ == "__main__":
    main()
