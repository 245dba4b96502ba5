"""Checkpoints: when all ranks save, and stop, together; plain weights; failures with their cause.

- To end a run, someone puts the file `stop` into the attempt's folder. No signal would do: torchrun
  answers SIGTERM by killing the ranks within 30 s, and Slurm's USR1 kills helper processes too.
- After each step an all-reduce of one number tells every rank what any rank wants. TorchTitan's own
  loop waits for a sum over ranks in each step already, so this adds no wait.
- A checkpoint holds plain tensors, so that an MXFP8 run can be resumed, in another precision too.
  TorchTitan 0.2.2 saves TorchAO's wrapper, which PyTorch, loading weights only, refuses to read.
- DCP's `CheckpointException` is a `BaseException`, for which torchrun's `@record` writes no
  `error.json`, and its first line names no cause. It is raised again as an ordinary exception.
- Published weights of models that were trained with a balance loss, as DeepSeek-V2-Lite, have no
  routing bias, which TorchTitan asks for. The bias then stays zero, as initialized. A checkpoint
  that lacks the bias of some layers is damaged, and so is one without any whose scores are a
  sigmoid, as DeepSeek-V3's.
"""

import os
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.logging import logger

from cookbook.base.files import write_whole
from cookbook.titan.common.process import attempt_folder

STOP, STOPPED = "stop", "stopped"


class Wish(IntEnum):
    """A rank's request after a step; the ranks act on the largest."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class CheckpointPolicy:
    """Decide after each step whether to save; TorchTitan's `manager` knows the step number only."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        # The Trainer is one of the states that are saved.
        self.trainer = manager.states["train_state"]
        self.interval_s = 60 * self.trainer.job_config.checkpoint.interval_minutes
        self.attempt = attempt_folder()
        self.saved_at = time.monotonic()
        self.is_due = False
        self._save, manager.save = manager.save, self.save
        self._is_a_step_to_save, manager._should_save = manager._should_save, self.should_save
        self._wait_for_copy = manager.maybe_wait_for_staging
        manager.maybe_wait_for_staging = self.wait_for_copy

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save or end the run if that is due; TorchTitan calls it after every step."""
        largest = torch.tensor(self._wish(), dtype=torch.int32, device=self.trainer.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        wish = int(largest.item())
        stops = wish == Wish.STOP and not last_step
        self.is_due = stops or wish == Wish.SAVE
        if stops:
            reason = "cookbook: asked to stop"
            logger.info(f"{reason}; the run ends at a checkpoint of step {curr_step}")
        if self.should_save(curr_step, last_step):
            self.saved_at = time.monotonic()
        # Before a stop as at any other step: TorchTitan may save its last step without optimizer,
        # and over NCCL, whose timeout is shorter than a large save takes.
        self._save(curr_step, last_step=last_step)
        if last_step:
            # TorchTitan counts no last step among the `keep_latest_k`.
            self.manager._purge_stale_checkpoints()
        if stops:
            # "Finished saving" in TorchTitan's log means copied.
            if self._is_writing():
                logger.info("cookbook: waiting until the checkpoint is written")
            self.manager._async_wait()
            if self.attempt and dist.get_rank() == 0:
                job = os.environ.get("SLURM_JOB_ID", "local")
                write_whole(self.attempt / STOPPED, f"{job} {curr_step}\n")
            self.trainer.should_continue_training = lambda: False

    def should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Return whether this step is saved."""
        if self.is_due or last_step:
            return True
        if self.interval_s:
            return bool(curr_step == 1 and self.manager.enable_first_step_checkpoint)
        return bool(self._is_a_step_to_save(curr_step))

    def wait_for_copy(self) -> None:
        """Wait for weights that are still being copied; TorchTitan calls it before changing them.

        The first copy takes long, since its memory is pinned. The supervisor reads these lines, so
        as not to take it for a hang.
        """
        copy = self.manager.staging_future if self.manager.staging else None
        waits = copy is not None and not copy.done()
        if waits:
            logger.info("cookbook: waiting until the checkpoint is copied")
        self._wait_for_copy()
        if waits:
            logger.info("cookbook: the checkpoint is copied")

    def _wish(self) -> Wish:
        # One rank of each node looks: a file that another machine wrote may be seen late.
        if self.attempt and os.environ.get("LOCAL_RANK") == "0" and (self.attempt / STOP).exists():
            return Wish.STOP
        # While a checkpoint is being written, another save would make training wait.
        decides = self.interval_s and dist.get_rank() == 0 and not self._is_writing()
        if decides and time.monotonic() - self.saved_at >= self.interval_s:
            return Wish.SAVE
        return Wish.NOTHING

    def _is_writing(self) -> bool:
        future = self.manager.save_future
        return future is not None and not future.done()


