"""`plan` as a command, and what it prints, writes and draws of layouts that are made up."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from cookbook.base.gpus import Gpu
from cookbook.base.paths import RECIPES
from cookbook.cli import plan
from cookbook.cli.main import main
from cookbook.config import cluster
from cookbook.config.cell import Cell
from cookbook.config.dialect.names import DEGREES
from cookbook.config.facts import Facts
from cookbook.config.options import command_line_settings
from cookbook.plan import search as searching
from cookbook.plan.render import as_mapping, command_of, render_json, render_text
from cookbook.plan.search import Candidate, SearchResult, evaluate
from cookbook.predict.hardware import C4, Documents
from cookbook.predict.memory import FITS, TIGHT, TOO_LARGE, StageMemory
from cookbook.predict.step import StepTime
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

EP, TP, PP = DEGREES["ep"], DEGREES["tp"], DEGREES["pp"]
CONTEXT, BATCH = DEGREES["cp"], Facts.local_batch
CELL = on_gpus(4)
UNHELD = ["plan", "deepseek_v3_16b", "--cluster", "h200-node"]
ONE_NODE = [*UNHELD, "--set", f"{EP}=8"]
FEW = ["--vary", f"{PP}=1", "--vary", f"{TP}=1", "--ep-backend", "deepep"]


def candidate(
    speed: float, gib: float, verdict: str = FITS, cell: Cell = CELL, unknown: str = ""
) -> Candidate:
    """A layout of that many tokens/s/GPU; of its step's 100 ms half is dense GEMMs."""
    shares = {"dense GEMMs": 50.0, "EP, exposed": 30.0, "pipeline bubble": 20.0}
    step = StepTime(0, shares, 0.0, tokens_per_gpu=speed / 10, documents=C4)
    memory = StageMemory(0, "the loss", {"activations": gib - 1, "parameters": 1.0}, 0.0)
    return Candidate(cell, memory, verdict, step if verdict == FITS else None, unknown)


ALL = [(90, 40), (100, 50), (80, 40), (95, 60), (70, 30)]
FOUND = SearchResult([candidate(speed, gib) for speed, gib in ALL])
RECIPE = candidate(50, 70)


def places(found: list[Candidate]) -> list[tuple[float, float]]:
    return [(round(one.speed), round(one.memory.total)) for one in found]


def test_the_fastest_come_first() -> None:
    assert places(FOUND.ranked()) == [(100, 50), (95, 60), (90, 40), (80, 40), (70, 30)]


