"""Checkpoints: coordinated saves and stops, plain weights, and errors that name their cause.

- To stop a run, create the file `stop` in the attempt's folder. A signal does not work: on SIGTERM
  torchrun kills the ranks within 30 s, and Slurm's USR1 also kills helper processes.
- After each step an all-reduce of two flags makes all ranks agree to save or to stop. TorchTitan's
  loop already waits for an all-reduce in each step, so this adds no wait.
- Before and after a load, the nodes compare what they see. A network file system may show a node
  the folder of a minute ago, and ranks that load different steps would train on the mixture.
- A checkpoint holds plain tensors, so an MXFP8 run can be resumed, even in another precision.
  TorchTitan 0.2.2 saves TorchAO's wrapper, which PyTorch refuses to load with `weights_only`.
- TorchTitan takes every folder with `step-N` in its name for a checkpoint of its own: it deletes
  `step-2-keep` as an old one, and would load `step-2` for it. Only the whole name counts here.
- If DCP fails, it raises a `BaseException`, for which torchrun's `@record` writes no `error.json`.
  An `Exception` is raised in its place, with the root cause in the message.
- TorchTitan requires a routing bias in DeepSeek's published weights. Models whose router uses
  softmax (DeepSeek-V2-Lite) have none; for them, loading leaves the bias at its initial value,
  zero. If only some layers lack the bias, or if a router with a sigmoid (DeepSeek-V3) lacks it, the
  checkpoint is damaged, and loading still fails.
"""

import functools
import hashlib
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


class CheckpointPolicy:
    """Decides after each step whether to save; TorchTitan's `manager` knows only step intervals."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.trainer = manager.states["train_state"]
        self.interval_s = 60 * self.trainer.job_config.checkpoint.interval_minutes
        if self.interval_s:
            manager.interval = math.inf
        self.attempt = attempt_folder()
        self.saved_at = time.monotonic()
        self.is_due = False
        self._save, manager.save = manager.save, self.save
        self._should_save, manager._should_save = manager._should_save, self.should_save
        self._wait_for_copy = manager.maybe_wait_for_staging
        manager.maybe_wait_for_staging = self.wait_for_copy

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save if due, or save and stop if asked to; TorchTitan calls this after every step."""
        wishes = (self._is_interval_over(), self._is_asked_to_stop())
        largest = torch.tensor(wishes, dtype=torch.int32, device=self.trainer.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        is_interval_over, is_asked = largest.tolist()
        stops = is_asked and not last_step
        self.is_due = stops or is_interval_over
        if stops:
            reason = "cookbook: asked to stop"
            logger.info(f"{reason}; the run ends at a checkpoint of step {curr_step}")
        if self.should_save(curr_step, last_step):
            self.saved_at = time.monotonic()
        # On an early stop, keep `last_step` False. With True, TorchTitan may omit the optimizer
        # state, and ranks wait for each other over NCCL, which can time out during a large save.
        self._save(curr_step, last_step=last_step)
        if last_step:
            # TorchTitan does not purge old checkpoints after the last step, and so keeps too many.
            self.manager._purge_stale_checkpoints()
        if stops:
            # TorchTitan logs "Finished saving" when the weights are copied but not yet written.
            if self._is_writing():
                logger.info("cookbook: waiting until the checkpoint is written")
            self.manager._async_wait()
            if self.attempt and dist.get_rank() == 0:
                job = os.environ.get("SLURM_JOB_ID", "local")
                write_whole(self.attempt / STOPPED, f"{job} {curr_step}\n")
            self.trainer.should_continue_training = lambda: False

    def should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return bool(self.is_due or self._should_save(curr_step, last_step))

    def wait_for_copy(self) -> None:
        """Wait until a save has copied the weights to host memory.

        TorchTitan calls this before the optimizer step. The first copy is slow because it pins
        memory. Log the wait, so that the supervisor does not take it for a hang.
        """
        waits = self.manager.staging and not self.manager.staging_future.done()
        if waits:
            logger.info("cookbook: waiting until the checkpoint is copied")
        self._wait_for_copy()
        if waits:
            logger.info("cookbook: the checkpoint is copied")

    def _is_asked_to_stop(self) -> bool:
        # Look for `stop` on every node: a file created on one may appear late on the others.
        is_first = os.environ.get("LOCAL_RANK") == "0"
        return is_first and self.attempt is not None and (self.attempt / STOP).exists()

    def _is_interval_over(self) -> bool:
        # Skip while a checkpoint is being written: another save would block training.
        if not self.interval_s or dist.get_rank() != 0 or self._is_writing():
            return False
        return time.monotonic() - self.saved_at >= self.interval_s

    def _is_writing(self) -> bool:
        future = self.manager.save_future
        return future is not None and not future.done()


@functools.cache
def save_when_ranks_agree() -> None:
    """Patch CheckpointManager so that ranks save and stop together and errors name their cause."""
    initialize = CheckpointManager.__init__

    @functools.wraps(initialize)
    def initialize_and_decide(manager: Any, *args: Any, **kwargs: Any) -> None:
        initialize(manager, *args, **kwargs)
        if manager.enable:
            # TorchTitan reads `--checkpoint.exclude_from_loading=` as a list of one empty name.
            manager.exclude_from_loading = [name for name in manager.exclude_from_loading if name]
            load_the_same(manager)
        if manager.enable and not manager.load_only:
            CheckpointPolicy(manager)

    CheckpointManager.__init__ = initialize_and_decide
    CheckpointManager._find_load_step = newest_step
    CheckpointManager._purge_stale_checkpoints = purge
    name_checkpoint_causes()


def _saved_steps(folder: str) -> list[int]:
    named = (re.fullmatch(r"step-([0-9]+)", path.name) for path in Path(folder).glob("step-*"))
    return sorted(int(match[1]) for match in named if match)


def newest_step(manager: Any, folder: str = "") -> int:
    """Return the newest step in `folder` that was saved to its end; -1 if there is none."""
    where = folder or manager.folder
    ends = (".metadata", "model.safetensors.index.json")
    whole = (
        step
        for step in reversed(_saved_steps(where))
        if any(Path(where, f"step-{step}", name).is_file() for name in ends)
    )
    return next(whole, -1)


def purge(manager: Any) -> None:
    """Delete all but the newest `keep_latest_k` checkpoints."""
    if manager.keep_latest_k > 0 and dist.get_rank() == 0:
        for step in _saved_steps(manager.folder)[: -manager.keep_latest_k]:
            manager.purge_queue.put(manager._create_checkpoint_id(step))


def load_the_same(manager: Any) -> None:
    """Make `manager.load` fail on all ranks, naming the nodes, if nodes would load different files.

    The same holds if ranks would then start from different steps or positions in the data.
    """
    load, loader, position = manager.load, manager.states.get("dataloader"), [""]

    def note_position(state: dict[str, Any]) -> None:
        # Ranks of the same data-parallel rank read the same texts.
        position[0] = hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()[:8]
        type(loader).load_state_dict(loader, state)

    if loader is not None:
        loader.load_state_dict = note_position

    def load_and_compare(step: int = -1) -> bool:
        # The ranks of a node see the same.
        is_first = os.environ.get("LOCAL_RANK") == "0"
        _compare("would load", _seen(manager, step) if is_first else None)
        is_loaded = bool(load(step))
        state = manager.states["train_state"]
        _compare("would start", f"after step {state.step} and {state.ntokens_seen:,} tokens")
        reader = getattr(loader, "_rank_id", "")
        _compare("would read the texts", f"at position {position[0]}", reader)
        return is_loaded

    manager.load = load_and_compare


def _seen(manager: Any, step: int) -> str:
    if Path(manager.folder).exists():
        step = manager._find_load_step() if step == -1 else step
        source = Path(manager.folder, f"step-{step}")
    elif not (manager.initial_load_path or manager.initial_load_in_hf):
        return "nothing"
    else:
        source = Path(manager.initial_load_path or manager.sd_adapter.hf_assets_path)
    files = sorted((one.name, one.stat().st_size) for one in source.glob("*"))
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:8]
    return f"{source} ({len(files)} files, {sum(size for _, size in files):,} bytes, {digest})"


