"""Builds TorchTitan's Trainer for one rank of a cell, with its parameters on the meta device.

All replacements are made in a process that builds one rank and ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import logging
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from cookbook.titan.common.varlen_attention import FLASH_ATTENTION_4


@dataclass(frozen=True)
class Build:
    """A Trainer, TorchTitan's warnings, and all stand-ins for something that only the job has."""

    trainer: Any
    warnings: list[str]
    not_exercised: list[str]


def describe(build: Build, stack: str) -> dict[str, Any]:
    """Return one rank's answer; `active` is the report that the job's first step would make."""
    # The job's own modules.
    activity = importlib.import_module(f"{stack}.activity")
    attention = importlib.import_module(f"{stack}.attention")
    parts = build.trainer.model_parts
    found = activity.observe_model(parts)
    kinds = {"grouped_gemms": found.grouped_gemms, "linear_layers": found.linear_layers}
    kinds["attention"] = attention.chosen_attention(parts)
    active = {name: activity.words(one) for name, one in kinds.items()}
    notes = {"warnings": build.warnings, "not_exercised": build.not_exercised}
    return {"active": active, **notes}


def warm_up(stack: str) -> None:
    """Import in the parent the modules that each child would import again."""
    import torch.distributed._functional_collectives
    import torch.distributed.pipelining.schedules
    import torchtitan.components.quantization.float8
    import torchtitan.models.moe.moe  # noqa: F401

    # tyro reads the sources of all option classes, and remembers them.
    ConfigManager().parse_args([f"--job.custom_config_module={stack}.job_config"])
    # A mesh checks its layout anew for every parameter that FSDP shards; it has a few layouts only.
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed._mesh_layout import _MeshLayout

        layout: Any = _MeshLayout
        layout.check_non_overlap = functools.cache(layout.check_non_overlap)

    # A small use of DTensor and FSDP imports their lazy modules.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        distribute_tensor(torch.empty(4, 4), mesh, [Shard(0)])
        fully_shard(nn.Linear(4, 4), mesh=mesh)
    dist.destroy_process_group()


def build_trainer(request: dict[str, Any], rank: int, folder: str) -> Build:
    """Run `Trainer.__init__` as rank `rank` of the cell would; its errors pass."""
    world = request["world"]
    place = {"RANK": rank, "LOCAL_RANK": rank % request["ranks_per_node"], "WORLD_SIZE": world}
    os.environ.update({name: str(number) for name, number in place.items()}, NGPU=str(world))
    notes = ["kernels, collectives, torch.compile, weights and optimizer steps: none ran"]
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    # The cookbook's own refusals are read from standard error.
    logging.getLogger().addHandler(logging.StreamHandler())
    config = ConfigManager().parse_args(
        [*request["argv"], f"--job.dump_folder={folder}", "--comm.mode=fake_backend"]
    )
    # TorchTitan would do this itself, but always as rank 0.
    dist.init_process_group("fake", rank=rank, world_size=world)
    _keep_parameters_on_meta()
    _fake_new_groups()
    if request["compute_capability"] is not None:
        _pretend_capability(request["compute_capability"])
        notes.append(f"GPU: compute capability {request['compute_capability']} was pretended")
    if config.parallelism.expert_parallel_comm_backend == "deepep":
        _stand_in_for_deep_ep()
        notes.append("DeepEP: a stand-in was imported; its kernels and its network were not tried")
    if config.model.attention == FLASH_ATTENTION_4:
        notes.append("FlashAttention-4: its package was not looked for, its kernels did not run")
    _leave_out_data(config.model.name)
    notes.append("tokenizer and data set: not read")
    if config.metrics.enable_wandb:
        notes.append("W&B: not contacted")
    config.metrics.enable_wandb = config.metrics.enable_tensorboard = False
    if config.checkpoint.enable:
        notes.append("checkpoint: options read, nothing loaded or saved")
    return Build(Trainer(config), warnings.texts, notes)


class _Warnings(logging.Handler):
    """Keeps TorchTitan's warnings but those about this process."""

    _OWN = ("already initialized", "ENV[", "peak flops", "lspci", "fake")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if not any(word.lower() in text.lower() for word in self._OWN) and text not in self.texts:
            self.texts.append(text)


def _keep_parameters_on_meta() -> None:
    nn.Module.to_empty = lambda self, *args, **kwargs: self
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()) if _is_ours(module) else ():
            if (
                isinstance(value, type)
                and issubclass(value, nn.Module)
                and "init_weights" in vars(value)
            ):
                value.init_weights = lambda self, *args, **kwargs: None  # type: ignore[attr-defined]
    # Fused optimizers refuse the meta device; the job's parameters are on one that they support.
    devices = ["cpu", "cuda", "meta"]
    for name in ("adam", "adamw", "optimizer"):
        optimizer: Any = sys.modules[f"torch.optim.{name}"]
        if hasattr(optimizer, "_get_fused_kernels_supported_devices"):
            optimizer._get_fused_kernels_supported_devices = lambda: devices


def _is_ours(module: ModuleType) -> bool:
    return (getattr(module, "__name__", "") or "").split(".")[0] in ("torchtitan", "cookbook")


def _fake_new_groups() -> None:
    """Groups that are made later are fake too: no thread, no port, and nobody to wait for."""
    new_group = dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        # An asynchronous checkpoint asks for gloo, which would wait for the other 255 ranks.
        return new_group(*args, **kwargs | {"backend": "fake"})

    dist.new_group = fake_group


def _pretend_capability(capability: float) -> None:
    """Converters and models ask for the GPU's generation; answer with the cluster's."""
    major, minor = divmod(round(capability * 10), 10)

    def has_cuda_capability(wanted_major: int, wanted_minor: int) -> bool:
        return (major, minor) >= (wanted_major, wanted_minor)

    for module in list(sys.modules.values()):
        if _is_ours(module) and hasattr(module, "has_cuda_capability"):
            module.has_cuda_capability = has_cuda_capability  # type: ignore[attr-defined]


def _stand_in_for_deep_ep() -> None:
    """TorchTitan imports these names for its operations, which nothing calls here."""
    for module, names in (
        ("deep_ep", ["Buffer"]),
        ("deep_ep.utils", ["EventHandle", "EventOverlap"]),
    ):
        package = sys.modules[module] = ModuleType(module)
        package.__spec__ = importlib.machinery.ModuleSpec(module, None, is_package=True)
        package.__path__ = []
        for name in names:
            setattr(package, name, type(name, (), {}))


def _leave_out_data(model_name: str) -> None:
    """Leave tokenizer and data loader out of the model's spec."""
    spec = get_train_spec(model_name)
    spec.build_tokenizer_fn = spec.build_dataloader_fn = None
    if get_train_spec(model_name) is not spec:
        # A built-in spec is made anew for every call; a registered one is kept.
        register_train_spec(model_name, spec)
