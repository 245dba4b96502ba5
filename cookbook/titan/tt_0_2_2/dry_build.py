"""Builds cells in a fake process group and prints a description of each, or TorchTitan's error.

    CUDA_VISIBLE_DEVICES= WANDB_MODE=disabled python -m cookbook.titan.tt_0_2_2.dry_build

Each JSON line on standard input describes a cell and is answered with one JSON line. TorchTitan's
Trainer is built from the cell's argv for the first rank of every pipeline stage, in a fake process
group of the cell's size, with parameters on the meta device. Each rank is built in a forked child,
which inherits all imports and keeps its patches to itself.
"""

import functools
import gc
import importlib.machinery
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from cookbook.titan.common.varlen_attention import FLASH_ATTENTION_4
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.families.parts import chosen_attention
from cookbook.titan.tt_0_2_2.rehearsal import compare_with_model, rehearse

_LIMIT_S = 240.0
# A warning with one of these words concerns the dry build itself, not the cell.
_OWN_WARNINGS = ("already initialized", "env[", "peak flops", "lspci", "fake")
_FORK = multiprocessing.get_context("fork")
Answer = dict[str, Any]


def build_cell(request: Answer) -> Answer:
    """Build the first rank of every pipeline stage, each rank in a child process.

    `request` has `argv`, `world`, `pp`, `ranks_per_node`, `compute_capability` (null for CPU),
    `reads_texts` (whether they are here, and small) and `stand_ins` (titles of packages, and the
    modules of each to replace by empty ones). Return `seconds` and `ranks`: for each rank the
    result of `describe` or an `error`.
    """
    start = time.monotonic()
    ranks = [stage * request["world"] // request["pp"] for stage in range(request["pp"])]
    at_once = os.cpu_count() or 1
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory(prefix="cookbook-check-") as scratch:
        # Stop after an error: the other stages would mostly fail for the same reason.
        while len(answers) < len(ranks) and not any("error" in answer for answer in answers):
            children = {}
            for rank in ranks[len(answers) :][:at_once]:
                folder = Path(scratch, f"{rank}")
                children[rank] = _FORK.Process(target=_answer, args=(request, rank, folder))
                children[rank].start()
            for rank, child in children.items():
                child.join()
                answers.append(_read(rank, Path(scratch, f"{rank}"), child.exitcode or 0))
    return {"ranks": answers, "seconds": round(time.monotonic() - start, 2)}


def _read(rank: int, folder: Path, status: int) -> Answer:
    if (file := folder / "answer").exists():
        return dict(json.loads(file.read_text()))
    if status == -signal.SIGALRM:
        return _failed(rank, f"not built within {_LIMIT_S:.0f} s", "TimeoutError")
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return _failed(rank, f"the process ended with {how}", "ProcessError")


def _answer(request: Answer, rank: int, folder: Path) -> None:
    # SIGALRM's default action ends the process even during a call that Python cannot interrupt.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    folder.mkdir()
    # Capture the output: if tyro or the cookbook exits, the last lines say why and are reported.
    descriptor = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    (folder / "answer").write_text(json.dumps(_build_rank(request, rank, folder)))


def _build_rank(request: Answer, rank: int, folder: Path) -> Answer:
    try:
        return {"rank": rank} | describe(build_trainer(request, rank, folder))
    except SystemExit:
        output = (folder / "output").read_text(errors="replace")
        return _failed(rank, _last_words(output), "SystemExit")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [_place(frame.filename, frame.lineno) for frame in frames]
        own = [place for place in places if place.startswith(("torchtitan", "cookbook"))]
        words = " ".join(str(error).split()) or type(error).__name__
        return _failed(rank, words, type(error).__name__, (own or places or [""])[-1])


def _last_words(text: str) -> str:
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    if refusals := [line for line in lines if "cookbook refuses: " in line]:
        return refusals[-1].partition("cookbook refuses: ")[2]
    return " ".join(line for line in lines if line)[-600:]


def _failed(rank: int, message: str, kind: str, place: str = "") -> Answer:
    return {"rank": rank, "error": message, "kind": kind, "place": place}


def _place(filename: str, line: int | None) -> str:
    found = re.search(r".*/((?:torchtitan|cookbook|torchao|torch)/.+)", filename)
    return f"{found[1] if found else Path(filename).name}:{line}"


def main() -> None:
    """Answer requests until standard input ends."""
    # Reserve standard output for the answers: redirect libraries' output to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warm_up()
    # Freeze the objects, so that garbage collection in a forked child does not copy their pages.
    gc.collect()
    gc.freeze()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(build_cell(json.loads(line))), file=answers, flush=True)


class Build(NamedTuple):
    """A Trainer, TorchTitan's warnings, and notes on everything that was replaced or not run."""

    trainer: Any
    warnings: list[str]
    not_exercised: list[str]


def describe(build: Build) -> dict[str, Any]:
    """Describe one rank's build: its quantization, its attention, its warnings and its notes."""
    parts = build.trainer.model_parts
    quantization, _ = activity.observe_model(parts)
    found = quantization | {"attention": chosen_attention(parts)}
    active = {name: activity.words(one) for name, one in found.items()}
    return {"active": active, "warnings": build.warnings, "not_exercised": build.not_exercised}


