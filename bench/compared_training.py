"""TorchTitan's Trainer, whose gradients and parameters are compared with those of another run.

`bench.gradients` starts it in place of `torchtitan.train`, with TorchTitan's arguments and
`Compared` as JSON in the variable COMPARED. All runs begin with the weights of the reference and
train on the same sequences, whatever their layout: each rank reads the whole batch and takes its
rows, where TorchTitan's loader gives data-parallel ranks different texts.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torchtitan.distributed.utils as dist_utils
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.train import Trainer, main

from bench.known_faults import put_in_fault
from bench.plain_experts import plain_experts
from cookbook.base.files import write_whole
from cookbook.titan.tt_0_2_2.checkpoint import plain
from cookbook.titan.tt_0_2_2.routing import RouterLoad

VARIABLE = "COMPARED"
_WHOLE = StateDictOptions(full_state_dict=True, strict=False)
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

Tensors = dict[str, torch.Tensor]
# Relative error and ratio of norms, by parameter, for gradients and for changes.
Errors = dict[str, dict[str, tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Compared:
    """A comparison besides the training.

    Attributes:
        found: the JSON file for the results.
        step: parameters are compared after it, gradients in the first.
        keep: the file for this run's tensors, as a reference; empty to compare.
        reference: the file to compare with, which also has the first weights; may be empty.
        weights: the file with the first weights, if not the reference.
        fault: a name in `bench.known_faults`.
        experts: run experts in plain PyTorch, with the rounding of this precision and EP backend.
        exact: no BF16; experts are multiplied one by one, since grouped GEMMs are BF16.
    """

    found: str
    step: int
    keep: str = ""
    reference: str = ""
    weights: str = ""
    fault: str = ""
    experts: tuple[str, str] | None = None
    exact: bool = True


class ComparedTrainer(Trainer):
    def __init__(self, job_config: Any) -> None:
        self.compared = compared = Compared(**json.loads(os.environ[VARIABLE]))
        self.patches = ExitStack()
        if compared.fault:
            self.patches.enter_context(put_in_fault(compared.fault))
        if compared.experts:
            self.patches.enter_context(plain_experts(*compared.experts))
        flavor: Any = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
        flavor.moe_args.use_grouped_mm = not compared.exact
        super().__init__(job_config)
        self.expected = _load(compared.reference)
        begin = self.expected if compared.reference else _load(compared.weights)
        for part in self.model_parts:
            if begin:
                set_model_state_dict(part, _named("weights", begin), options=_WHOLE)
        self.start = self._weights()
        self.kept: Tensors = {f"weights {name}": value for name, value in self.start.items()}
        self.errors: Errors = {}
        self.choices = 0.0
        self.losses: list[float] = []
        self._take_gradients_before_they_are_clipped()
        self._note_losses()
        self._compare_choices()

    def batch_generator(self, data_iterable: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield this rank's rows of the whole batch."""
        ranks, rank = 1, 0
        if self.parallel_dims.dp_enabled:
            mesh = self.parallel_dims.get_mesh("batch")
            ranks, rank = mesh.size(), mesh.get_local_rank()
        config = deepcopy(self.job_config)
        mine = config.training.local_batch_size
        config.training.local_batch_size = mine * ranks
        build: Any = self.train_spec.build_dataloader_fn
        whole = build(dp_world_size=1, dp_rank=0, tokenizer=self.tokenizer, job_config=config)
        rows = slice(mine * rank, mine * (rank + 1))
        for inputs, labels in super().batch_generator(whole):
            yield {name: value[rows] for name, value in inputs.items()}, labels[rows]

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.step == self.compared.step:
            after = self._weights()
            self._take("changes", {name: after[name] - self.start[name] for name in after})
        if self.step == self.job_config.training.steps:
            self._write()

    def _take_gradients_before_they_are_clipped(self) -> None:
        clip = dist_utils.clip_grad_norm_

        def take_and_clip(*args: Any, **kwargs: Any) -> Any:
            if self.step == 1:
                self._take("gradients", {n: _whole(p.grad) for n, p in self._parameters()})
            return clip(*args, **kwargs)

        dist_utils.clip_grad_norm_ = take_and_clip

    def _note_losses(self) -> None:
        log = MetricsProcessor.log

        def note(metrics: Any, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            self.losses.append(loss)
            log(metrics, step, loss, *args, **kwargs)

        MetricsProcessor.log = note

    def _compare_choices(self) -> None:
        """Count the tokens that took another expert than in the reference: a lower bound."""
        take_counts = RouterLoad.take_counts

        def take_and_compare(load: RouterLoad) -> torch.Tensor:
            counts = take_counts(load)
            if self.step <= self.compared.step:
                name = f"tokens per expert {self.step}"
                self.kept[name] = counts
                if (expected := self.expected.get(name)) is not None:
                    self.choices += float((counts.cpu() - expected).abs().sum()) / 2
            return counts

        self.patches.enter_context(patch.object(RouterLoad, "take_counts", take_and_compare))

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                if parameter.grad is not None:
                    yield name, parameter

    def _weights(self) -> Tensors:
        found: Tensors = {}
        for part in self.model_parts:
            found |= get_model_state_dict(part, options=_WHOLE)
        return {name: value.detach().float().clone() for name, value in found.items()}

    def _take(self, what: str, values: Tensors) -> None:
        if self.compared.keep:
            self.kept |= {f"{what} {name}": value for name, value in values.items()}
        if self.compared.reference:
            expected = _named(what, self.expected)
            if unknown := set(values) - set(expected):
                raise ValueError(f"the reference has no {what} of {sorted(unknown)}")
            self.errors[what] = {n: _error(v, expected[n]) for n, v in values.items()}

    def _write(self) -> None:
        """Write the largest errors of all ranks and the losses, on rank 0."""
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self.errors, self.losses, self.choices))
        if self.compared.keep:
            torch.save({n: v.cpu() for n, v in self.kept.items()}, self.compared.keep)
        if dist.get_rank():
            return
        largest = largest_of([errors for errors, *_ in everywhere])
        # Only the last stage of a pipeline has losses; others log negative ones.
        losses = max((losses for _, losses, _ in everywhere), key=lambda known: known[:1])
        found = {
            "errors": largest,
            "losses": losses,
            "choices": round(max(choices for *_, choices in everywhere)),
            "torch": torch.__version__,
        }
        write_whole(Path(self.compared.found), json.dumps(found))


