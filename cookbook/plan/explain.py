"""Walks from one layout to another, an option or two at a time, and says what each step changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.tables import text_table
from cookbook.config.cell import ATTENTION, EP_CHUNKS, NUM_CHUNKS, SCORE_ACTIVATIONS, Cell
from cookbook.config.options import Setting
from cookbook.config.validate import validation_errors
from cookbook.plan.search import FITS, evaluate
from cookbook.predict.documents import Documents
from cookbook.predict.kernels import add
from cookbook.predict.step import StepTime, predict_step

_PIPELINE = "parallelism.pipeline_parallel"
_EP = tuple(f"parallelism.expert_{word}parallel_degree" for word in ("", "tensor_"))
# In this order, since a batch or a mode fits only behind what makes room for it. What stands in no
# group goes with the first.
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention and loss", (ATTENTION, NUM_CHUNKS, "training.dataloader.")),
    ("precision and EP backend", ()),
    ("TP", ("parallelism.tensor_parallel_degree",)),
    ("data parallelism", ("parallelism.data_parallel_",)),
    ("EP", (*_EP, EP_CHUNKS, SCORE_ACTIVATIONS)),
    ("pipeline and batch", (_PIPELINE, "training.local_batch_size")),
    ("recomputation", ("activation_checkpoint.",)),
)
_OVERLAYS = "precision and EP backend"


@dataclass(frozen=True)
class Stop:
    """A layout on the way: what was changed to come here, whether it fits, and its step."""

    changed: str
    fits: bool
    step: StepTime

    @property
    def us_per_token(self) -> dict[str, float]:
        """Microseconds of each term for a token and GPU, which layouts of other batches share."""
        return {
            name: 1000 * ms / self.step.tokens_per_gpu for name, ms in self.step.terms_ms.items()
        }


@dataclass(frozen=True)
class Walk:
    """The stops from one layout to another, both included."""

    stops: tuple[Stop, ...]

    def as_mapping(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [
            {
                "changed": stop.changed,
                "fits": stop.fits,
                "tokens_per_second_per_gpu": round(stop.step.tokens_per_second_per_gpu, 1),
                "us_per_token": {name: round(us, 3) for name, us in stop.us_per_token.items()},
            }
            for stop in self.stops
        ]

    def render(self) -> str:
        """A column for each stop, a row for each term."""
        columns = [stop.us_per_token for stop in self.stops]
        names = [*add(*columns)]
        head = ["microseconds a token and GPU", *(stop.changed for stop in self.stops)]
        rows = [head]
        for name in names:
            rows.append([name, *(f"{column.get(name, 0.0):.1f}" for column in columns)])
        rows.append(["step", *(f"{sum(column.values()):.1f}" for column in columns)])
        speeds = (stop.step.tokens_per_second_per_gpu for stop in self.stops)
        rows.append(["tokens/s/GPU", *(f"{speed:,.0f}" for speed in speeds)])
        rows.append(["memory", *("fits" if stop.fits else "too large" for stop in self.stops)])
        return text_table(rows, align="l" + "r" * len(self.stops)) + "\n"


def walk(start: Cell, end: Cell, documents: Documents | None = None) -> Walk:
    """From `start` to `end`, skipping what changes nothing; what the rules refuse on the way goes
    together with the next change.
    """
    stops, at, waiting = [_stop("from", start, documents)], start, list[str]()
    for title, names in _changes(start, end):
        settings = {name: Setting(end.options[name], "plan") for name in names}
        at = replace(at, options=at.options.override(settings))
        if title == _OVERLAYS:
            at = replace(at, precision=end.precision, ep_backend=end.ep_backend)
        waiting.append(title)
        if not validation_errors(at):
            stops.append(_stop(" + ".join(waiting), at, documents))
            waiting = []
    if waiting:
        stops.append(_stop(" + ".join(waiting), end, documents))
    return Walk(tuple(stops))


def _changes(start: Cell, end: Cell) -> Iterator[tuple[str, set[str]]]:
    """The groups that differ, with their options."""
    names = {*start.options.settings, *end.options.settings}
    differing = {name for name in names if start.options[name] != end.options[name]}
    grouped = {title: _of_group(differing, prefixes) for title, prefixes in _GROUPS}
    grouped[_OVERLAYS] = differing.difference(*grouped.values())
    others = (start.precision, start.ep_backend) != (end.precision, end.ep_backend)
    for title, own in grouped.items():
        if own or (title == _OVERLAYS and others):
            yield title, own


def _of_group(names: set[str], prefixes: tuple[str, ...]) -> set[str]:
    return {name for name in names if name.startswith(prefixes)} if prefixes else set()


def _stop(changed: str, cell: Cell, documents: Documents | None) -> Stop:
    candidate = evaluate(cell, documents)
    step = candidate.step or predict_step(cell, documents=documents)
    return Stop(changed, candidate.verdict == FITS, step)
