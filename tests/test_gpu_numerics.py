"""The benchmark of numerics without GPUs: its cells, its verdicts, its table, and its stopping."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_numerics
from bench.gpu_cells import PARTS, make_cell
from bench.gpu_numerics_table import difference, render_report, verdict

ALL = [cell for part in PARTS.values() for cell in part()]


def result(name: str, losses: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "part": "numerics", "precision": "bf16", "backend": "deepep",
        "layout": "tp1-ep4", "variant": "plain", "reference": "", "bound": 1e-4,
        "status": "finished", "reason": "", "expected_to_fail": False, "released": False,
        "emulated": False, "losses": losses, "grad_norms": losses, "active": None,
        "tokens_per_second": None, "memory_gib": None,
    } | changes  # fmt: skip


def test_names_are_unique_and_references_exist() -> None:
    names = [cell.name for cell in ALL]
    assert len(set(names)) == len(names)
    assert {cell.reference for cell in ALL} - {""} <= set(names)


def test_matrix_holds_what_must_agree() -> None:
    names = {cell.name for cell in PARTS["numerics"]()}
    for layout in ("tp1-ep4", "tp2-ep4", "pp2-ep2"):
        for variant in ("plain", "recompute", "compile", "recompute-compile"):
            assert f"bf16-deepep-{layout}-{variant}" in names
    for precision in ("mxfp8", "mxfp8_wgrad_hp", "mxfp8_linear"):
        for backend in ("standard", "deepep", "mxfp8_a2a"):
            assert f"{precision}-{backend}-tp2-ep4-plain" in names


@pytest.mark.titan
@pytest.mark.parametrize("cell", [c for c in ALL if not c.released], ids=lambda cell: cell.name)
def test_torchtitan_understands_the_options(cell: Any, tmp_path: Path) -> None:
    from torchtitan.config import ConfigManager

    command = gpu_numerics.torchrun_command(cell, tmp_path, 20, cpu=False)
    config = ConfigManager().parse_args(command[command.index("torchtitan.train") + 1 :])
    assert config.cookbook.precision == cell.precision
    assert config.training.steps == 20


def test_released_cells_have_none_of_our_options() -> None:
    for cell in ALL:
        command = gpu_numerics.torchrun_command(cell, Path("out"), 20, cpu=False)
        assert cell.released != any("cookbook" in word for word in command[10:])


def test_verdicts() -> None:
    reference = result("reference", [2.0, 1.0])
    by_name = {"reference": reference}
    near = result("near", [2.0, 1.00005], reference="reference")
    far = result("far", [2.0, 1.001], reference="reference")
    nan = result("nan", [2.0, float("nan")], reference="reference")
    found = difference(far, reference)
    assert found is not None
    assert found[0] == pytest.approx(1e-3)
    assert found[1] == 2
    assert verdict(near, by_name) == "agrees"
    assert verdict(far, by_name) == "DIFFERS"
    assert verdict(nan, by_name) == "DIFFERS"
    assert verdict(far | {"bound": None}, by_name) == "shown"
    assert verdict(near, {}) == "no reference"
    assert verdict(near | {"status": "failed", "reason": "why"}, by_name) == "failed: why"
    known = near | {"expected_to_fail": True}
    assert verdict(known, by_name) == "did not fail"
    assert verdict(known | {"status": "failed"}, by_name) == "fails, as known"


def test_a_row_for_every_result_and_a_warning_on_a_cpu() -> None:
    results = [
        result("a", [1.0]),
        result("b", [], status="not run", reason="no time left"),
        result("c", [1.0], part="throughput", tokens_per_second=1234.5),
    ]
    text = render_report(results, cpu=True)
    assert "not a result" in text
    assert "not run: no time left" in text
    assert "1,234" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| bf16")}
    assert len(widths) == 1


def test_a_hanging_cell_is_stopped_with_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A torchrun that ignores being asked, and whose worker outlives it.
    worker = f"import sys, time; sys.argv.append('{tmp_path}/runs/hangs'); time.sleep(300)"
    parent = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}, '{tmp_path}/runs/hangs'])\n"
        "time.sleep(300)"
    )
    monkeypatch.setattr(gpu_numerics, "torchrun_command", lambda *a: [sys.executable, "-c", parent])
    monkeypatch.setattr(subprocess.Popen, "wait", _short_wait(subprocess.Popen.wait))
    cell = make_cell("numerics", "bf16", "standard", "tp1-ep4", seconds=2)
    object.__setattr__(cell, "name", "hangs")
    results = gpu_numerics.run_cells([cell], tmp_path, 20, 1, 60, cpu=True)
    assert results[0]["status"] == "failed"
    assert re.match(r"stopped after \d+ s", results[0]["reason"])
    assert json.loads((tmp_path / "results.json").read_text())["cells"]
    time.sleep(0.2)
    left = subprocess.run(["pgrep", "-f", f"{tmp_path}/runs/hangs"], capture_output=True)
    assert left.returncode == 1, left.stdout


def _short_wait(wait: Any) -> Any:
    def short(self: Any, timeout: float | None = None) -> Any:
        return wait(self, None if timeout is None else min(timeout, 1))

    return short
