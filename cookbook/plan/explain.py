"""Walks from one layout to another, an option or two at a time, with each step's difference."""

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

_EP = tuple(f"parallelism.expert_{word}parallel_degree" for word in ("", "tensor_"))
_OVERLAYS = "precision and EP backend"
# In this order, since a batch or a mode fits only behind what makes room for it. Options of no
# group go with the overlays.
_GROUPS: dict[str, tuple[str, ...]] = {
    "attention and loss": (ATTENTION, NUM_CHUNKS, "training.dataloader."),
    _OVERLAYS: (),
    "TP": ("parallelism.tensor_parallel_degree",),
    "data parallelism": ("parallelism.data_parallel_",),
    "EP": (*_EP, EP_CHUNKS, SCORE_ACTIVATIONS),
    "pipeline and batch": ("parallelism.pipeline_parallel", "training.local_batch_size"),
    "recomputation": ("activation_checkpoint.",),
}


@dataclass(frozen=True)
class Stop:
    """A layout on the way, with the change that led to it."""

    changed: str
    fits: bool
    step: StepTime

    @property
    def us_per_token(self) -> dict[str, float]:
        """Microseconds of each term for a token and GPU, which compare across batches."""
        return {
            name: 1000 * ms / self.step.tokens_per_gpu for name, ms in self.step.terms_ms.items()
        }


@dataclass(frozen=True)
class Walk:
    """The stops from one layout to another, both included."""

    stops: tuple[Stop, ...]

    def as_mapping(self) -> list[dict[str, Any]]:
        """Return them for JSON."""
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
        """Return a column for each stop, a row for each term."""
        columns = [stop.us_per_token for stop in self.stops]
        rows = {name: [f"{one.get(name, 0.0):.1f}" for one in columns] for name in add(*columns)}
        rows["step"] = [f"{sum(column.values()):.1f}" for column in columns]
        speeds = (stop.step.tokens_per_second_per_gpu for stop in self.stops)
        rows["tokens/s/GPU"] = [f"{speed:,.0f}" for speed in speeds]
        rows["memory"] = ["fits" if stop.fits else "too large" for stop in self.stops]
        head = ["microseconds a token and GPU", *(stop.changed for stop in self.stops)]
        table = [head, *([name, *cells] for name, cells in rows.items())]
        return text_table(table, align="l" + "r" * len(self.stops)) + "\n"


def walk(start: Cell, end: Cell, documents: Documents | None = None) -> Walk:
    """Go from `start` to `end`, a group of options at a time.

    A stop that the rules refuse goes together with the next change.
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
    """Return the groups that differ, with their options."""
    names = {*start.options.settings, *end.options.settings}
    differing = {name for name in names if start.options[name] != end.options[name]}
    grouped = {
        title: {name for name in differing if prefixes and name.startswith(prefixes)}
        for title, prefixes in _GROUPS.items()
    }
    grouped[_OVERLAYS] = differing.difference(*grouped.values())
    others = (start.precision, start.ep_backend) != (end.precision, end.ep_backend)
    for title, own in grouped.items():
        if own or (title == _OVERLAYS and others):
            yield title, own


def _stop(changed: str, cell: Cell, documents: Documents | None) -> Stop:
    candidate = evaluate(cell, documents)
    step = candidate.step or predict_step(cell, documents=documents)
    return Stop(changed, candidate.verdict == FITS, step)