@pytest.mark.parametrize(
    ("totals", "verdict"), [((0.1, 0.9), FITS), ((0.9, 1.0), TIGHT), ((1.2, 0.3), TOO_LARGE)]
)
def test_the_stage_that_needs_most_decides(
    totals: tuple[float, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "describe_ranks", lambda cell: totals)
    gpu = 139.8
    made = lambda cell, part: candidate(1, part * gpu).memory  # noqa: E731
    monkeypatch.setattr(searching, "predict_memory", made)
    monkeypatch.setattr(searching, "predict_step", lambda *_: RECIPE.step)
    one = evaluate(CELL)
    assert one.memory.total == pytest.approx(max(totals) * gpu)
    assert one.verdict == verdict
    # Only what fits well is timed.
    assert (one.step is not None) is (verdict == FITS)


def test_a_layout_for_programs() -> None:
    slow, fast = candidate(100, 50), candidate(250, 40.04)
    found = as_mapping(fast, slow)
    # 25 tokens a GPU on four of them.
    assert found.items() >= {
        "tokens_per_second_per_gpu": 250, "times_the_recipe": 2.5, "step_ms": 100,
        "exposed_ms": 30, "bubble_ms": 20, "memory_gib": 40.0, "memory_largest": "activations",
        "tokens_per_step": 100, "expert_tensor_parallel_degree": 1,
    }.items()  # fmt: skip
    assert fast.times(None) is candidate(1, 1, TIGHT).times(slow) is None
    unknown = as_mapping(candidate(1, 200, TOO_LARGE), slow)
    assert {unknown[key] for key in ("step_ms", "tokens_per_step", "exposed_ms")} == {None}


def test_the_table_has_shares_of_the_step_and_counts_every_layout() -> None:
    found = SearchResult([*FOUND.candidates, candidate(1, 150, TIGHT)], larger=3)
    found.candidates += [candidate(1, 200, TOO_LARGE, unknown="it hides")] * 2
    text = render_text(found, CELL, RECIPE, 2, C4, 40, ["a=1: why"])
    assert "11 of 40 layouts; 5 fit, 1 are tight, 5 do not fit" in text
    rows = [line.split() for line in text.splitlines() if re.match(r" *(recipe|[0-9]) ", line)]
    assert [row[0] for row in rows] == ["recipe", "1", "2"]
    assert rows[1][1:3] == ["100", "2.00x"]
    assert rows[1][-5:] == ["30%", "20%", "dense", "GEMMs", "(50%)"]
    assert text.endswith("\nleft out, since it hides\nleft out: a=1: why\n")
    content = json.loads(render_json(found, CELL, RECIPE, 2))
    assert content["layouts"] == {"looked_at": 11, "fit": 5, "tight": 1, "too_large": 5}
    assert [one["tokens_per_second_per_gpu"] for one in content["best"]] == [100, 95]


def test_the_best_is_held_to_published_numbers() -> None:
    base = cell_of("deepseek_v3_671b")
    text = render_text(SearchResult([candidate(1302, 50)]), base, None, 1, C4, 1)
    assert "\npublished bf16+standard: 651 tokens/s/GPU; the first is at 2.00x\n" in text
    assert "published" not in render_text(SearchResult(), base, None, 1, C4, 1)


class Search:
    """Stands in for the search: notes its cells, and finds two of them or what a test sets."""

    def __init__(self) -> None:
        self.cells: Sequence[Cell] = ()
        self.documents: Documents | None = None
        self.found = SearchResult()

    def __call__(self, cells: Iterable[Cell], documents: Documents, _: None) -> SearchResult:
        self.cells, self.documents = [*cells], documents
        made = [candidate(100, 50, cell=self.cells[0]), candidate(90, 50, cell=self.cells[1])]
        self.found.candidates = self.found.candidates or made
        return self.found


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    search = Search()
    monkeypatch.setattr(plan, "search", search)
    return search


def test_held_and_varied_values(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--vary", f"{TP}=1,2", "--set", f"{BATCH}=2", "--documents", "300:200"]
    assert main([*ONE_NODE, *words, "--precision", "mxfp8", "--ep-backend", "deepep"]) == 0
    assert {cell.pair for cell in search.cells} == {"mxfp8+deepep"}
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recipe")]
    assert re.search(r" EP 8 +2 .* mxfp8\+deepep ", row)
    held = {(cell.options[EP], cell.options[BATCH], cell.nodes) for cell in search.cells}
    assert held == {(8, 2, 1)}
    assert {cell.options[TP] for cell in search.cells} == {1, 2}
    named = search.documents
    assert named is not None and (named.mean_tokens, named.median_tokens) == (300, 200)
    once, synonyms = len(search.cells), ["--vary", "precision=mxfp8,mxfp8_default"]
    assert main([*ONE_NODE, *words, *synonyms, "--ep-backend", "deepep", "--best", "0"]) == 0
    assert len(search.cells) == once
    # Without words the recipe's own, and other EP backends than its own.
    assert main([*ONE_NODE, "--best", "0"]) == 0
    assert len({cell.pair for cell in search.cells}) > 1
    assert search.documents is not None and search.documents != named
    rows = capsys.readouterr().out.splitlines()
    assert not [line for line in rows if re.match(r" *1 ", line)]


def test_a_recipe_may_name_a_precision_of_the_users(
    search: Search, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, source = tmp_path / "own.yaml", tmp_path / "mine.yaml"
    own.write_text((RECIPES / "precision" / "bf16.yaml").read_text())
    recipe = (RECIPES / "deepseek_v3_16b.yaml").read_text()
    source.write_text(f"{recipe}\nprecision: {own}\n")
    search.found.candidates = []
    assert main(["plan", str(source), *ONE_NODE[2:]]) == 0
    assert {cell.precision.name for cell in search.cells} == {"own", "bf16"}
    assert f"run {source} --cluster h200-node --precision {own} " in capsys.readouterr().out


@pytest.fixture
def eight_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the cluster `local` eight GPUs."""
    cluster.load_cluster.cache_clear()
    monkeypatch.setattr(cluster, "visible_gpus", lambda: (Gpu("H200", 9.0, 139.8),) * 8)
    yield
    cluster.load_cluster.cache_clear()


@pytest.mark.usefixtures("eight_h200")
@pytest.mark.parametrize("where", ["h200-node", "local"])
def test_the_command_of_a_layout_trains_it(
    where: str, search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    """On `local`, which gives a recipe the largest EP degree, too."""
    # Without `compile` the time of the debug recipe is not modelled.
    fixed = ["--set", f"{EP}=2", "--set", "compile.enable=true"]
    assert main(["plan", "debug", "--cluster", where, *fixed]) == 0
    (line,) = re.findall("^1: python submit.py run (.*)", capsys.readouterr().out, re.M)
    assert main(["show", *shlex.split(line)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)["options"]
    planned = search.cells[0].options.values
    default = CELL.options.stack.options
    assert {name: shown.get(name, default[name].default) for name in planned} == planned


def test_a_command_has_the_nodes_and_the_overlays_options() -> None:
    base = cell_of("deepseek_v3_671b", precision="mxfp8", ep_backend="deepep")
    planned = dataclasses.replace(base, nodes=16)
    changed = with_options(planned, {BATCH: 17, "quantize.grouped_mm.mx.fqns": ["experts", "wo"]})
    assert command_of(changed) == (
        "python submit.py run deepseek_v3_671b --cluster soperator-b200 --precision mxfp8 "
        f"--ep-backend deepep --nodes 16 --set {BATCH}=17 "
        "--set quantize.grouped_mm.mx.fqns=experts,wo"
    )


def test_nothing_fits(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    search.found.candidates = [candidate(1, 500.0, TOO_LARGE)]
    assert main(ONE_NODE) == 1
    assert "no layout fits" in capsys.readouterr().out


UNKNOWN = "found 2, and context parallelism is unproved: on CPU ranks it fails; set it to 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ONE_NODE, "--set", "model.flavor=17B"], "the layers of deepseek_v3 17B are not counted"),
        ([*ONE_NODE, "--documents", "400"], "--documents: found '400', allowed: MEAN:MEDIAN"),
        ([*ONE_NODE, "--vary", f"{EP}=1"], f"--vary {EP}: has its values twice"),
        ([*UNHELD, "--vary", "precison=bf16"], "'precison'"),
        ([*UNHELD, "--vary", "training.step=3"], "--vary training.step: "),
        ([*UNHELD, "--vary", f"{EP}=8,0"], f"--vary {EP}: found 0, allowed: 1 and up"),
        # Where one value is all that was asked for, it is the error.
        ([*ONE_NODE, "--vary", f"{CONTEXT}=2"], f"rules allow; {CONTEXT}=2: {UNKNOWN}"),
    ],
)
def test_a_wrong_question_ends_in_a_line(
    words: Sequence[str], message: str, search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err
    assert search.cells == ()


def test_rejected_values_and_reasons(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ONE_NODE, "--vary", f"{TP}=1,3", "--vary", f"{CONTEXT}=1,2"]
    assert main([*words, "--json"]) == 0
    left_out = json.loads(capsys.readouterr().out)["left_out"]
    assert left_out == [f"{TP}=3: 3 does not divide 8 ranks; try 2", f"{CONTEXT}=2: {UNKNOWN}"]


def test_a_gpu_of_unknown_speed_has_an_order_and_no_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = (RECIPES / "cluster/h200-node.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(profile.replace("name: H200", "name: H20"))
    words = [*ONE_NODE, *FEW, "--cluster"]
    known, new = (
        json.loads(capsys.readouterr().out)["best"]
        for name in ("h200-node", str(tmp_path / "mine.yaml"))
        if main([*words, name, "--json"]) == 0
    )
    assert len(known) > 1
    for one, other in zip(known, new, strict=True):
        assert one["recomputation"] == other["recomputation"]
        assert one["step_ms"] and other["step_ms"] is None
    assert main([*words, str(tmp_path / "mine.yaml")]) == 0
    assert "8 H20 is unknown (recipes/hardware/): ordered by counted" in capsys.readouterr().out


def test_a_search_and_its_winner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE_NODE, *FEW, "--best", "2"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("16b on 1 node(s) x 8 H200: 25 of 25 layouts; ")
    assert "tokens/s/GPU" in said.out and said.out.count("submit.py run deepseek_v3_16b ") == 2
    assert main([*ONE_NODE, *FEW, "--json"]) == 0
    best: dict[str, Any] = json.loads(capsys.readouterr().out)["best"][0]
    words = [word for word in shlex.split(best["command"]) if "=" in word]
    options = {name: one.value for name, one in command_line_settings(words).items()}
    planned = cell_of("deepseek_v3_16b", options, cluster="h200-node", ep_backend="deepep")
    assert (
        as_mapping(evaluate(planned)).items()
        >= {key: value for key, value in best.items() if key != "times_the_recipe"}.items()
    )