def warm_up() -> None:
    """Import modules and fill caches in the parent, so that children need not repeat the work."""
    import torch.distributed._functional_collectives
    import torch.distributed.pipelining.schedules
    import torchtitan.components.quantization.float8
    import torchtitan.models.moe.moe  # noqa: F401
    from torch.distributed._mesh_layout import _MeshLayout
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    # Fill tyro's cache, so that later parses need not read the options' source files again.
    ConfigManager().parse_args([f"--job.custom_config_module={__package__}.job_config"])
    # FSDP checks the mesh's layout for every parameter. Layouts are few, so cache the results.
    layout: Any = _MeshLayout
    layout.check_non_overlap = functools.cache(layout.check_non_overlap)

    # Use DTensor and FSDP once, which triggers their lazy imports.
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        distribute_tensor(torch.empty(4, 4), mesh, [Shard(0)])
        fully_shard(nn.Linear(4, 4), mesh=mesh)
    dist.destroy_process_group()


def build_trainer(request: dict[str, Any], rank: int, folder: Path) -> Build:
    """Run `Trainer.__init__` as rank `rank` of the cell would; propagate its exceptions."""
    world = request["world"]
    place = {"RANK": rank, "LOCAL_RANK": rank % request["ranks_per_node"], "WORLD_SIZE": world}
    os.environ.update({name: str(number) for name, number in place.items()}, NGPU=str(world))
    notes = ["kernels, collectives, torch.compile, init_weights and optimizer steps: none ran"]
    warnings: list[str] = []

    def note_warning(record: logging.LogRecord) -> bool:
        text = " ".join(record.getMessage().split())
        is_of_this_process = any(word in text.lower() for word in _OWN_WARNINGS)
        if record.levelno >= logging.WARNING and not is_of_this_process and text not in warnings:
            warnings.append(text)
        return True

    handler = logging.StreamHandler()
    handler.addFilter(note_warning)
    logging.getLogger().addHandler(handler)
    config = ConfigManager().parse_args(
        [*request["argv"], f"--job.dump_folder={folder}", "--comm.mode=fake_backend"]
    )
    # TorchTitan would create the fake process group itself, but always as rank 0.
    dist.init_process_group("fake", rank=rank, world_size=world)
    new_group = dist.new_group
    # Asynchronous checkpointing creates a gloo group, which would wait for the other ranks.
    dist.new_group = lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})
    _keep_parameters_on_meta()
    if (capability := request["compute_capability"]) is not None:
        _pretend_capability(capability)
        notes.append(f"GPU: compute capability {capability} was simulated")
    for title, modules in request["stand_ins"].items():
        _stand_in_for(modules)
        notes.append(
            f"{title}: a stand-in was imported; its kernels and its network were not tested"
        )
    if config.model.attention == FLASH_ATTENTION_4:
        notes.append("FlashAttention-4: its package was not imported, its kernels did not run")
    spec = get_train_spec(config.model.name)
    build_tokenizer = spec.build_tokenizer_fn
    spec.build_tokenizer_fn = spec.build_dataloader_fn = None
    if get_train_spec(config.model.name) is not spec:
        # `get_train_spec` returns a new spec each time, so register the one changed above.
        register_train_spec(config.model.name, spec)
    if config.metrics.enable_wandb:
        notes.append("W&B: not contacted")
    config.metrics.enable_wandb = config.metrics.enable_tensorboard = False
    if config.checkpoint.enable:
        notes.append("checkpoint: options read, nothing loaded or saved")
    trainer = Trainer(config)
    if rank == 0:
        dims = trainer.parallel_dims
        readers, reads = dims.dp_replicate * dims.dp_shard, bool(request["reads_texts"])
        notes += rehearse(config, build_tokenizer, readers=readers, reads_texts=reads)
        compare_with_model(config, trainer.model_parts)
    return Build(trainer, warnings, notes)


def _keep_parameters_on_meta() -> None:
    nn.Module.to_empty = lambda self, *args, **kwargs: self
    for one in [one for module in _own_modules() for one in vars(module).values()]:
        if isinstance(one, type) and issubclass(one, nn.Module) and "init_weights" in vars(one):
            one.init_weights = lambda self, *args, **kwargs: None  # type: ignore[attr-defined]
    # Make fused optimizers accept the meta device, which stands in for the GPU or CPU of the job.
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    optimizer._get_fused_kernels_supported_devices = lambda: ["cpu", "cuda", "meta"]


def _own_modules() -> list[Any]:
    names = [name for name in sys.modules if name.split(".")[0] in ("torchtitan", "cookbook")]
    return [sys.modules[name] for name in names]


def _pretend_capability(capability: float) -> None:
    capable = divmod(round(capability * 10), 10)
    for module in _own_modules():
        if hasattr(module, "has_cuda_capability"):
            module.has_cuda_capability = lambda major, minor: capable >= (major, minor)


class _StandIn(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_in_for(names: list[str]) -> None:
    for name in names:
        module = sys.modules[name] = _StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []


if __name__ == "__main__":
    main()
