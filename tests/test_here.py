"""What a cell lacks on this machine: packages and files, told before it waits in a queue."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.cli.launch import refused_here
from cookbook.config.cell import Cell
from cookbook.config.resolve import cell_on, this_machine
from cookbook.config.validate.here import missing_files, missing_here
from tests.cells import CLUSTER_FILES
from tests.check_cells import cell_of, with_options

(CONTAINER,) = [str(path) for path in CLUSTER_FILES if path.stem == "container"]
H200 = Gpu("NVIDIA H200", 9.0, 139.8)
TOKENIZER, DATA = "model.hf_assets_path", "training.dataset_path"


def without_paths(cell: Cell) -> Cell:
    return with_options(cell, {TOKENIZER: "", DATA: None})


def test_packages_of_a_container_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    smaller = {"parallelism.expert_parallel_degree": 8}
    words = ("deepseek_v3_16b", smaller)
    cell = cell_of(*words, precision="mxfp8", ep_backend="deepep")
    (finding,) = missing_here(without_paths(cell))
    assert finding.reason == "not installed: deep_ep, torchao"
    inside = cell_of(*words, precision="mxfp8", ep_backend="deepep", cluster=CONTAINER)
    assert missing_here(without_paths(inside)) == []


def test_a_path_is_looked_for_where_the_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    cell = cell_of("debug", cluster="local")

    def missing(tokenizer: object, data: object) -> list[tuple[str, str]]:
        asked = with_options(cell, {TOKENIZER: str(tokenizer), DATA: str(data)})
        return [(one.option, one.reason) for one in missing_files(asked)]

    from_checkout = os.path.relpath(tmp_path, ROOT)
    (tmp_path / "tokenizer").mkdir()
    # A folder without the file is no tokenizer.
    assert missing(tmp_path / "tokenizer", tmp_path / "data") == [
        (TOKENIZER, f"{tmp_path}/tokenizer/tokenizer.json is not there")
    ]
    (tmp_path / "tokenizer/tokenizer.json").touch()
    assert missing(f"{from_checkout}/tokenizer", f"{from_checkout}/data") == []
    # The job does not stand where its submitter stood.
    assert missing(tmp_path / "tokenizer", "data") == [(DATA, "data is not there")]


def test_a_dry_run_needs_packages_and_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = with_options(
        without_paths(cell_of("deepseek_v3_16b", ep_backend="deepep")), {DATA: "/nowhere"}
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert refused_here(cell, is_dry=True).refused is None
    refused = refused_here(cell, is_dry=False).refused
    assert refused and refused.startswith(f"{DATA}: /nowhere is not there")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = refused_here(cell, is_dry=True)
    assert found.refused and found.refused.startswith("not installed: deep_ep")
    # What it was refused for first stands.
    assert refused_here(found, is_dry=False) == found


def test_a_cell_on_this_machine_has_its_ranks_and_what_is_asked_of_it() -> None:
    machine = this_machine(3, None, {"OMP_NUM_THREADS": "2"})
    cell = cell_on(machine, "debug", "mxfp8", "standard", {"training.steps": 5}, "mine")
    assert (cell.name, cell.world, cell.nodes, cell.steps) == ("mine", 3, 1, 5)
    assert cell.cluster.device == "cpu" and cell.emulated
    assert cell.environment["OMP_NUM_THREADS"] == "2"
    # A large recipe has no stand-in here: what is asked for is measured.
    large = cell_on(this_machine(4, H200), "deepseek_v3_16b", "bf16", "standard", {})
    assert (large.recipe.name, large.world, large.cluster.device) == ("deepseek_v3_16b", 4, "cuda")
    assert large.name == "16b-bf16-standard"
