"""What comes before a layer's experts is compiled as one function, once for all layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.test_titan_recomputation import SAVE
from tests.titan_ranks import run_ranks
from tests.titan_run import EP2, NUM_LAYERS, job, train, write_assets

pytestmark = pytest.mark.titan

COMPILED = ("--compile.enable", "--compile.components=model", "--compile.backend=aot_eager")


def train_and_look(argv: list[str]) -> dict[str, Any]:
    """What a rank trains, how often each function was compiled, and how often the blocks ran."""
    from torch._dynamo.utils import get_compilation_metrics

    from cookbook.titan.tt_0_2_2.compiled_blocks import JoinedBlock

    blocks: set[int] = set()
    forward = JoinedBlock.forward

    def count(self: Any, *inputs: Any) -> Any:
        blocks.add(id(self))
        return forward(self, *inputs)

    JoinedBlock.forward = count  # type: ignore[assignment,method-assign]
    found = train(argv)
    compiled = Counter(one.co_name for one in get_compilation_metrics())
    return found | {"compiled": dict(compiled), "blocks": len(blocks)}


def test_a_job_trains_the_same_and_compiles_once(tmp_path: Path) -> None:
    write_assets(tmp_path)

    def run_of(name: str, *words: str) -> dict[str, Any]:
        argv = job(tmp_path, tmp_path / name, *EP2, *words)
        found: dict[str, Any] = run_ranks(train_and_look, 2, argv, seconds=200)[0]
        return found

    eager = run_of("eager")
    assert eager["blocks"] == 0
    for name, words in (("kept", COMPILED), ("recomputed", (*SAVE, *COMPILED))):
        run = run_of(name, *words)
        # The first layer has no experts.
        assert run["blocks"] == NUM_LAYERS - 1
        assert run["compiled"]["_before_experts"] == 1, run["compiled"]
        assert run["losses"] == pytest.approx(eager["losses"], rel=1e-4)
        assert run["grad_norms"] == pytest.approx(eager["grad_norms"], rel=1e-3)
