"""Overlays: their `expect` block agrees with their options, and their variables can be exported."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.base.paths import RECIPES
from cookbook.config.cluster import load_cluster
from cookbook.config.options import RESERVED
from cookbook.config.recipe import implied, load_ep_backend, load_overlay, load_precision
from cookbook.config.resolve import resolve_cell
from tests.cells import CLUSTERS, EP_BACKENDS, POINTS, PRECISIONS, Point
from tests.check_cells import cell_of
from tests.golden import golden_scripts, launchers


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_overlay_turns_on_what_it_declares(point: Point) -> None:
    cell = point.cell()
    declared = {**cell.precision.expect, **cell.ep_backend.expect}
    assert implied(cell.options) == {
        name.removeprefix("cookbook."): setting.value for name, setting in declared.items()
    }


def _copy(folder: Path, kind: str, name: str, *changes: tuple[str, str]) -> str:
    text = (RECIPES / kind / f"{name}.yaml").read_text(encoding="utf-8")
    for old, new in [("synonyms: [", "# synonyms: ["), *changes]:
        text = text.replace(old, new)
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_copied_precision_passes_under_its_own_name(tmp_path: Path, name: str) -> None:
    mine = load_precision(_copy(tmp_path, "precision", name))
    for point in POINTS:
        if point.precision != name:
            continue
        cell = point.cell()
        settings = cell.options.settings.items()
        asked = {name: one for name, one in settings if one.origin.startswith("--set")}
        copy = resolve_cell(
            cell.recipe, mine, cell.ep_backend, cell.cluster, layers=({}, {}, asked)
        )
        assert copy.name == cell.name.replace(f"-{name}-", "-mine-")
        assert copy.options.values == cell.options.values
        # No rule knows an overlay by its name.
        assert (copy.refused is None) == (cell.refused is None), copy.refused


@pytest.mark.parametrize(
    ("kind", "name", "old", "new", "words"),
    [
        (
            "precision", "mxfp8", "grouped_gemms: mxfp8", "grouped_gemms: bf16",
            "precision mine expects grouped_gemms bf16, and the options turn on mxfp8",
        ),
        (
            "ep_backend", "mxfp8_a2a", "  expert_parallel_a2a_combine_bwd_precision: mxfp8\n", "",
            "EP backend mine expects dispatch mxfp8, and the options turn on mxfp8 in one",
        ),
        (
            "ep_backend", "standard", "dispatch: standard", "dispatch: deepep",
            "EP backend mine expects dispatch deepep, and the options turn on standard",
        ),
    ],
)  # fmt: skip
def test_a_declaration_that_is_not_what_trains_is_refused_with_both(
    tmp_path: Path, kind: str, name: str, old: str, new: str, words: str
) -> None:
    load_overlay.cache_clear()
    path = _copy(tmp_path, kind, name, (old, new))
    overlays = {"precision": "mxfp8" if kind == "ep_backend" else path}
    overlays |= {"ep_backend": path} if kind == "ep_backend" else {}
    cell = cell_of("deepseek_v3_16b", **overlays)  # type: ignore[arg-type]
    assert cell.refused and words in cell.refused
    assert "would stop at its first step; correct the options, or `expect` in mine.yaml" in (
        cell.refused
    )


# Read from the caller's environment where it is set; a profile may set it for everyone.
FREE = {"WANDB_PROJECT", "NCCL_IB_HCA", "HOSTNAME"}


def test_every_variable_of_the_scripts_is_reserved() -> None:
    assigned: set[str] = set()
    for text in [*golden_scripts().values(), *launchers().values()]:
        assigned |= set(re.findall(r"(?m)^\s*(?:export )?([A-Z][A-Z_]*)\+?=", text))
        # The supervisor exports the others that a script reads.
        assigned |= set(re.findall(r"[$][{]([A-Z][A-Z_]*)[}]", text))
    assert {"CELL_DIR", "TRAIN_NODES", "ATTEMPT", "TRAIN_ARGS", "PYTHONPATH"} <= assigned
    own = {name for name in assigned if not name.startswith(("COOKBOOK_", "SLURM_"))}
    overlays = [*map(load_precision, PRECISIONS), *map(load_ep_backend, EP_BACKENDS)]
    exported = {name for one in overlays for name in (*one.environment, *one.environment_from)}
    exported |= {name for cluster in CLUSTERS for name in load_cluster(cluster).environment}
    assert own - FREE - exported <= RESERVED


def test_every_read_only_variable_of_bash_is_reserved() -> None:
    listed = subprocess.run(["bash", "-c", "readonly -p"], capture_output=True, text=True).stdout
    found = set(re.findall(r"(?m)^declare -\w+ (\w+)", listed))
    assert {"EUID", "SHELLOPTS"} <= found <= RESERVED


@pytest.mark.parametrize("name", ["CELL_DIR", "COOKBOOK_ROOT", "SLURM_JOB_ID"])
def test_a_variable_of_the_scripts_is_refused(tmp_path: Path, name: str) -> None:
    path = _copy(tmp_path, "precision", "bf16")
    with Path(path).open("a") as file:
        file.write(f"environment_from: {{{name}: OTHER}}\n")
    with pytest.raises(InputError, match=rf"environment_from.{name}: is a variable of bash or"):
        load_precision(path)
