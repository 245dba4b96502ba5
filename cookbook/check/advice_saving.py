"""How often a long run should save: Young and Daly's interval, from failures and saving time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from cookbook.config.cell import Cell
from cookbook.config.finding import HINT, TORCHTITAN, Finding

_INTERVAL = "checkpoint.interval_minutes"
_DALY = "https://doi.org/10.1016/j.future.2004.11.016"
# With the model, Adam's two moments.
_STATES = 3
# A GPU's state to its host's memory, which is all that training waits for where saves are
# asynchronous. TorchTitan's log says what it was: `Finished saving the checkpoint ...`.
_COPY_GB_PER_S = 10.0
# So much longer or shorter costs little: the curve is flat around its lowest point.
_NEAR = 3.0


def saving(cell: Cell, view: Mapping[str, Any]) -> Iterator[Finding]:
    """The interval at which saving and repeating together cost least, where the cell's is another.

    Args:
        view: of any rank of the cell, as built.
    """
    cluster = cell.cluster
    if not cell.options["checkpoint.enable"] or cluster.node_failure_days is None:
        return
    size = _STATES * view["parameters"]["total"] * _bytes(view)
    rate = cluster.write_gb_per_s
    written_s = None if rate is None else size / (rate * 1e9)
    if cell.options["checkpoint.async_mode"] != "disabled":
        waits_s = size / cell.world / (_COPY_GB_PER_S * 1e9)
    elif written_s is not None:
        waits_s = written_s
    else:
        yield Finding(
            HINT,
            "saving",
            "checkpoint.async_mode",
            f"training waits until {size / 1e9:,.0f} GB are written, at each save",
            "set it to async",
            f"{TORCHTITAN}/components/checkpoint.py",
        )
        return
    between_s = cluster.node_failure_days * 86_400 / cell.nodes
    best_s = max(math.sqrt(2 * waits_s * between_s), written_s or 0.0)
    found_s = 60 * cell.options[_INTERVAL]
    if found_s and best_s / _NEAR <= found_s <= best_s * _NEAR:
        return
    found = f"every {found_s / 60:g} minutes" if found_s else "by steps, not by minutes"
    yield Finding(
        HINT,
        "saving",
        _INTERVAL,
        f"saved {found}; a save of {size / 1e9:,.0f} GB keeps training waiting for about "
        f"{waits_s:.2g} s, and one of {cell.nodes} nodes fails about every "
        f"{between_s / 86_400:.2g} days",
        f"set it to about {max(1, round(best_s / 60))} (Young and Daly)",
        _DALY,
    )


def _bytes(view: Mapping[str, Any]) -> int:
    """Of a parameter as it is stored."""
    return max(int(unit["bytes"]) for part in view["parts"] for unit in part["units"])
