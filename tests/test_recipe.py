"""Recipe and overlay files are read, or refused with one message that names file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from cookbook.cli.main import main
from cookbook.config.cluster import load_cluster
from cookbook.config.options import exported
from cookbook.config.recipe import load_overlay, load_precision, load_recipe, names_in
from cookbook.config.sweep import CellRequest, expand_sweep, load_sweep, sweep_of_recipe
from cookbook.plan.search import evaluate
from tests.cells import EP_BACKENDS, PRECISIONS, walked
from tests.cells import RECIPES as RECIPE_NAMES

SWEEPS = walked(names_in("sweep"))
HEAD = "name: mine\ndescription: mine\nnodes: 1\n"


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_is_read_and_explained(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description and recipe.settings and recipe.nodes >= 1
    # What needs a cluster, or takes hours on a machine, has a recipe for any machine instead.
    large = recipe.nodes > 1 or name.startswith(("deepseek_v3_", "qwen3_30b"))
    assert (recipe.stand_in is not None) is large
    if recipe.stand_in:
        family = load_recipe(recipe.stand_in).settings["model.name"].value
        assert family == recipe.settings["model.name"].value
    text = recipe.path.read_text(encoding="utf-8").splitlines()
    # Commented, so that someone can learn from it and copy it.
    assert text[0].startswith("# ")
    assert sum(line.lstrip().startswith("#") for line in text) >= 5
    # Every setting knows where it stands.
    for option, setting in recipe.settings.items():
        line = int(setting.origin.split(":")[1])
        assert option.rpartition(".")[2] in text[line - 1]


@pytest.mark.parametrize(
    ("kind", "name"),
    walked([("precision", name) for name in PRECISIONS])
    + [("ep_backend", name) for name in EP_BACKENDS],
)
def test_every_overlay_is_read_and_explained(kind: str, name: str) -> None:
    overlay = load_overlay(kind, name)
    assert overlay.name == name and overlay.description
    assert overlay.path.read_text(encoding="utf-8").startswith("# ")
    for synonym in overlay.synonyms:
        assert load_overlay(kind, synonym).name == name


# Each recipe and sweep, on the cluster that it is made for.
_ON_B200 = (
    *("deepseek_v3_671b", "deepseek_v3_671b_fast", "deepseek_v3_16b"),
    "qwen3_30b_a3b_32nodes",
)
_SWEEPS_ON_B200 = ("convergence", "fast", "matrix", "matrix_random", "qwen3")


# The memory of a pipeline follows from torch's list of its actions.
@pytest.mark.titan
@pytest.mark.parametrize("name", walked([*RECIPE_NAMES, *SWEEPS]))
def test_every_recipe_and_sweep_fits_as_it_stands(name: str) -> None:
    own = "soperator-b200" if name in (*_ON_B200, *_SWEEPS_ON_B200) else "h200-node"
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
