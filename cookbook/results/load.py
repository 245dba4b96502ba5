"""How evenly a cell's router loads its experts, at the end of its logs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cookbook.observe.router_load import LoadStep


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The load over the last tenth of the logged steps.

    Attributes:
        busiest_over_mean: the tokens of the busiest expert over the mean of its layer's experts: in
            the layer where that is most, the median over these steps. 1 is even.
        layer: that layer.
        median_over_layers: the same of the median layer.
        starved_experts: how many get less than a tenth of their layer's mean, over all layers.
        is_forced: whether the balance was forced, so that this says nothing of the router.
        steps: the first and the last training step that these are of.
    """

    busiest_over_mean: float
    layer: int
    median_over_layers: float
    starved_experts: int
    layers: int
    is_forced: bool
    steps: tuple[int, int]


def summarize_load(steps: Sequence[LoadStep]) -> LoadSummary | None:
    """The summary; None where no load was logged."""
    if not steps:
        return None
    last = last_tenth(steps)
    layers = last[-1].layers
    busiest = [statistics.median(of_layer) for of_layer in _by_layer(last)]
    most = max(busiest)
    return LoadSummary(
        busiest_over_mean=most,
        layer=layers[busiest.index(most)],
        median_over_layers=statistics.median(busiest),
        starved_experts=round(statistics.median(sum(step.starved_experts) for step in last)),
        layers=len(layers),
        is_forced=any(step.is_forced for step in last),
        steps=(last[0].first_step, last[-1].step),
    )


def last_tenth(steps: Sequence[LoadStep]) -> Sequence[LoadStep]:
    """The last tenth of the logged steps, at least one."""
    return steps[-max(1, len(steps) // 10) :]


def _by_layer(steps: Sequence[LoadStep]) -> list[tuple[float, ...]]:
    return list(zip(*(step.busiest_over_mean for step in steps), strict=True))
