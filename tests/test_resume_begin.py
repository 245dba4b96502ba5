"""What a job does with the checkpoints that it finds: the newest whole one, others moved aside."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.base.schema import Unchecked
from cookbook.config.cell import train_argv
from cookbook.run.attempts import AttemptEnd, Cause, write_attempt_end
from cookbook.run.checkpoints import STATES
from cookbook.run.folder import Attempt
from cookbook.supervise.__main__ import CHECKED
from cookbook.supervise.__main__ import main as job
from tests.cells import Point
from tests.saved import FILES, cut, save
from tests.submit import listing, submit

NAME = "debug-bf16-standard"
OPTIONS = ("--checkpoint.enable", "--training.steps=20")


@dataclass
class Begun:
    """A cell's folder, the run of which a script begins."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    @property
    def saved(self) -> Path:
        return self.folder / "checkpoint"

    def begin(self, *words: str, attempt: int = 0) -> str:
        """Begin an attempt, as its script does; what it says on standard error."""
        cell = Point("debug", "bf16", "standard", "local").cell()
        named = ["--recipe=debug", "--precision=bf16", "--ep-backend=standard", "--cluster=local"]
        own = ["begin", str(self.folder), f"--cell={NAME}", "--nodes=1", *named]
        self.capture.readouterr()
        status = job([*own, "--", *train_argv(cell), "--", *OPTIONS, *words])
        answer = self.capture.readouterr()
        if status == CHECKED:
            return answer.err
        assert answer.out.split()[0] == str(attempt)
        # The script does this.
        (self.folder / f"attempt-{attempt}").mkdir(exist_ok=True)
        return answer.err

    def step(self, attempt: int = 0) -> int | None:
        content = json.loads((self.folder / f"attempt-{attempt}/resume.json").read_text())
        step: int | None = content["step"]
        return step


@pytest.fixture
def cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Begun:
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Begun(tmp_path / "runs" / "mine" / NAME, capsys)


def test_the_newest_of_whole_checkpoints_is_taken_and_nothing_is_touched(cell: Begun) -> None:
    for step in (9, 10, 8):
        save(cell.saved, step)
    (cell.saved / "step-11.tmp").mkdir()
    (cell.saved / "notes").touch()
    before = listing(cell.saved)
    said = cell.begin()
    assert said == "cookbook: attempt 0 continues after step 10\n"
    assert cell.step() == 10
    assert listing(cell.saved) == before
    assert not (cell.folder / "checkpoint-damaged").exists()


def _truncated(path: Path) -> None:
    cut(path / FILES[1])


def _gone(path: Path) -> None:
    (path / FILES[0]).unlink()


def _empty(path: Path) -> None:
    (path / FILES[0]).write_bytes(b"")


def _unfinished(path: Path) -> None:
    (path / ".metadata").unlink()


def _half_named(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")


def _cut_metadata(path: Path) -> None:
    cut(path / ".metadata", 100)


def _no_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"")


