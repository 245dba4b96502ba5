"""The cells whose speed `bench.gpu_throughput` compares, by name; a new one is a line of CELLS.

A cell for one measurement is named on the command line instead: another one's name and options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, unknown_name
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster
from cookbook.config.expand import command_line_settings
from cookbook.config.names import check_name
from cookbook.config.resolve import cell_on

CPU_RANKS = 2


@dataclass(frozen=True)
class Trained:
    """What a cell trains.

    Attributes:
        options: over the recipe's and those of every cell below.
        released: TorchTitan as it is, without the cookbook's hooks; on a CPU it needs them.
    """

    ep_backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    recipe: str = "deepseek_v3_16b"
    released: bool = False


_TP2 = {"parallelism.tensor_parallel_degree": 2}
_REAL = {"debug.moe_force_load_balance": False}
# For two GPUs: the same layers, fewer of them.
_EIGHT_LAYERS = {"model.flavor": "16B_8layers"}
_EIGHT_LAYERS_RELEASED = {**_EIGHT_LAYERS, "experimental.custom_import": "bench.short_flavors"}
_NOT_RECOMPUTED = {"activation_checkpoint.mode": "none", "training.local_batch_size": 2}
# What makes the fast recipe on one node of 4 GPUs, one change after another.
_ATTENTION = {"model.attention": "flash_attention_4"}
_WORKER = {
    **_ATTENTION,
    "training.dataloader.num_workers": 1,
    "training.dataloader.prefetch_factor": 2,
    "training.dataloader.persistent_workers": True,
}
_EP2 = {**_WORKER, "parallelism.expert_parallel_degree": 2}
_SAVED = {
    **_EP2,
    "loss.num_chunks": 8,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
    "activation_checkpoint.op_sac_save_list": ["attention", "communication"],
}
_FAST = {
    **_SAVED,
    "activation_checkpoint.op_sac_save_list": ["attention", "communication", "grouped_mm"],
    "deepep.score_activations": True,
}
# Since the first run of these: at EP 2 FSDP's transfers cost too much, and memory was left.
_EP4 = {**_FAST, "parallelism.expert_parallel_degree": 4}
_KEPT = {**_EP4, "activation_checkpoint.num_layers_kept": 7}
# The same room for what dense GEMMs wrote, in each layer.
_GEMMS = {
    **_EP4,
    "activation_checkpoint.op_sac_save_list": ["attention", "communication", "grouped_mm", "mm"],
}
_KEPT_REAL = {**_EP4, **_REAL, "activation_checkpoint.num_layers_kept": 3}
_FAST_EIGHT_LAYERS = {**_FAST, **_EIGHT_LAYERS, "activation_checkpoint.num_layers_kept": 2}
# For one GPU, which sends no rows and so keeps none that were sent.
_FAST_ONE_GPU = {
    **{name: value for name, value in _FAST_EIGHT_LAYERS.items() if "deepep" not in name},
    "parallelism.expert_parallel_degree": 1,
    "activation_checkpoint.op_sac_save_list": ["attention", "grouped_mm"],
}
# Rows by own kernels, whose memory leaves room to keep every layer.
_ONE_GPU_ROWS = {
    **_FAST_ONE_GPU,
    "cookbook.row_kernels": True,
    "activation_checkpoint.num_layers_kept": 8,
}
# All of them: at TP 2 the GPU waits for the host, which has more to do where layers are recomputed.
_KEPT_TP2 = {**_EP4, **_TP2, "activation_checkpoint.num_layers_kept": 27}

CELLS: dict[str, Trained] = {
    # The published options, in the code that was published.
    "released-standard": Trained("standard", released=True),
    "released-deepep": Trained("deepep", released=True),
    "released-deepep-real": Trained("deepep", _REAL, released=True),
    "standard": Trained("standard"),
    "deepep": Trained("deepep"),
    "deepep-real": Trained("deepep", _REAL),
    "standard-tp2": Trained("standard", _TP2),
    "deepep-tp2": Trained("deepep", _TP2),
    "deepep-no-recompute": Trained("deepep", _NOT_RECOMPUTED),
    "fast-attention": Trained("deepep", _ATTENTION),
    "fast-worker": Trained("deepep", _WORKER),
    "fast-ep2": Trained("deepep", _EP2),
    "fast-saved": Trained("deepep", _SAVED),
    "fast": Trained("deepep", _FAST),
    "fast-real": Trained("deepep", {**_FAST, **_REAL}),
    "fast-tp2": Trained("deepep", {**_FAST, **_TP2}),
    "fast-ep4": Trained("deepep", _EP4),
    "fast-kept": Trained("deepep", _KEPT),
    "fast-gemms": Trained("deepep", _GEMMS),
    "fast-kept-real": Trained("deepep", _KEPT_REAL),
    "fast-kept-tp2": Trained("deepep", _KEPT_TP2),
    "fast-8layers": Trained("deepep", _FAST_EIGHT_LAYERS),
    "fast-standard-8layers": Trained("standard", _FAST_ONE_GPU),
    "fast-rows-8layers": Trained("standard", _ONE_GPU_ROWS),
    "fast-rows-8layers-real": Trained("standard", {**_ONE_GPU_ROWS, **_REAL}),
    "deepep-8layers": Trained("deepep", _EIGHT_LAYERS),
    "released-standard-8layers": Trained("standard", _EIGHT_LAYERS_RELEASED, released=True),
    "released-deepep-8layers": Trained("deepep", _EIGHT_LAYERS_RELEASED, released=True),
    "standard-8layers": Trained("standard", _EIGHT_LAYERS),
    "float8-8layers": Trained("deepep", _EIGHT_LAYERS, precision="float8"),
    "deepep-float8": Trained("deepep", precision="float8"),
}

# One node's share of the recipes: EP within it, a batch that full recomputation leaves room for.
_EVERY = {
    "training.local_batch_size": 4,
    "training.dataset": "c4_test",
    "debug.moe_force_load_balance": True,
    "checkpoint.enable": False,
    "checkpoint.interval_minutes": 0,
    "metrics.enable_tensorboard": False,
    "comm.trace_buf_size": 0,
}
# Over the recipe's options, to try the benchmark out on a CPU in seconds.
_TINY = {
    "training.seq_len": 128,
    "training.local_batch_size": 2,
    "compile.enable": False,
}


def choose(names: Sequence[str], defined: Sequence[Sequence[str]]) -> dict[str, Trained]:
    """The cells called `names`, in that order.

    Args:
        defined: cells besides CELLS: a name, the cell that it varies, SECTION.KEY=VALUE words.

    Raises:
        InputError: a name or an option that does not exist, a name that is taken or not used.
    """
    known = dict(CELLS)
    for name, *words in defined:
        place = f"--cell {name}"
        if check_name(place, name) in known:
            raise InputError(place, "there is a cell of this name", "choose another")
        if not words or words[0] not in known:
            raise unknown_name(place, "cell", words[0] if words else "", known)
        base, settings = known[words[0]], command_line_settings(words[1:], f"{place}:")
        changed = {key: setting.value for key, setting in settings.items()}
        known[name] = replace(base, options={**base.options, **changed})
    for name in names:
        if name not in known:
            raise unknown_name("cells", "cell", name, known)
        if names.count(name) > 1:
            raise InputError("cells", f"{name} is named twice")
    for name, *_ in defined:
        if name not in names:
            raise InputError(f"--cell {name}", "is not among the cells to train", "name it there")
    return {name: known[name] for name in names}


def cell_of(
    name: str, trained: Trained, machine: Cluster, text: Path, tokenizer: Path, steps: int
) -> Cell:
    """What `name` trains on `machine`; on a CPU the debug model with the cell's own options."""
    on_cpu = machine.gpu is None
    options = {
        "parallelism.expert_parallel_degree": machine.ranks_per_node,
        **_EVERY,
        **(_TINY if on_cpu else {}),
        **trained.options,
        "training.dataset_path": str(text),
        "model.hf_assets_path": str(tokenizer),
        "training.steps": steps,
    }
    recipe = "debug" if on_cpu else trained.recipe
    return cell_on(machine, recipe, trained.precision, trained.ep_backend, options, name)


def seq_len_of(cells: Mapping[str, Trained], machine: Cluster) -> int:
    """The length of the sequences, which all of the cells must share."""
    made = [cell_of(name, one, machine, Path(), Path(), 1) for name, one in cells.items()]
    lengths = {cell.options["training.seq_len"] for cell in made}
    if len(lengths) > 1:
        raise ValueError(f"sequences of {sorted(lengths)} tokens cannot be compared")
    return int(lengths.pop())
