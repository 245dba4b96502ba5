"""Describes the ranks of a cell as the fake world does (`rank_view`), counted instead of built.

A thousand layouts take seconds so, and torch is not imported. What the fake world alone can tell,
whether TorchTitan builds the cell at all, is left to `check`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.cell import LAYERS_KEPT, Cell
from cookbook.config.options import Layout
from cookbook.config.validate.layout import STAGES_PER_RANK
from cookbook.predict.parameters import (
    embedding_parameters,
    head_parameters,
    is_moe,
    layer_parameters,
    unit_sizes,
)
from cookbook.predict.pipeline_schedule import Actions, actions_of


def model_of(cell: Cell) -> Mapping[str, Any]:
    """The model's arguments.

    Raises:
        InputError: a model whose layers are not counted here.
    """
    name, flavor = cell.options["model.name"], cell.options["model.flavor"]
    flavors = cell.options.stack.model_args.get(name, {})
    if flavor not in flavors:
        raise InputError(
            cell.options.origin("model.flavor" if flavors else "model.name"),
            f"the layers of {name} {flavor} are not counted",
            f"counted: deepseek_v3 in {', '.join(cell.options.stack.model_args['deepseek_v3'])}",
        )
    return flavors[flavor]


def describe_ranks(
    cell: Cell, model: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], ...]:
    """The first rank of every pipeline stage, with what memory, work and time are counted from.

    Args:
        model: the model's arguments, where the stack's table does not have the flavor.

    Raises:
        InputError: a model that is not counted.
    """
    model = model or model_of(cell)
    layout = cell.layout
    splits = _split(cell, model)
    actions = _actions(cell, len(splits))
    counts = _counts(model, cell.options["training.seq_len"])
    shared = {
        "model": model,
        "mixed_precision": layout.dp_shard * layout.cp > 1 or layout.ep > 1,
        "groups": _groups(layout),
        "gradient_accumulation_steps": _accumulation(cell),
        "num_stages": len(splits),
        "num_microbatches": len(actions.microbatches) if actions else 1,
        **counts,
    }
    views = []
    for rank in range(layout.pp):
        stages = actions.stages[rank] if actions else [0]
        again = iter(_recomputed(cell, [len(splits[stage]) for stage in stages]))
        views.append(
            {
                "rank": rank * layout.stage_ranks,
                "parts": [_part(cell, model, splits, stage, again) for stage in stages],
                "stages": stages,
                "in_flight": actions.in_flight[rank] if actions else [[1]],
                "actions": actions.actions[rank] if actions else [],
                **shared,
            }
        )
    return tuple(views)


def stage_layers(
    num_stages: int, num_layers: int, input_weight: int = 1, output_weight: int = 1
) -> list[list[int]]:
    """The layers of every stage; TorchTitan's `generate_llm_fqn_per_model_part`."""
    if num_stages == 1:
        return [list(range(num_layers))]
    each, extra = divmod(num_layers + input_weight + output_weight, num_stages)
    sizes = [each + (stage < extra) for stage in range(num_stages)]
    sizes[0] -= input_weight
    sizes[-1] -= output_weight
    layers = iter(range(num_layers))
    return [list(itertools.islice(layers, max(size, 0))) for size in sizes]


def _split(cell: Cell, model: Mapping[str, Any]) -> list[list[int]]:
    if cell.layout.pp == 1:
        return stage_layers(1, model["n_layers"])
    section = "parallelism"
    if cell.options[f"{section}.module_fqns_per_model_part"]:
        raise InputError(
            cell.options.origin(f"{section}.module_fqns_per_model_part"),
            "stages that are named module by module are not counted",
            f"use {section}.pipeline_parallel_layers_per_stage",
        )
    first = cell.options[f"{section}.pipeline_parallel_first_stage_less_layers"]
    last = cell.options[f"{section}.pipeline_parallel_last_stage_less_layers"]
    per_stage = cell.options[f"{section}.pipeline_parallel_layers_per_stage"]
    layers = model["n_layers"]
    if per_stage is not None:
        stages = math.ceil((layers + first + last) / per_stage)
    else:
        stages = cell.layout.pp * STAGES_PER_RANK[_schedule(cell)]
    return stage_layers(stages, layers, first, last)


def _schedule(cell: Cell) -> str:
    """The schedule by PyTorch's own spelling."""
    option = "parallelism.pipeline_parallel_schedule"
    asked = cell.options[option]
    known = {name.lower(): name for name in STAGES_PER_RANK}
    if cell.options[f"{option}_csv"] or asked.lower() not in known:
        place = cell.options.origin(option)
        raise InputError(place, f"the schedule {asked!r} is not simulated", "try Interleaved1F1B")
    return known[asked.lower()]


