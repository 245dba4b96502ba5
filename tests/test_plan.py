"""The search over layouts: what it finds, keeps, explains and writes. One node, no pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.options import Setting
from cookbook.config.sweep import CellRequest, expand_sweep, sweep_of_recipe
from cookbook.config.validate import validation_errors
from cookbook.plan.recipe_file import render_recipe, write_recipe
from cookbook.plan.report import render_text
from cookbook.plan.search import TOO_LARGE, Found, evaluate, search
from cookbook.plan.space import RECOMPUTATION, Space, space_of
from cookbook.predict.documents import C4
from tests.check_cells import cell_of
from tests.submit import submit

TP, PP, EP = (f"parallelism.{word}_parallel_degree" for word in ("tensor", "pipeline", "expert"))
BATCH = "training.local_batch_size"
NO_PIPELINE = [f"--vary={PP}=1"]
BASE = cell_of("deepseek_v3_16b_fast", cluster="h200-node")
DEEPEP = cell_of("deepseek_v3_16b_fast", cluster="h200-node", ep_backend="deepep")
SAVES = "activation_checkpoint.op_sac_save_list"
EVERY = "activation_checkpoint.selective_ac_option"
KEPT = "activation_checkpoint.num_layers_kept"
NAMED = {"precision": "bf16", "ep_backend": "deepep"}


def words(*varied: str) -> list[str]:
    return [f"{PP}=1", *varied]


def space(*varied: str, held: Mapping[str, Any] | None = None) -> Space:
    settings = {name: Setting(value, "--set") for name, value in (held or {}).items()}
    return space_of(BASE, words(*varied), settings, NAMED)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(space().cells())


def test_all_that_the_rules_allow_is_looked_at_once(found: Found) -> None:
    cells = list(space().cells())
    assert len(found.candidates) + found.larger == len(cells) > 80
    assert len({json.dumps(cell.options.values, default=str) for cell in cells}) == len(cells)
    assert not [cell for cell in cells if validation_errors(cell)]
    seen = {(cell.layout.tp, cell.layout.ep, cell.options[BATCH]) for cell in cells}
    assert {(1, 8, 1), (4, 2, 16), (2, 4, 4)} <= seen
    # EP with TP over the whole node leaves FSDP nothing, which TorchTitan refuses.
    assert (8, 8, 1) not in seen
    modes = {json.dumps(mode) for mode in RECOMPUTATION}
    assert len({(c.options["activation_checkpoint.mode"], c.saves) for c in cells}) == len(modes)


def test_what_is_skipped_would_not_have_fitted(found: Found) -> None:
    looked_at = {one.cell.name for one in found.candidates}
    skipped = [cell for cell in space().cells() if cell.name not in looked_at]
    assert len(skipped) == found.larger > 0
    assert {evaluate(cell).verdict for cell in skipped} == {TOO_LARGE}


def test_what_layouts_share_changes_nothing(found: Found) -> None:
    for one in found.candidates[::5]:
        alone = evaluate(one.cell)
        assert (alone.memory, alone.step) == (one.memory, one.step), one.cell.name


@pytest.mark.titan
def test_nor_does_it_in_a_pipeline() -> None:
    options = {PP: 2, EP: 4, "parallelism.pipeline_parallel_schedule": "1F1B"}
    cells = [
        cell_of("deepseek_v3_16b_fast", {**options, BATCH: batch}, cluster="h200-node")
        for batch in (4, 8, 16)
    ]
    together = search(cells).candidates
    assert [one.memory for one in together] == [evaluate(cell).memory for cell in cells]
    assert [one.step for one in together] == [evaluate(cell).step for cell in cells]


def test_what_is_not_modelled_is_left_out_and_said(found: Found) -> None:
    unknown = [one for one in found.candidates if one.unknown]
    assert {one.cell.options[BATCH] for one in unknown} == {1, 2}
    text = render_text(found, BASE, None, 3, C4, 100)
    (line,) = [line for line in text.splitlines() if line.startswith("left out, since ")]
    assert "the host sets the pace" in line


def speed(candidate: Any) -> float:
    return float(candidate.step.tokens_per_second_per_gpu)


@pytest.mark.parametrize(
    ("option", "values", "mode"),
    # What needs most comes first.
    [(KEPT, [20, 6, 2, 0], "full"), (EVERY, ["20", "2", "1"], "selective")],
)
def test_layers_that_are_kept_count_in_a_search(option: str, values: list[Any], mode: str) -> None:
    tried = [f"{option}={','.join(map(str, values))}", f"activation_checkpoint.mode={mode}"]
    held: dict[str, Any] = {EP: 8} | ({SAVES: []} if option == EVERY else {})
    cells = list(space(*tried, f"{BATCH}=4,8,16", f"{TP}=1", held=held).cells())
    together = search(cells)
    assert {cell.options[option] for cell in cells} == set(values)
    looked_at = [one.cell for one in together.candidates]
    alone = [evaluate(cell).memory for cell in looked_at]
    assert [one.memory for one in together.candidates] == alone
    # What was not looked at does not fit, also where others of its batch do.
    skipped = [cell for cell in cells if cell not in looked_at]
    assert skipped
    assert {evaluate(cell).verdict for cell in skipped} == {TOO_LARGE}
    assert len({speed(one) for one in together.ranked()}) == len(together.ranked()) > 2


def test_set_holds_an_option_and_vary_names_its_values() -> None:
    cells = list(space(f"{BATCH}=3,5", f"{TP}=2", held={EP: 4}).cells())
    assert {(c.layout.tp, c.layout.ep, c.options[BATCH]) for c in cells} == {(2, 4, 3), (2, 4, 5)}
    cells = list(space("activation_checkpoint.mode=full,none", f"{TP}=1", held={EP: 8}).cells())
    assert {c.options["activation_checkpoint.mode"] for c in cells} == {"full", "none"}
    assert {c.options["model.attention"] for c in cells} == {"flash_attention_4"}
    attention = list(space("model.attention=flavor", f"{TP}=1", held={EP: 8}).cells())
    assert {c.options["model.attention"] for c in attention} == {"flavor"}


def test_precisions_and_ep_backends_are_axes() -> None:
    base = cell_of("deepseek_v3_671b_fast")
    every = space_of(base, words(f"{TP}=1", f"{EP}=64"), {}, dict.fromkeys(NAMED))
    pairs = {cell.pair for cell in every.cells()}
    assert pairs == {f"{p}+{e}" for p in ("bf16", "mxfp8") for e in ("standard", "deepep")}
    named = space_of(base, words(f"{TP}=1", "precision=mxfp8_wgrad_hp"), {}, dict.fromkeys(NAMED))
    assert {cell.precision.name for cell in named.cells()} == {"mxfp8_wgrad_hp"}
    # An H200 has no MXFP8.
    node = space_of(BASE, words(f"{TP}=1"), {}, dict.fromkeys(NAMED))
    assert {cell.precision.name for cell in node.cells()} == {"bf16"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("precison=bf16", "--vary: .*'precison'.*precision"),
        ("training.step=3", "--vary training.step: .*nearest: training.steps"),
        ("training.seq_len", "--vary training.seq_len: has no values"),
        (f"{TP}=two", f"--vary {TP}: "),
        ("precision=mxfp9", "mxfp9"),
    ],
)
def test_a_wrong_axis_is_named(word: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        space_of(BASE, [word], {}, NAMED)


def test_interrupted_it_keeps_what_it_has() -> None:
    looked_at: list[int] = []

    def stop(found: Found) -> None:
        looked_at.append(len(found.candidates))
        if len(looked_at) == 7:
            raise KeyboardInterrupt

    found = search(space().cells(), on_progress=stop)
    assert found.interrupted
    assert len(found.candidates) == 7
    text = render_text(found, BASE, None, 3, C4, 100)
    assert "of 100 layouts (interrupted)" in text.splitlines()[0]


def best(found: Found) -> Cell:
    return found.ranked()[0].cell


def step_of(cell: Cell) -> dict[str, float]:
    step = evaluate(cell).step
    assert step
    return dict(step.terms_ms)


def test_the_winner_is_written_as_a_recipe_that_is_the_winner(found: Found, tmp_path: Path) -> None:
    winner = found.ranked()[0]
    path = tmp_path / "mine.yaml"
    write_recipe(path, winner, DEEPEP)
    request = CellRequest(load_cluster("h200-node"), "bf16", "deepep")
    (cell,) = expand_sweep(sweep_of_recipe(str(path)), request)
    names = {*cell.options.settings, *winner.cell.options.settings}
    assert {n for n in names if cell.options[n] != winner.cell.options[n]} == set()
    assert cell.nodes == winner.cell.nodes
    assert evaluate(cell).step == winner.step
    text = path.read_text()
    # What was changed stands above its line, with what the recipe had.
    changed = [n for n in names if winner.cell.options[n] != DEEPEP.options[n]]
    assert changed
    for name in changed:
        key = name.rpartition(".")[2]
        assert re.search(rf"# deepseek_v3_16b_fast: .*\n +{key}: ", text), name
    with pytest.raises(InputError, match="exists already"):
        write_recipe(path, winner, DEEPEP)
    with pytest.raises(InputError, match="not the name of a YAML file"):
        write_recipe(tmp_path / "mine", winner, DEEPEP)
    assert sorted(tmp_path.iterdir()) == [path]


def test_an_overlay_stays_out_of_the_recipe() -> None:
    cell = cell_of("deepseek_v3_671b_fast", precision="mxfp8", ep_backend="deepep")
    text = render_recipe("mine", evaluate(cell), cell)
    assert "\nprecision: mxfp8\nep_backend: deepep\n" in text
    assert "quantize" not in text
    assert "comm_backend" not in text
    assert "mixed_precision" not in text


ONE_NODE = ["deepseek_v3_16b", "--cluster", "h200-node", "--ep-backend", "deepep"]


def asked(*more: str, runs: Path) -> Any:
    few = ["--vary", f"{PP}=1", "--vary", f"{TP}=1", "--set", f"{EP}=8"]
    return submit("plan", *ONE_NODE, *few, *more, runs=runs)


def test_the_command_searches_and_writes(tmp_path: Path) -> None:
    recipe, figure = tmp_path / "won.yaml", tmp_path / "front.svg"
    answer = asked(
        "--best", "2", "--explain", "1,2", "-o", str(recipe), "--figure", str(figure), runs=tmp_path
    )
    assert (answer.status, answer.stderr) == (0, "")
    assert answer.stdout.startswith("16b on 1 node(s) x 8 H200: 25 of 25 layouts; ")
    assert "tokens/s/GPU" in answer.stdout
    # The walk is asked for: it comes last, where one sees it.
    head, walked = answer.stdout.split(f"\nwrote {recipe}\n\n")
    assert "tokens/s/GPU" in head
    assert walked.startswith("microseconds a token and GPU") and "memory " in walked
    assert recipe.is_file()
    assert "</svg>" in figure.read_text()
    again = asked("--json", runs=tmp_path)
    assert json.loads(again.stdout)["layouts"]["looked_at"] == 25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--explain", "1"], "--explain: found '1', allowed: FROM,TO"),
        (["--explain", "1,999"], "--explain: found 999, allowed: 0 (the recipe) to "),
        # The scripts' EP 32 is more than the node's 8 GPUs, but the search has its own.
        (["--set", "training.seq_len=8191"], "leaves no layout"),
        (["--set", f"{TP}=1"], f"--vary {TP}: has its values twice"),
        (["--vary", f"{BATCH}=1", "--vary", f"{BATCH}=2"], "has its values twice"),
        (["--documents", "400"], "--documents: found '400', allowed: MEAN:MEDIAN"),
        (["--vary", "model.attention=flash"], "--vary model.attention: "),
        (["--set", "model.flavor=17B"], "the layers of deepseek_v3 17B are not counted"),
        (["-o", "won.txt"], "is not the name of a YAML file"),
    ],
)
def test_a_wrong_question_ends_in_a_line(
    words: Sequence[str], message: str, tmp_path: Path
) -> None:
    answer = asked(*words, runs=tmp_path)
    assert answer.status == 2
    assert answer.stdout == ""
    assert message in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_a_cluster_without_facts_is_refused(tmp_path: Path) -> None:
    text = (load_cluster("h200-node").path).read_text().replace("name: H200", "name: H800")
    profile = tmp_path / "h800.yaml"
    profile.write_text(text)
    answer = submit("plan", "deepseek_v3_16b", "--cluster", str(profile), runs=tmp_path)
    assert answer.status == 2
    assert (
        "nothing is known of the speed of a H800; describe it in recipes/hardware/" in answer.stderr
    )


def test_nothing_that_fits_is_said(tmp_path: Path) -> None:
    answer = submit(
        "plan", "deepseek_v3_671b", "--nodes", "1", "--vary", f"{PP}=1", "--vary", f"{TP}=1",
        "--set", f"{EP}=8", "--precision", "bf16", "--ep-backend", "standard", runs=tmp_path,
    )  # fmt: skip
    assert answer.status == 1
    assert "no layout fits" in answer.stdout


def test_tokens_travel_between_nodes_in_parts() -> None:
    base = cell_of("deepseek_v3_671b", {}, precision="mxfp8", ep_backend="deepep")
    degree = "parallelism.expert_parallel_degree"
    words = [f"{degree}=8,16", "parallelism.tensor_parallel_degree=1"]
    words += ["parallelism.pipeline_parallel_degree=1", "training.local_batch_size=2"]
    space = space_of(base, words, {}, {"precision": "mxfp8", "ep_backend": None})
    chunks = {
        (cell.ep_backend.name, cell.options[degree], cell.options["deepep.num_chunks"])
        for cell in space.cells()
    }
    assert chunks == {("standard", 8, 1), ("standard", 16, 1), ("deepep", 8, 1), ("deepep", 16, 2)}
    scored = "deepep.score_activations"
    found = {(cell.ep_backend.name, cell.options[scored]) for cell in space.cells()}
    assert found == {("standard", False), ("deepep", True)}
    held = space_of(base, [*words, f"{scored}=false"], {}, {"precision": "mxfp8"})
    assert {cell.options[scored] for cell in held.cells()} == {False}
    held = space_of(base, [*words, "deepep.num_chunks=4"], {}, {"precision": "mxfp8"})
    assert {cell.options["deepep.num_chunks"] for cell in held.cells()} == {4}