def _compare(what: str, own: str | None, reader: str = "") -> None:
    """Raise CheckpointFailedError where ranks with the same `reader` differ; None has no say."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (node, reader, own))
    for reader in sorted({reader for _, reader, _ in found}):
        known = [(node, one) for node, of, one in found if of == reader and one is not None]
        (usual, _), *others = Counter(one for _, one in known).most_common() or [("", 0)]
        if others:
            different = sorted({f"{node} {what} {one}" for node, one in known if one != usual})
            reason = (
                f"{'; '.join(different)}; the other nodes {usual}. Its view of the files is old"
            )
            raise CheckpointFailedError(f"load failed: {reason}, or they changed; start it again")


def plain(value: Any) -> Any:
    """Return the tensor inside TorchAO's wrapper, without a copy; return other values unchanged."""
    if isinstance(value, ScaledGroupedMMTensor):
        return value._data
    if isinstance(value, DTensor) and isinstance(value._local_tensor, ScaledGroupedMMTensor):
        return DTensor(value._local_tensor._data, value._spec, requires_grad=False)
    return value


def save_plain_weights(model: nn.Module) -> None:
    """Make `model.state_dict()` return plain tensors, without TorchAO's wrapper."""

    def unwrap(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in state.items():
            state[name] = plain(value)

    model.register_state_dict_post_hook(unwrap)


class CheckpointFailedError(RuntimeError):
    """Saving or loading a checkpoint failed on some rank."""


def root_cause(error: BaseException) -> BaseException:
    """Return the error's root cause; if several ranks failed, that of the lowest rank."""
    if isinstance(error, CheckpointException) and error.failures:
        first, _ = error.failures[min(error.failures)]
        return root_cause(first)
    return root_cause(error.__cause__) if error.__cause__ is not None else error


def name_checkpoint_causes() -> None:
    """Make a failed save or load raise CheckpointFailedError, whose message has the root cause."""

    @contextmanager
    def naming_the_cause(name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:
            cause, ranks = root_cause(error), ", ".join(map(str, sorted(error.failures)))
            reason = f"{name} failed on rank {ranks}: {type(cause).__name__}: {cause}"
            raise CheckpointFailedError(reason) from error

    for name in ("save", "load", "maybe_wait_for_staging", "_async_wait", "close"):
        setattr(CheckpointManager, name, naming_the_cause(name)(getattr(CheckpointManager, name)))


def without_missing_bias(adapter: Any) -> Any:
    """Return a subclass of `adapter` that can also load checkpoints without a routing bias."""

    class Adapter(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            self._asked: dict[str, Any] = super().to_hf(state_dict)
            return self._asked

        def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
            # TorchTitan loads all keys of `_asked`. Drop the routing biases if the files have none.
            reader = super().get_hf_storage_reader(path, from_quantized)
            if self.model_args.moe_args.score_func != "softmax":
                return reader
            bias = "e_score_correction_bias"
            if not any(name.endswith(bias) for name in reader.read_metadata().state_dict_metadata):
                for name in [name for name in self._asked if name.endswith(bias)]:
                    del self._asked[name]
            return reader

    return Adapter
