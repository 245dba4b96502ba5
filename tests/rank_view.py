"""Describes every rank of the dry run as `describe_ranks` counts it, read from the sharded model.

    python -m tests.rank_view

How TP, EP and FSDP cut each parameter is not computed again. It answers as the dry run does.
"""

import dataclasses
import re
from collections import Counter
from typing import Any

import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor

from cookbook.titan.common.schedules import in_flight, rank_actions
from cookbook.titan.tt_0_2_2 import dry_build
from cookbook.titan.tt_0_2_2.families import FAMILIES

describe = dry_build.describe
COUNTS: dict[str, int] = {}
_FSDP_DIMS = ("fsdp", "efsdp")
# Inserted by wrappers around a module; the model's own names have none.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


def view_rank(build: dry_build.Build) -> dict[str, Any]:
    """Return the parts of the model on this rank, and the pipeline's order."""
    trainer = build.trainer
    modules = [module for part in trainer.model_parts for module in part.modules()]
    meshes = trainer.parallel_dims.get_all_one_dimensional_meshes()
    return describe(build) | {
        **COUNTS,
        "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
        "parts": [_view_part(part) for part in trainer.model_parts],
        "model": dataclasses.asdict(trainer.model_args.sizes()),
        # Without FSDP parameters stay as they are.
        "mixed_precision": any(isinstance(module, FSDPModule) for module in modules),
        "groups": {name: mesh.size() for name, mesh in meshes.items()},
        **_pipeline(trainer),
    }


def count_models() -> None:
    """Keep TorchTitan's own counts of each model that is built."""
    for args in {type(args) for parts in FAMILIES.values() for args in parts.flavors.values()}:
        count = args.get_nparams_and_flops

        def counted(self: Any, model: nn.Module, seq_len: int, count: Any = count) -> Any:
            total, flops = count(self, model, seq_len)
            routing = self.moe_args
            active = sum(
                parameter.numel() * routing.top_k // routing.num_experts
                if "moe.experts" in name
                else parameter.numel()
                for name, parameter in model.named_parameters()
            )
            COUNTS.update(parameters=total, active_parameters=active, flops_per_token=flops)
            return total, flops

        args.get_nparams_and_flops = counted


def _view_part(part: nn.Module) -> dict[str, Any]:
    units: dict[str, Counter[str]] = {}
    sharded_by: dict[str, int] = {}
    named = part.named_modules()
    units_of_fsdp = [_plain(name) for name, one in named if name and isinstance(one, FSDPModule)]
    wrapped = sorted(units_of_fsdp, key=len, reverse=True)
    for name, parameter in part.named_parameters():
        plain = _plain(name)
        unit = next((found for found in wrapped if f"{plain}.".startswith(f"{found}.")), "")
        sizes = units.setdefault(unit, Counter())
        local, gathered, shards = _sizes(parameter)
        sizes.update(local=local, gathered=gathered)
        sizes["bytes"] = parameter.element_size()
        sharded_by[unit] = max(sharded_by.get(unit, 1), shards)
    return {
        "units": [
            {"name": name or "root", "shards": sharded_by[name], **sizes}
            for name, sizes in units.items()
        ],
        "layers": [
            {
                "id": int(layer_id),
                "moe": any(_plain(name).startswith("moe.") for name, _ in layer.named_parameters()),
                "recomputed": any(
                    isinstance(module, CheckpointWrapper) for module in layer.modules()
                ),
            }
            for layer_id, layer in part.layers.items()
        ],
        "embedding": part.tok_embeddings is not None,
        "head": part.output is not None,
    }


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


def _sizes(parameter: nn.Parameter) -> tuple[int, int, int]:
    if not isinstance(parameter, DTensor):
        return parameter.numel(), parameter.numel(), 1
    gathered, shards = parameter.numel(), 1
    names = parameter.device_mesh.mesh_dim_names or ()
    for index, placement in enumerate(parameter.placements):
        # `is_shard` leaves out the strided shards that FSDP makes of what TP has cut already.
        if placement.is_replicate() or placement.is_partial():
            continue
        size = parameter.device_mesh.size(index)
        if names[index] in _FSDP_DIMS:
            shards *= size
        else:
            gathered = -(-gathered // size)
    return parameter.to_local().numel(), gathered, shards


def _pipeline(trainer: Any) -> dict[str, Any]:
    if not trainer.parallel_dims.pp_enabled:
        return {
            "stages": [0],
            "num_stages": 1,
            "num_microbatches": 1,
            "in_flight": [[1]],
            "actions": [],
        }
    schedule = trainer.pp_schedule
    if isinstance(schedule, PipelineScheduleMulti):
        stages = [stage.stage_index for stage in schedule._stages]
        num_stages, rank = schedule._num_stages, schedule._stages[0].group_rank
        order: Any = schedule.pipeline_order
    else:
        stages, num_stages = [schedule._stage.stage_index], schedule._num_stages
        rank, order = schedule._stage.group_rank, schedule._get_pipeline_order()
    is_single = not isinstance(schedule, PipelineScheduleMulti)
    actions = rank_actions(order[rank] if order else [], is_single)
    return {
        "stages": stages,
        "num_stages": num_stages,
        "num_microbatches": schedule._n_microbatches,
        "in_flight": in_flight(actions, stages),
        "actions": actions,
    }


if __name__ == "__main__":
    count_models()
    dry_build.describe = view_rank
    dry_build.main()