def _actions(cell: Cell, num_stages: int) -> Actions | None:
    if cell.layout.pp == 1:
        return None
    size = cell.options["parallelism.pipeline_parallel_microbatch_size"]
    count = cell.options["training.local_batch_size"] // size
    return actions_of(_schedule(cell), cell.layout.pp, num_stages // cell.layout.pp, count)


def _part(
    cell: Cell,
    model: Mapping[str, Any],
    splits: Sequence[Sequence[int]],
    stage: int,
    again: Iterator[bool],
) -> dict[str, Any]:
    layout, experts = cell.layout, model["moe_args.num_experts"]
    is_last = stage == len(splits) - 1
    units = []
    if stage == 0:
        units += unit_sizes(embedding_parameters(model), layout, experts)
    # Layers of a kind are cut alike: one of each is enough.
    alike: dict[bool, list[dict[str, Any]]] = {}
    for layer in splits[stage]:
        kind = is_moe(model, layer)
        if kind not in alike:
            alike[kind] = unit_sizes(layer_parameters(model, layer), layout, experts)
        for unit in alike[kind]:
            rest = unit["name"].split(".", 2)[2:]
            units.append({**unit, "name": ".".join(["layers", str(layer), *rest])})
    if is_last:
        units += unit_sizes(head_parameters(model), layout, experts)
    return {
        "units": units,
        "layers": [
            {"id": layer, "moe": is_moe(model, layer), "recomputed": next(again)}
            for layer in splits[stage]
        ],
        "embedding": stage == 0,
        "head": is_last,
    }


def _recomputed(cell: Cell, sizes: Sequence[int]) -> list[bool]:
    """Whether each of a rank's layers is computed again; `n` counts over all parts of a rank.

    Args:
        sizes: the layers of each part.
    """
    mode = cell.options["activation_checkpoint.mode"]
    option = cell.options["activation_checkpoint.selective_ac_option"]
    again = [mode in ("full", "selective")] * sum(sizes)
    if mode == "selective" and option != "op":
        every = int(option)
        again = [every == 0 or (layer + 1) % every == 0 for layer in range(sum(sizes))]
    end = 0
    for size in sizes:
        end += size
        kept = min(cell.options[LAYERS_KEPT], size)
        again[end - kept : end] = [False] * kept
    return again


def _accumulation(cell: Cell) -> int:
    layout, wanted = cell.layout, cell.options["training.global_batch_size"]
    step = cell.options["training.local_batch_size"] * layout.dp_replicate * layout.dp_shard
    return max(wanted // step, 1) if wanted > 0 else 1


def _groups(layout: Layout) -> dict[str, int]:
    """The communicators of more than one rank, by TorchTitan's names."""
    fsdp = layout.dp_shard * layout.cp
    sizes = {
        "pp": layout.pp,
        "batch": layout.dp_replicate * layout.dp_shard,
        "loss": layout.dp_replicate * fsdp,
        "dp_replicate": layout.dp_replicate,
        "fsdp": fsdp,
        "cp": layout.cp,
        "tp": layout.tp,
        "ep": layout.ep,
        "efsdp": fsdp * layout.tp // (layout.etp * layout.ep),
        "etp": layout.etp,
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _counts(model: Mapping[str, Any], seq_len: int) -> dict[str, Any]:
    """TorchTitan's counts of the whole model: parameters, FLOPs of a token."""
    dense = min(model["n_dense_layers"], model["n_layers"])
    layers = [
        (one, count)
        for first, count in ((0, dense), (dense, model["n_layers"] - dense))
        for one in layer_parameters(model, first)
        if count
    ]
    embedding = sum(one.numel for one in embedding_parameters(model))
    head = sum(one.numel for one in head_parameters(model))
    experts = sum(one.numel * count for one, count in layers if one.is_expert)
    rest = head + sum(one.numel * count for one, count in layers if not one.is_expert)
    chosen = experts * model["moe_args.top_k"] // model["moe_args.num_experts"]
    width = model["qk_nope_head_dim"] + model["qk_rope_head_dim"] + model["v_head_dim"]
    attention = model["n_layers"] * model["n_heads"] * width * seq_len
    return {
        "parameters": {"total": rest + embedding + experts, "active": rest + embedding + chosen},
        "flops_per_token": 6 * (rest + chosen) + 6 * attention,
    }