def _foreign(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps([1, 2]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncated, "__1_0.distcp has 999 of 1,000 bytes"),
        (_gone, "__0_0.distcp is missing"),
        (_empty, "__0_0.distcp has 0 of 1,000 bytes"),
        (_unfinished, "has no .metadata, so it was not written to its end"),
        (_half_named, "has no .metadata, so it was not written to its end"),
        (_cut_metadata, ".metadata cannot be read: "),
        (_no_metadata, ".metadata cannot be read: "),
        (_foreign, ".metadata cannot be read: "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_one_is_moved_aside_whole_and_named(
    cell: Begun, damage: object, said: str
) -> None:
    save(cell.saved, 4)
    newest = save(cell.saved, 6)
    assert callable(damage)
    damage(newest)
    content = {path.name: path.read_bytes() for path in newest.iterdir()}
    words = cell.begin()
    assert cell.step() == 4
    aside = cell.folder / "checkpoint-damaged" / "step-6"
    first, second = words.splitlines()
    assert first.startswith(f"cookbook: attempt 0 passed over step-6: {said}")
    assert first.endswith(f"; moved to {aside}")
    assert second == "cookbook: attempt 0 continues after step 4"
    assert (cell.folder / "attempt-0" / "train.log").read_text() == words
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == content
    assert [path.name for path in cell.saved.iterdir()] == ["step-4"]
    status = submit("status", "mine", runs=cell.folder.parent.parent)
    assert f"{NAME}: attempt 0 passed over step-6: {said}" in status.stdout, status
    report = submit("report", "mine", runs=cell.folder.parent.parent)
    assert f"- {NAME}: attempt 0 passed over step-6: {said}" in report.stdout
    as_json = submit("report", "mine", "--format", "json", runs=cell.folder.parent.parent)
    (found,) = json.loads(as_json.stdout)["cells"]
    assert found["resumptions"][0]["step"] == 4
    assert found["resumptions"][0]["passed_over"][0]["checkpoint"] == "step-6"


def test_what_was_saved_after_a_nan_is_passed_over(cell: Begun) -> None:
    for step in (4, 6, 8):
        save(cell.saved, step)
    attempt = Attempt(cell.folder / "attempt-0", 0)
    write_attempt_end(attempt, AttemptEnd(0, Cause.NAN_LOSS, last_good_step=6))
    words = cell.begin(attempt=1)
    assert "attempt 1 passed over step-8: was saved after step 6, the last one with a" in words
    assert (cell.folder / "checkpoint-damaged" / "step-8").is_dir()
    assert sorted(path.name for path in cell.saved.iterdir()) == ["step-4", "step-6"]
    # What the next attempt saves again is as good as any.
    save(cell.saved, 8)
    write_attempt_end(Attempt(cell.folder / "attempt-1", 1), AttemptEnd(1, Cause.DEAD_RANK))
    assert "attempt 2 continues after step 8" in cell.begin(attempt=2)


def test_a_second_one_of_the_same_step_takes_no_place(cell: Begun) -> None:
    save(cell.saved, 4)
    for attempt in range(3):
        cut(save(cell.saved, 6) / FILES[0], 10 + attempt)
        cell.begin(attempt=attempt)
    aside = cell.folder / "checkpoint-damaged"
    sizes = {path.name: (path / FILES[0]).stat().st_size for path in aside.iterdir()}
    assert sizes == {"step-6": 10, "step-6-2": 11, "step-6-3": 12}


def test_where_none_is_whole_the_cell_starts_from_its_initial_weights(cell: Begun) -> None:
    cut(save(cell.saved, 4) / FILES[0])
    _unfinished(save(cell.saved, 6))
    assert cell.begin().endswith("starts at the beginning: no checkpoint is whole\n")
    assert cell.step() is None
    # TorchTitan reads checkpoint.initial_load_path only where this folder is not there.
    assert not cell.saved.exists()
    assert len(listing(cell.folder / "checkpoint-damaged")) == 2 + 3 + 2


def test_reading_metadata_runs_nothing_that_it_names(cell: Begun, tmp_path: Path) -> None:
    save(cell.saved, 4)
    ran = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(ran),)

    path = save(cell.saved, 6)
    (path / ".metadata").write_bytes(pickle.dumps(Attack()))
    cell.begin()
    assert cell.step() == 4 and not ran.exists()


def test_the_model_alone_is_refused_with_the_way_around(cell: Begun) -> None:
    save(cell.saved, 4)
    last = save(cell.saved, 6, states=())
    with pytest.raises(InputError) as refused:
        cell.begin()
    message = str(refused.value)
    assert "step-6: holds the model without optimizer, lr_scheduler" in message
    assert "(checkpoint.last_save_model_only), so training cannot continue from it" in message
    assert not (cell.folder / "attempt-0").exists() and not (cell.folder / "cell.yaml").exists()
    # What it says to do does it.
    command = message.rpartition("after step 4, move it away: ")[2]
    _, source, target = command.split()
    shutil.move(source, target)
    assert not last.exists()
    cell.begin()
    assert cell.step() == 4


def test_the_model_alone_as_only_checkpoint_can_start_a_new_run(cell: Begun) -> None:
    last = save(cell.saved, 6, states=())
    with pytest.raises(InputError, match=f"checkpoint.initial_load_path={last}"):
        cell.begin()
    cell.begin(f"--checkpoint.exclude_from_loading={','.join(STATES)}")
    assert cell.step() == 6


def test_a_seed_is_a_model_alone_and_is_loaded(cell: Begun) -> None:
    save(cell.saved, 0, states=())
    cell.begin()
    assert cell.step() == 0


def test_hugging_face_weights_are_no_checkpoint_to_continue_from(cell: Begun) -> None:
    path = cell.saved / "step-6"
    path.mkdir(parents=True)
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="step-6: holds the model without optimizer"):
        cell.begin()


