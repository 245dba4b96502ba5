"""What starts a job's training: torchrun's words and the variables that its processes get."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.base.paths import ROOT
from cookbook.config.cell import Cell, train_argv
from cookbook.config.options import argv_of
from cookbook.run.folder import Attempt

# What the hooks add to TorchTitan's options (`titan/tt_0_2_2/job_config.py`).
_OF_HOOKS = (
    "deepep.",
    "cookbook.",
    "model.attention",
    "activation_checkpoint.op_sac_save_list",
    "activation_checkpoint.num_layers_kept",
    "loss.",
    "checkpoint.interval_minutes",
    "parallelism.expert_parallel_a2a_",
    "quantize.linear.mx.emulate",
    "quantize.grouped_mm.mx.emulate",
    # Known to the released TorchTitan, but with one value alone.
    "quantize.grouped_mm.mx.recipe_name",
)


@dataclass(frozen=True, eq=False)
class Job:
    """One training to run.

    Attributes:
        caches: for compiled kernels and prepared data, shared by jobs that may help one another.
        seconds: it is ended when it takes longer.
        environment: variables over the cell's own.
        released: TorchTitan as it is, without the cookbook's hooks (GPU only).
        module: what trains, with TorchTitan's words.
        shares: its ranks share the GPUs that are visible (`bench.shared_gpus`).
    """

    cell: Cell
    folder: Path
    caches: Path
    seconds: float = math.inf
    environment: Mapping[str, str] = field(default_factory=dict)
    released: bool = False
    module: str = "torchtitan.train"
    shares: bool = False


def torchrun_command(job: Job, attempt: Attempt) -> list[str]:
    """torchrun for one node; every rank's log is kept, and that of the loss is shown."""
    record = job.cell.record()
    words = released_argv(job.cell) if job.released else train_argv(job.cell)
    module = ["bench.shared_gpus", job.module] if job.shares else [job.module]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--role=rank"),
        *(f"--nproc-per-node={job.cell.world}", f"--log-dir={attempt.path / 'ranks'}"),
        *("--redirects=3", "--tee=3", f"--local-ranks-filter={record.loss_rank}"),
        *("-m", *module, *words, f"--job.dump_folder={attempt.path}"),
    ]


def released_argv(cell: Cell) -> list[str]:
    """The cell's words for TorchTitan as released, which knows nothing of the cookbook."""
    known = {}
    for name, setting in cell.options.settings.items():
        if not name.startswith(_OF_HOOKS):
            known[name] = setting
        elif setting.value != cell.options.stack.options[name].default:
            raise ValueError(f"{cell.name}: released, {name}={setting.value} does not exist")
    return argv_of(cell.options.stack, known)


def environment_of(job: Job, attempt: Attempt) -> dict[str, str]:
    """Variables of a job's processes: this one's, the cell's, the job's and those of the launch."""
    cell, caches = job.cell, job.caches
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        # Text and tokenizer are here: lose no time on a network that may not be there.
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(caches / "datasets"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(caches / "flash_attention"),
        "WANDB_MODE": "disabled",
        **cell.environment,
        **job.environment,
        "COOKBOOK_ATTEMPT_DIR": str(attempt.path),
        "LOG_RANK": str(cell.record().loss_rank),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]:",
    }
    if cell.cluster.gpu is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if cell.uses_deepep:
            # The tests' stand-in runs without GPUs.
            paths.insert(1, str(ROOT / "tests" / "stand_in"))
    environment["PYTHONPATH"] = os.pathsep.join(paths).strip(os.pathsep)
    return environment