def largest_of(ranks: Sequence[Errors]) -> Errors:
    """Return the largest error of each parameter on any rank."""
    largest: Errors = {}
    for errors in ranks:
        for what, named in errors.items():
            found = largest.setdefault(what, {})
            for name, error in named.items():
                found[name] = max(found.get(name, error), error)
    return largest


def _load(path: str) -> Tensors:
    return torch.load(path, mmap=True, weights_only=True) if path else {}


def _named(kind: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors of a kind, under their own names."""
    start = f"{kind} "
    return {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}


def _whole(gradient: Any) -> Any:
    """Return a copy, since clipping and the next step overwrite a gradient."""
    found = plain(gradient)
    return (found.full_tensor() if isinstance(found, DTensor) else found).detach().clone()


def _error(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the norms of the difference and of `found`, over the expected norm."""
    wide, reference = found.double().cpu(), expected.double()
    norm = float(reference.norm())
    apart, length = float((wide - reference).norm()), float(wide.norm())
    if norm == 0:
        return (0.0, 1.0) if length == 0 else (float("inf"), float("inf"))
    return (apart / norm if apart == apart else float("inf")), length / norm


def train_in_rank(argv: list[str], compared: dict[str, Any]) -> None:
    """Run `python -m bench.compared_training` in this rank."""
    os.environ[VARIABLE] = json.dumps(compared)
    with Path(compared["found"]).with_suffix(".log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    # The default is the command line at the time that TorchTitan was imported.
    ConfigManager.parse_args.__defaults__ = (argv,)
    main(ComparedTrainer)


if __name__ == "__main__":
    main(ComparedTrainer)
