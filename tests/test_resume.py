"""Recorded cells go on: how they are made again, which go on, and what is refused."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError, JobError
from cookbook.base.yamlfile import Words
from cookbook.cli.main import main
from cookbook.config.asked import asked_options
from cookbook.config.cell import Cell
from cookbook.config.options import Setting
from cookbook.config.resolve import cell_from_record
from cookbook.launch import submit as executor
from cookbook.launch.submit import create_run, resume_cells
from cookbook.run import slurm
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import Run, release_submit_locks, run_names
from cookbook.run.status import (
    FAILED,
    FINISHED,
    QUEUED,
    RUNNING,
    Status,
    read_job,
    read_status,
    write_job,
    write_status,
)
from tests.cells import CLUSTER_FILES, RECIPES, RUNNABLE, STACK, Point, walked
from tests.check_cells import with_options
from tests.saved import FILES, cut, save
from tests.submit import Answer, submit

(CPU_NODES,) = [str(path) for path in CLUSTER_FILES if path.stem == "cpu-nodes"]
NAME = "debug-bf16-standard"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that runs go to."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def debug(**options: object) -> Cell:
    return with_options(Point("debug", "bf16", "standard", CPU_NODES).cell(), options)


def _cell(**options: object) -> Cell:
    return debug(**{"checkpoint.enable": True, **options})


def _ended(*cells: Cell, steps: tuple[int, ...] = (2, 4)) -> Run:
    run = create_run("mine", cells)
    for folder in run.cells:
        write_status(folder, Status(FAILED, 0, "a node was lost", 1))
        (folder.path / "attempt-0").mkdir()
        for step in steps:
            save(folder.path / "checkpoint", step)
    return run


def _resume(run: Run, *words: str, cell: str = "") -> Answer:
    name = f"{run.name}/{cell}" if cell else run.name
    return submit("run", "--resume", name, *words, "--dry-run", runs=run.folder.parent)


def _content(folder: CellFolder) -> dict[str, bytes]:
    paths = [path for path in folder.path.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


def test_a_dry_run_says_where_each_cell_goes_on_and_writes_nothing(tmp_path: Path) -> None:
    # The weights that it started from are no longer there, and no longer read.
    load = {"checkpoint.initial_load_in_hf": True, "checkpoint.initial_load_path": str(tmp_path)}
    run = _ended(_cell(**load))
    before = _content(run.cells[0])
    cut(run.cells[0].path / "checkpoint/step-4" / FILES[0])
    answer = _resume(run)
    assert answer.status == 0 and "safetensors" not in answer.stderr, answer
    assert f"  {NAME} passes over step-4: __0_0.distcp has 999 of" in answer.stdout
    assert f"  {NAME} continues after step 2 of 8" in answer.stdout
    assert _content(run.cells[0]).keys() == before.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["debug"], "continues with the cell's own recipe, found 'debug'"),
        (["--ep-backend=deepep"], "continues with the cell's own ep backend"),
        (["--set=training.step=9"], "nearest: training.steps"),
        (["--set=training.steps=4"], "has made all of its 4 steps; ask for more: --set training"),
        (["--set=checkpoint.enable=false"], "checkpoint.enable: is off, so nothing is loaded"),
        (
            ["--set=model.flavor=16B"],
            "found 16B, and the checkpoint is of debugmodel; leave it out",
        ),
        (
            ["--set=model.overrides.n_layers=5"],
            "model.overrides.n_layers: found 5, and the checkpoint is of the flavor as it is",
        ),
        (["--nodes=3"], "--nodes: found 3, allowed: 1 to 2 on cluster cpu-nodes"),
        (["--set=training.dataset=c4"], "training.dataset: differs from the checkpoint's"),
        (["--nodes=2"], "2 data-parallel ranks read the texts, and now there are 4"),
        (["--set=parallelism.expert_parallel_degree=3"], "3 does not divide"),
    ],
)
def test_what_cannot_go_on_is_refused_and_nothing_written(words: list[str], said: str) -> None:
    run = _ended(_cell())
    before = _content(run.cells[0])
    answer = _resume(run, *words)
    assert answer.status == 2 and said in answer.stderr, answer
    assert answer.stderr.count("\n") == 1
    assert _content(run.cells[0]) == before


def test_what_never_saved_or_never_began_starts_from_step_1() -> None:
    unsaved = _ended(_cell(), steps=())
    # As where sbatch refused it, for too many jobs.
    waiting = create_run("queued", [debug()])
    write_status(waiting.cells[0], Status(FAILED, reason="not queued: sbatch refused it"))
    release_submit_locks()
    for run in (unsaved, waiting):
        answer = _resume(run)
        assert answer.status == 0 and "and starts from step 1" in answer.stdout, answer
    write_status(unsaved.cells[0], Status(FINISHED))
    answer = _resume(unsaved)
    assert answer.status == 2 and "left no whole checkpoint in" in answer.stderr


def test_what_has_not_ended_is_refused() -> None:
    run = _ended(_cell())
    write_status(run.cells[0], Status(RUNNING, 0))
    answer = _resume(run)
    assert answer.status == 2
    assert f"{NAME}: is running; wait for its end, or: python submit.py cancel" in answer.stderr


def test_the_others_of_a_run_go_on_where_one_cannot() -> None:
    run = _ended(_cell(), replace(_cell(), name="other"), replace(_cell(), name="third"))
    save(run.cell("other").path / "checkpoint", 8)
    answer = _resume(run)
    assert answer.status == 0
    assert re.search("other is left out: .* has made all of its 8 steps", answer.stderr)
    assert "other" not in answer.stdout
    for name in (NAME, "third"):
        assert f"{name} continues after step 4 of 8" in answer.stdout


def test_other_nodes_go_on_where_the_texts_are_divided_as_before() -> None:
    run = _ended(_cell())
    answer = _resume(run, "--nodes=2", "--set=parallelism.tensor_parallel_degree=2")
    assert answer.status == 0, answer
    assert "2 node(s) x 2 CPU ranks" in answer.stdout and "TP 2" in answer.stdout
    anew = "--set=checkpoint.exclude_from_loading=dataloader"
    assert _resume(run, "--nodes=2", anew).status == 0


def _longer(steps: int, nodes: int) -> Cell:
    return replace(_cell(**{"training.steps": steps}), nodes=nodes)


def _submitted(monkeypatch: pytest.MonkeyPatch, answers: list[str]) -> None:
    def submit_one(run: Run, cells: Sequence[Cell]) -> str:
        if not answers:
            raise JobError("sbatch: error: the partition is down")
        return answers.pop(0)

    monkeypatch.setattr(executor, "_submit_to_slurm", submit_one)


def test_each_request_is_kept_with_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    run, later = _ended(_cell()), _ended(_cell())
    (folder,) = run.cells
    first = folder.record.read_text()
    write_job(folder, "7")
    _submitted(monkeypatch, ["11", "12", "13"])
    assert run_names() == [run.name, later.name]
    assert resume_cells(run, [_longer(12, 1)]) == ["11"]
    assert run_names() == [later.name, run.name]
    assert read_status(folder).state == QUEUED
    job = read_job(folder)
    assert job and job.job_id == "11"
    # Attempt 1 never began; the next request takes its place.
    assert resume_cells(run, [_longer(20, 2)]) == ["12"]
    (folder.path / "attempt-1").mkdir()
    longest = _longer(30, 2)
    longest = with_options(longest, {"checkpoint.load_step": 4})
    cluster = replace(longest.cluster, environment=Words({"NCCL_DEBUG": "INFO"}))
    assert resume_cells(run, [replace(longest, cluster=cluster)]) == ["13"]

    record = read_record(folder.record)
    assert (record.steps, record.world, record.environment["NCCL_DEBUG"]) == (30, 4, "INFO")
    # Started by hand, the script does not roll the run back again.
    assert record.options["checkpoint.load_step"] == 4
    assert "load_step" not in folder.script.read_text()
    assert (folder.path / "attempt-0/cell.yaml").read_text() == first
    assert read_record(folder.attempt(1).record).steps == 20


def test_a_resumed_cell_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _ended(_cell(), replace(_cell(), name="other"))
    release_submit_locks()
    write_job(run.cell("other"), "7")
    write_status(run.cell("other"), Status(RUNNING))
    write_status(run.cell(NAME), Status(FINISHED))
    monkeypatch.setattr(executor, "resume_cells", lambda *_: ["11"])
    monkeypatch.setattr(slurm, "job_infos", lambda *_: {"7": slurm.JobInfo("RUNNING", "")})
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits for another cell"))
    assert main(["run", "--resume", f"{run.name}/{NAME}", "--no-check"]) == 0


def test_a_failed_submission_leaves_the_cell_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _ended(_cell(), replace(_cell(), name="other"))
    write_job(run.cell("other"), "7")
    before = {path.name: path.read_bytes() for path in run.cell("other").path.glob("*.*")}
    _submitted(monkeypatch, ["11"])
    with pytest.raises(JobError, match="other: sbatch: error: the partition is down"):
        resume_cells(run, [_longer(12, 1), replace(_longer(12, 1), name="other")])
    assert {path.name: path.read_bytes() for path in run.cell("other").path.glob("*.*")} == before
    # The first one is queued.
    assert read_status(run.cell(NAME)).state == QUEUED
    assert read_record(run.cell(NAME).record).steps == 12


STEPS, TOTAL = "training.steps", "lr_scheduler.total_steps"


def made_again(record: CellRecord, nodes: int | None = None, **options: object) -> Cell:
    asked = {name: Setting(value, "") for name, value in options.items()}
    return cell_from_record("mine", record, "cell.yaml", nodes, asked)


def test_the_recorded_cell_comes_back_and_new_requests_win() -> None:
    cell = debug()
    assert made_again(cell.record()).record() == replace(cell, name="mine").record()
    changed = replace(debug(**{STEPS: 20}).record(), nodes=2)
    assert (made_again(changed).steps, made_again(changed).nodes) == (20, 2)
    assert made_again(changed, **{STEPS: 30}).steps == 30
    assert made_again(changed, nodes=1).nodes == 1
    excluded = debug(**{"checkpoint.exclude_from_loading": ["dataloader"]}).record()
    assert not made_again(excluded).options["checkpoint.exclude_from_loading"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_of_a_recipe_comes_back(recipe: str) -> None:
    for point in walked([point for point in RUNNABLE if point.recipe == recipe]):
        cell = point.cell()
        assert made_again(cell.record()).options.values == cell.options.values, point


def test_what_users_may_set_comes_back_and_what_scripts_set_does_not() -> None:
    for name in walked([name for name in STACK.options if name.startswith("cookbook.")]):
        record = replace(debug().record(), options={name: STACK.options[name].default})
        try:
            STACK.setting("", name)
        except InputError:
            assert not asked_options(record), name
        else:
            assert asked_options(record), name


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"stack": "2025.01"}, "cell.yaml: stack: found 2025.01, and this is "),
        ({"ranks_per_node": 4}, "cell.yaml: ranks_per_node: found 4, and cpu-nodes has 2 here"),
        ({"recipe": "", "files": {}}, "cell.yaml: does not say its recipe; start a new run"),
        ({"cluster": "locl", "files": {}}, "cell.yaml: unknown cluster 'locl'"),
    ],
)
def test_a_record_of_something_else_is_named(other: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        made_again(replace(debug().record(), **other))
    assert str(caught.value).startswith(said)


def test_spare_nodes_are_no_nodes_to_train_on(tmp_path: Path) -> None:
    recipe = tmp_path / "spare.yaml"
    text = debug().recipe.path.read_text(encoding="utf-8")
    recipe.write_text(f"{text}\nspare_nodes: 1\n", encoding="utf-8")
    record = Point(str(recipe), "bf16", "standard", CPU_NODES).cell().record()
    assert made_again(record).nodes == 1
    with pytest.raises(InputError, match="--nodes: found 2, allowed: 1 to 1 on cluster cpu-nodes"):
        made_again(record, nodes=2)


def test_more_steps_keep_the_schedule_of_the_learning_rate() -> None:
    first = debug(**{STEPS: 10}).record()
    assert made_again(first).options[TOTAL] is None
    longer = made_again(first, **{STEPS: 30})
    assert (longer.steps, longer.options[TOTAL]) == (30, 10)
    longest = made_again(longer.record(), **{STEPS: 50})
    assert (longest.steps, longest.options[TOTAL]) == (50, 10)
    assert made_again(first, **{STEPS: 30, TOTAL: 30}).options[TOTAL] == 30
