"""Compares what the search says of layouts with what `check` says, which TorchTitan builds.

    python -m bench.plan_against_check deepseek_v3_671b [--cluster C] [--random 50] [--best 20]

The best layouts must not be refused; for as many random ones, that fit or not, both must give the
same verdict on memory. Status 1 where they differ.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from cookbook.check.check import check_cells
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.sweep import CellRequest, expand_sweep, sweep_of_recipe
from cookbook.plan.search import evaluate, search
from cookbook.plan.space import space_of

# Cells that one process builds; what is known is printed after each lot.
_AT_ONCE = 5


def differences(cells: Sequence[Cell], wanted: str) -> list[str]:
    """Where the two do not agree, a line each."""
    found = []
    for start in range(0, len(cells), _AT_ONCE):
        some = cells[start : start + _AT_ONCE]
        for cell, checked in zip(some, check_cells(some), strict=True):
            candidate = evaluate(cell)
            said = checked.verdict or checked.judged.refused or "not built"
            print(f"{wanted}: {cell.name}: {candidate.verdict}, check: {said}", flush=True)
            if said != candidate.verdict:
                found.append(f"{cell.name}: {candidate.verdict}, check says: {said}")
            elif wanted == "best" and not checked.may_run:
                found.append(f"{cell.name}: refused: {checked.summary}")
    return found


def main() -> int:
    """Search, compare, and say how long the search took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--cluster", default="soperator-b200")
    parser.add_argument("--random", type=int, default=50)
    parser.add_argument("--best", type=int, default=20)
    asked = parser.parse_args()
    request = CellRequest(load_cluster(asked.cluster))
    (base,) = expand_sweep(sweep_of_recipe(asked.recipe), request)
    space = space_of(base, [], {}, {"precision": None, "ep_backend": None})
    began = time.monotonic()
    cells = [
        replace(cell, name=f"{number}-{cell.pair}") for number, cell in enumerate(space.cells())
    ]
    found = search(cells)
    seconds = time.monotonic() - began
    print(f"{len(cells):,} layouts in {seconds:.0f} s; {found.count('fits'):,} fit", flush=True)
    chosen = random.Random(42).sample(cells, min(asked.random, len(cells)))
    problems = differences([one.cell for one in found.ranked()[: asked.best]], "best")
    problems += differences(chosen, "random")
    print("\n".join(problems) or f"{asked.best} best may run, {len(chosen)} random agree")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
