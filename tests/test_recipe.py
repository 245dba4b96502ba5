"""Recipes, overlays, clusters and their YAML are read, or refused with file and key."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.gpus import visible_gpus
from cookbook.base.paths import RECIPES
from cookbook.base.yamlfile import read_yaml
from cookbook.cli.main import main
from cookbook.config.cluster import cluster_from_record, load_cluster
from cookbook.config.options import RESERVED, exported
from cookbook.config.recipe import (
    load_ep_backend,
    load_overlay,
    load_precision,
    load_recipe,
    names_in,
    reference,
)
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.config.sweep import CellRequest, expand_sweep, load_sweep, sweep_of_recipe
from cookbook.plan.search import evaluate
from cookbook.run.record import CellRecord, read_record
from tests.cells import CLUSTERS, EP_BACKENDS, POINTS, PRECISIONS, Point, walked
from tests.cells import RECIPES as RECIPE_NAMES
from tests.check_cells import cell_of
from tests.golden import golden_scripts, launchers
from tests.stand_in_gpus import stand_in_gpus

SWEEPS = walked(names_in("sweep"))
HEAD = "name: mine\ndescription: mine\nnodes: 1\n"


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_is_read_and_explained(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description and recipe.settings and recipe.nodes >= 1
    # What needs a cluster, or takes hours on a machine, has a recipe for any machine instead.
    large = recipe.nodes > 1 or name.startswith(("deepseek_v3_", "qwen3_30b"))
    # Parts of models, for the one GPU of a machine.
    large = large and not name.endswith(("_slice", "_8layers"))
    assert (recipe.stand_in is not None) is large
    if recipe.stand_in:
        family = load_recipe(recipe.stand_in).settings["model.name"].value
        assert family == recipe.settings["model.name"].value
    text = recipe.path.read_text(encoding="utf-8").splitlines()
    # Every setting knows where it stands.
    for option, setting in recipe.settings.items():
        line = int(setting.origin.split(":")[1])
        assert option.rpartition(".")[2] in text[line - 1]


# Recipes and sweeps that are made for one node; the others for soperator-b200.
_ON_H200 = {"debug", "deepseek_v3_16b_fast", "proxy", "qwen3_30b_a3b", "qwen3_debug"}
_ON_H200 |= {"convergence_proxy", "fast_16b", "smoke"}


# The memory of a pipeline follows from torch's list of its actions.
@pytest.mark.titan
@pytest.mark.parametrize("name", walked([*RECIPE_NAMES, *SWEEPS]))
def test_every_recipe_and_sweep_fits_as_it_stands(name: str) -> None:
    own = "h200-node" if name in _ON_H200 else "soperator-b200"
    assert main(["check", name, "--rules-only", "--cluster", own]) == 0
    sweep = load_sweep(name) if name in SWEEPS else sweep_of_recipe(name)
    cells = expand_sweep(sweep, CellRequest(load_cluster(own)))
    smoke = name in ("debug", "smoke")
    assert smoke or {evaluate(cell).verdict for cell in cells} == {"fits"}
    assert all(cell.steps <= 20 for cell in cells) or name not in ("fast", "matrix")


def test_a_recipe_names_its_own_pair(capsys: pytest.CaptureFixture[str]) -> None:
    fast = "deepseek_v3_671b_fast"
    cluster = load_cluster("soperator-b200")
    (cell,) = expand_sweep(sweep_of_recipe(fast), CellRequest(cluster))
    assert (cell.pair, cell.own_pair) == ("mxfp8+deepep", "")
    (cell,) = expand_sweep(sweep_of_recipe("deepseek_v3_671b"), CellRequest(cluster))
    assert (cell.pair, cell.own_pair) == ("bf16+standard", "")
    # The stand-in of a laptop has its own.
    (cell,) = expand_sweep(sweep_of_recipe(fast), CellRequest(load_cluster("local")))
    assert (cell.pair, cell.own_pair) == ("bf16+standard", "")
    main(["run", fast, "--precision", "bf16", "--cluster", "soperator-b200", "--dry-run"])
    assert f"{fast} is made for mxfp8+deepep; this is bf16+deepep\n" in capsys.readouterr().out


def test_sections_may_be_nested_or_dotted(tmp_path: Path) -> None:
    nested = "quantize:\n  grouped_mm:\n    mx:\n      fqns: [experts]\n"
    dotted = "quantize.grouped_mm.mx.fqns: [experts]\n"
    mixed = "quantize:\n  grouped_mm.mx: {fqns: [experts]}\n"
    for number, text in enumerate([nested, dotted, mixed]):
        path = tmp_path / f"mine{number}.yaml"
        path.write_text(HEAD + text)
        recipe = load_recipe(str(path))
        assert recipe.settings["quantize.grouped_mm.mx.fqns"].value == ["experts"]


def test_environments_are_what_a_shell_exports(tmp_path: Path) -> None:
    text = "description: a\nenvironment: {A: true, B: 1, C: 3.10, D: x y, E: false, F: 1_000}\n"
    (tmp_path / "mine.yaml").write_text(text)
    environment = load_precision(str(tmp_path / "mine.yaml")).environment
    expected = {"A": "1", "B": "1", "C": "3.10", "D": "x y", "E": "0", "F": "1_000"}
    assert exported(environment) == expected


def test_a_job_takes_numbers_of_its_recorded_profile_as_texts(tmp_path: Path) -> None:
    text = "description: a\nscheduler: slurm\nsbatch: {nice: 10}\nenvironment: {A: 22, B: 1}\n"
    (tmp_path / "mine.yaml").write_text(text)
    profile = dict(load_cluster(str(tmp_path / "mine.yaml")).content)
    CellRecord(cluster="mine", profile=profile).write(tmp_path / "cell.yaml")
    cluster = cluster_from_record(read_record(tmp_path / "cell.yaml"))
    assert (cluster.sbatch, cluster.environment) == ({"nice": "10"}, {"A": "22", "B": "1"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1_000", 1000),
        ("12:00:00", "12:00:00"),
        ("2026-02-01", "2026-02-01"),
        ("007", "007"),
        ("0x1F", "0x1F"),
        ("FALSE", False),
        ("", None),
        ("\u0665", "\u0665"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_scalars(text: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(f"key: {text}", encoding="utf-8")
    read = read_yaml(tmp_path / "some.yaml").content["key"]
    assert read == value and type(read) is type(value)


H200: dict[str, Any] = {"name": "NVIDIA H200"}


def test_time_limits_of_sbatch_are_taken(tmp_path: Path) -> None:
    for time in ("90", "1-12", "UNLIMITED", "infinite"):
        path = tmp_path / f"{time}.yaml"
        path.write_text(f'description: mine\nscheduler: slurm\ntime: "{time}"\n')
        assert load_cluster(str(path)).time == time


@pytest.mark.parametrize(
    ("gpus", "chosen", "ranks", "device"),
    [
        ([H200] * 4, None, 4, "cuda"),
        ([H200] * 4, "1,3", 2, "cuda"),
        ([H200] * 4, "", 2, "cpu"),
        # Unlike ones would run at the pace of the slowest.
        ([H200, {"name": "NVIDIA T4", "capability": [7, 5], "mib": 15360}], None, 1, "cuda"),
        ([], None, 2, "cpu"),
    ],
)
def test_the_local_profile_is_filled_in_from_the_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[dict[str, Any]],
    chosen: str | None,
    ranks: int,
    device: str,
) -> None:
    stand_in_gpus(monkeypatch, tmp_path, gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    monkeypatch.setattr("cookbook.config.cluster.visible_gpus", visible_gpus.__wrapped__)
    cluster = load_cluster.__wrapped__("local")
    assert (cluster.ranks_per_node, cluster.device) == (ranks, device)
    found = (cluster.gpu.name, cluster.gpu.memory_gib) if cluster.gpu else None
    assert found == (("NVIDIA H200", 140.4) if device == "cuda" else None)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_overlay_turns_on_what_it_declares(point: Point) -> None:
    cell = point.cell()
    declared = {**cell.precision.expect, **cell.ep_backend.expect}
    assert cell.facts.active == {
        name.removeprefix("cookbook."): setting.value for name, setting in declared.items()
    }


def _copy(folder: Path, kind: str, name: str, *changes: tuple[str, str]) -> str:
    text = (RECIPES / kind / f"{name}.yaml").read_text(encoding="utf-8")
    for old, new in changes:
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
        parts = cell.recipe, mine, cell.ep_backend, cell.cluster
        copy = resolve_cell(merge_config(*parts, overrides=asked))
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
    ],
)  # fmt: skip
def test_a_declaration_that_is_not_what_trains_is_refused_with_both(
    tmp_path: Path, kind: str, name: str, old: str, new: str, words: str
) -> None:
    load_overlay.cache_clear()
    path = _copy(tmp_path, kind, name, (old, new))
    overlays: dict[str, Any] = {"precision": "mxfp8", kind: path}
    cell = cell_of("deepseek_v3_16b", **overlays)
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
        assigned |= set(re.findall(r"[$][{]([A-Z][A-Z_]*)(?:\[@\])?[}]", text))
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


def test_a_recipe_is_its_file_and_a_stand_in_lies_beside_it(tmp_path: Path) -> None:
    text = (RECIPES / "debug.yaml").read_text(encoding="utf-8")
    small = tmp_path / "small.yml"
    small.write_text(text)
    (tmp_path / "large.yaml").write_text(f"stand_in: small.yml\n{text}")
    assert load_recipe(str(tmp_path / "large.yaml")).stand_in == str(small)
    # The stem would be looked for with another suffix.
    assert reference("", RECIPES / "debug.yml") == str(RECIPES / "debug.yml")


def test_published_numbers_are_those_of_their_gpus() -> None:
    recipe, b200 = load_recipe("deepseek_v3_671b"), load_cluster("soperator-b200").gpu
    assert recipe.published_on(b200, 256)
    assert not recipe.published_on(b200, 128)
    assert not recipe.published_on(load_cluster("h200-node").gpu, 256)
