"""Saves by the clock, and ends a run at a checkpoint where it is asked to: all ranks decide alike.

Who wants a run to end puts the file `stop` into the attempt's folder. A file, because no signal
gets through to the ranks: torchrun answers SIGTERM by killing them within 30 s, and Slurm sends
USR1 also to helper processes, which die of it. A rank can only stop between two steps anyhow.

After each step an all-reduce of one number tells every rank what any of them has seen. TorchTitan's
own loop waits for a sum over ranks in each step already, so this is not one more time to wait.
"""

from __future__ import annotations

import os
import time
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.logging import logger

from cookbook.base.files import write_whole

STOP, STOPPED = "stop", "stopped"


class Wish(IntEnum):
    """What a rank wants after a step; that of all ranks is the largest."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class Saving:
    """Decides after each step what TorchTitan's `manager` decides from the step's number alone."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        # The Trainer is one of the states that are saved.
        self.trainer = manager.states["train_state"]
        self.interval_s = 60 * self.trainer.job_config.checkpoint.interval_minutes
        self.attempt = os.environ.get("COOKBOOK_ATTEMPT_DIR")
        self.saved_at = time.monotonic()
        self.is_due = False
        self._save, self._is_a_step_to_save = manager.save, manager._should_save
        self._wait_for_copy = manager.maybe_wait_for_staging
        manager.save, manager._should_save = self.save, self.should_save
        manager.maybe_wait_for_staging = self.wait_for_copy

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """What TorchTitan calls after each step: save, where that is to be."""
        wish = self._agree()
        stops = wish == Wish.STOP and not last_step
        self.is_due = stops or wish == Wish.SAVE
        if stops:
            logger.info(
                f"cookbook: asked to stop; the run ends at a checkpoint of step {curr_step}"
            )
        if self.should_save(curr_step, last_step):
            self.saved_at = time.monotonic()
        # Before a stop, too, as at any other step: what TorchTitan calls the last step may be saved
        # without optimizer, and over NCCL, whose time-out is shorter than a large save takes.
        self._save(curr_step, last_step=last_step)
        if stops:
            self._stop(curr_step)

    def should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Whether this step is saved."""
        if self.is_due or last_step:
            return True
        if self.interval_s:
            return bool(curr_step == 1 and self.manager.enable_first_step_checkpoint)
        return bool(self._is_a_step_to_save(curr_step))

    def wait_for_copy(self) -> None:
        """What TorchTitan calls before it changes weights that may still be copied."""
        copy = self.manager.staging_future if self.manager.staging else None
        waits = copy is not None and not copy.done()
        # The first copy takes long: its memory is pinned. The supervisor reads that it is no hang.
        if waits:
            logger.info("cookbook: waiting until the checkpoint is copied")
        self._wait_for_copy()
        if waits:
            logger.info("cookbook: the checkpoint is copied")

    def _agree(self) -> Wish:
        wish = torch.tensor(self._wish(), dtype=torch.int32, device=self.trainer.device)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        return Wish(int(wish.item()))

    def _wish(self) -> Wish:
        # A rank of each node looks: what another machine has written may be seen late.
        looks = self.attempt and os.environ.get("LOCAL_RANK") == "0"
        if looks and Path(self.attempt or "", STOP).exists():
            return Wish.STOP
        if self.interval_s and dist.get_rank() == 0 and self._interval_is_over():
            return Wish.SAVE
        return Wish.NOTHING

    def _interval_is_over(self) -> bool:
        # Training waits where a save begins while another is being written.
        return not self._writes() and time.monotonic() - self.saved_at >= self.interval_s

    def _writes(self) -> bool:
        future = self.manager.save_future
        return future is not None and not future.done()

    def _stop(self, step: int) -> None:
        # TorchTitan has said already that it "finished saving": it has copied.
        if self._writes():
            logger.info("cookbook: waiting until the checkpoint is written")
        self.manager._async_wait()
        if self.attempt and dist.get_rank() == 0:
            job = os.environ.get("SLURM_JOB_ID", "local")
            write_whole(Path(self.attempt) / STOPPED, f"{job} {step}\n")
        self.trainer.should_continue_training = lambda: False


_initialize = CheckpointManager.__init__


@wraps(_initialize)
def _initialize_and_decide(manager: Any, *args: Any, **kwargs: Any) -> None:
    _initialize(manager, *args, **kwargs)
    if manager.enable and not manager.load_only:
        Saving(manager)


def save_when_ranks_agree() -> None:
    """Let the ranks of every later Trainer decide together what to save, and when to end."""
    # No door: the Trainer makes its CheckpointManager itself.
    CheckpointManager.__init__ = _initialize_and_decide