def test_another_number_of_readers_is_refused_or_reads_anew(cell: Begun) -> None:
    save(cell.saved, 6, readers=4)
    with pytest.raises(InputError) as refused:
        cell.begin()
    assert "4 data-parallel ranks read the texts, and now there are 2" in str(refused.value)
    assert "checkpoint.exclude_from_loading=dataloader" in str(refused.value)
    cell.begin("--checkpoint.exclude_from_loading=dataloader")
    assert cell.step() == 6


def test_a_step_that_is_asked_for_is_judged_alone(cell: Begun) -> None:
    for step in (4, 6, 8):
        save(cell.saved, step)
    cut(cell.saved / "step-6" / FILES[0])
    cut(cell.saved / "step-8" / FILES[0])
    with pytest.raises(InputError, match=r"load_step: step-6: __0_0.distcp has 999 of"):
        cell.begin("--checkpoint.load_step=6")
    with pytest.raises(InputError, match="load_step: step-5: is not there"):
        cell.begin("--checkpoint.load_step=5")
    cell.begin("--checkpoint.load_step=4")
    assert cell.step() == 4 and len(list(cell.saved.iterdir())) == 3


def test_no_checkpoint_is_judged_where_none_is_loaded(cell: Begun) -> None:
    cut(save(cell.saved, 6) / FILES[0])
    assert cell.begin("--checkpoint.no_enable") == ""
    assert [path.name for path in cell.saved.iterdir()] == ["step-6"]


def test_the_check_of_a_line_moves_nothing(cell: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COOKBOOK_CHECK", "1")
    save(cell.saved, 4)
    cut(save(cell.saved, 6) / FILES[0])
    before = listing(cell.folder)
    assert "may run" in cell.begin()
    assert listing(cell.folder) == before
    save(cell.saved, 8, states=())
    with pytest.raises(InputError, match="step-8: holds the model without"):
        cell.begin()


def test_a_script_started_again_by_hand_keeps_what_was_asked_first(cell: Begun) -> None:
    cell.begin()
    record = cell.folder / "cell.yaml"
    first = yaml.safe_load(record.read_text())
    assert "changes" not in first
    cell.begin("--training.steps=30", attempt=1)
    cell.begin("--training.steps=30", attempt=2)
    content = yaml.safe_load(record.read_text())
    assert content.pop("changes") == [{"attempt": 1, "options": {"training.steps": 30}}]
    assert content == first and first["options"]["training.steps"] == 20


def test_what_the_scripts_add_to_every_job_is_no_change(cell: Begun) -> None:
    """`submit.py` records a cell without the words by which a script starts the cookbook."""
    asked = Point("debug", "bf16", "standard", "local").cell().record()
    options = {**asked.options, "checkpoint.enable": True, "training.steps": 20}
    replace(asked, options=Unchecked(options)).write(cell.folder / "cell.yaml")
    before = (cell.folder / "cell.yaml").read_text()
    (cell.folder / "attempt-0").mkdir()
    cell.begin(attempt=1)
    assert (cell.folder / "cell.yaml").read_text() == before


def test_a_record_that_nobody_can_read_stops_no_job(cell: Begun) -> None:
    (cell.folder / "attempt-0").mkdir(parents=True)
    (cell.folder / "cell.yaml").write_text("{")
    cell.begin(attempt=1)
    assert yaml.safe_load((cell.folder / "cell.yaml").read_text())["name"] == NAME