_initialize = CheckpointManager.__init__


@wraps(_initialize)
def _initialize_and_decide(manager: Any, *args: Any, **kwargs: Any) -> None:
    _initialize(manager, *args, **kwargs)
    if manager.enable and not manager.load_only:
        CheckpointPolicy(manager)


def save_when_ranks_agree() -> None:
    """Let the ranks of every later Trainer decide together when to save and end; name failures.

    No door: the Trainer makes its CheckpointManager itself.
    """
    if CheckpointManager.__init__ is not _initialize_and_decide:
        CheckpointManager.__init__ = _initialize_and_decide
        name_checkpoint_causes()


def plain(value: Any) -> Any:
    """Return the tensor inside TorchAO's wrapper, sharing its memory; other values unchanged."""
    if isinstance(value, ScaledGroupedMMTensor):
        return value._data
    if isinstance(value, DTensor) and isinstance(value._local_tensor, ScaledGroupedMMTensor):
        return DTensor(value._local_tensor._data, value._spec, requires_grad=False)
    return value


def save_plain_weights(model: nn.Module) -> None:
    """Unwrap the weights in the state dict of `model`, for saving and for loading."""

    def unwrap(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in state.items():
            state[name] = plain(value)

    model.register_state_dict_post_hook(unwrap)


class CheckpointFailedError(RuntimeError):
    """Saving or loading a checkpoint failed on some rank."""


def root_cause(error: BaseException) -> BaseException:
    """Return the first failed rank's error, followed down to its first cause."""
    if isinstance(error, CheckpointException) and error.failures:
        first, _ = error.failures[min(error.failures)]
        return root_cause(first)
    return root_cause(error.__cause__) if error.__cause__ is not None else error


def name_checkpoint_causes() -> None:
    """Let saving and loading raise CheckpointFailedError with the root cause in its message."""

    def naming_the_cause(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return method(*args, **options)
            except CheckpointException as error:
                cause = root_cause(error)
                failed = f"failed on rank {', '.join(map(str, sorted(error.failures)))}"
                reason = f"{method.__name__} {failed}: {type(cause).__name__}: {cause}"
                raise CheckpointFailedError(reason) from error

        return call

    for name in ("save", "load", "maybe_wait_for_staging", "_async_wait", "close"):
        setattr(CheckpointManager, name, naming_the_cause(getattr(CheckpointManager, name)))


def without_missing_bias(adapter: Any) -> Any:
    """Return TorchTitan's adapter of a family, asking a softmax model for no bias it never had."""

    class Adapter(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            self._asked: dict[str, Any] = super().to_hf(state_dict)
            return self._asked

        def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
            # TorchTitan loads into the last result of `to_hf`.
            reader = super().get_hf_storage_reader(path, from_quantized)

            def biases(names: Iterable[str]) -> list[str]:
                return [name for name in names if name.endswith("e_score_correction_bias")]

            may_have_none = self.model_args.moe_args.score_func == "softmax"
            if may_have_none and not biases(reader.read_metadata().state_dict_metadata):
                for name in biases(self._asked):
                    del self._asked[name]
            return reader

    return Adapter
