"""The start of a script's run: its record, and the checkpoint that it resumes at."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cookbook.base.errors import InputError
from cookbook.launch.script import render_script
from cookbook.run.folder import PARTS, CellFolder
from cookbook.run.record import read_record
from cookbook.run.states import RUN_VARIABLE
from cookbook.run.status import AttemptEnd, Cause, write_attempt_end
from cookbook.supervise.resume_point import note_saved, prepare
from cookbook.supervise.start import check, take_over
from cookbook.supervise.supervisor import SignalReceivedError
from tests.cells import Point
from tests.saved import BYTES, FILES, cut, save
from tests.script_run import carried
from tests.submit import listing, submit

NAME = "debug-bf16-standard"
OPTIONS = ("--checkpoint.enable", "--training.steps=20")
WORKERS = "training.dataloader.num_workers=1"
# Weights that a run started from, and that were removed since.
GONE = ("--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path=gone")


@dataclass
class Started:
    """A cell's folder, and a script that starts its run there."""

    path: Path
    capture: pytest.CaptureFixture[str]

    @property
    def folder(self) -> CellFolder:
        return CellFolder(self.path)

    @property
    def saved(self) -> Path:
        return self.path / "checkpoint"

    def take_over(self, *own: str) -> None:
        cell = Point("debug", "bf16", "standard", "local").cell()
        text = render_script(cell)
        take_over(carried(text), [*OPTIONS, *own], text)

    def start(self, *own: str, attempt: int = 0) -> str:
        """Start an attempt, as script and supervisor do; what is said on standard error."""
        self.capture.readouterr()
        self.take_over(*own)
        assert self.folder.next_attempt().number == attempt
        prepare(self.folder, self.folder.attempt(attempt), read_record(self.folder.record))
        return self.capture.readouterr().err

    def step(self, attempt: int = 0) -> int | None:
        content = json.loads(self.folder.attempt(attempt).resumption.read_text())
        step: int | None = content["step"]
        return step


@pytest.fixture
def cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Started:
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in (RUN_VARIABLE, "COOKBOOK_SCHEDULER"):
        monkeypatch.setenv(name, "")  # a start sets them
    monkeypatch.setenv("CELL_DIR", str(tmp_path / "runs" / "mine" / NAME))
    return Started(tmp_path / "runs" / "mine" / NAME, capsys)


def test_the_newest_of_whole_checkpoints_is_taken_and_nothing_is_touched(cell: Started) -> None:
    for step in (9, 10, 8):
        save(cell.saved, step)
    (cell.saved / "step-11.tmp").mkdir()
    (cell.saved / "notes").touch()
    before = listing(cell.saved)
    with pytest.raises(InputError, match="3 does not divide"):
        cell.start("--parallelism.tensor_parallel_degree=3")
    assert cell.start(*GONE) == "cookbook: attempt 0 continues after step 10\n"
    assert (cell.step(), listing(cell.saved)) == (10, before)
    assert not (cell.path / "checkpoint-damaged").exists()


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (lambda path: cut(path / FILES[1]), "__1_0.distcp has 999 of 1,000 bytes"),
    "gone": (lambda path: (path / FILES[0]).unlink(), "__0_0.distcp is missing"),
    "unfinished": (
        lambda path: (path / ".metadata").rename(path / ".metadata.tmp"),
        "has no .metadata, so it was never finished",
    ),
    "cut metadata": (lambda path: cut(path / ".metadata", 100), ".metadata cannot be read: "),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_moved_aside_whole_and_named(cell: Started, kind: str) -> None:
    save(cell.saved, 4)
    newest = save(cell.saved, 6)
    DAMAGES[kind][0](newest)
    content = {path.name: path.read_bytes() for path in newest.iterdir()}
    words = cell.start()
    assert cell.step() == 4
    aside = cell.path / "checkpoint-damaged" / "step-6"
    first, second = words.splitlines()
    assert first.startswith(f"cookbook: attempt 0 passed over step-6: {DAMAGES[kind][1]}")
    assert first.endswith(f"; moved to {aside}")
    assert second == "cookbook: attempt 0 continues after step 4"
    assert cell.folder.attempt(0).log.read_text() == words
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == content
    assert [path.name for path in cell.saved.iterdir()] == ["step-4"]


def test_a_signal_while_one_is_read_is_no_damage(
    cell: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = save(cell.saved, 6)
    signals = Mock(side_effect=SignalReceivedError)
    monkeypatch.setattr("cookbook.run.folder._InertUnpickler.load", signals)
    with pytest.raises(SignalReceivedError):
        cell.start()
    assert newest.is_dir()


def test_status_and_report_say_what_was_passed_over(cell: Started) -> None:
    save(cell.saved, 4)
    DAMAGES["gone"][0](save(cell.saved, 6))
    cell.start()
    runs, words = cell.path.parent.parent, f"{NAME}: attempt 0 passed over step-6: __0_0.distcp is"
    assert words in submit("status", "mine", runs=runs).stdout
    assert f"- {words}" in submit("report", "mine", runs=runs).stdout
    (found,) = json.loads(submit("report", "mine", "--format", "json", runs=runs).stdout)["cells"]
    assert found["resumptions"][0]["step"] == 4
    assert found["resumptions"][0]["passed_over"][0]["checkpoint"] == "step-6"


def test_what_was_saved_after_a_nan_is_passed_over(cell: Started) -> None:
    for step in (4, 6, 8):
        save(cell.saved, step)
    cell.folder.attempt(0).path.mkdir()
    write_attempt_end(cell.folder.attempt(0), AttemptEnd(0, Cause.NAN_LOSS, last_good_step=6))
    words = cell.start(attempt=1)
    assert "attempt 1 passed over step-8: was saved after step 6, the last one with a" in words
    assert (cell.path / "checkpoint-damaged" / "step-8").is_dir()
    assert sorted(path.name for path in cell.saved.iterdir()) == ["step-4", "step-6"]
    # The next attempt's checkpoints are as good as any.
    save(cell.saved, 8)
    write_attempt_end(cell.folder.attempt(1), AttemptEnd(1, Cause.DEAD_RANK))
    assert "attempt 2 continues after step 8" in cell.start(attempt=2)


def test_a_nan_right_after_a_resume_costs_one_checkpoint_at_most(cell: Started) -> None:
    for step in (4, 6, 8, 9):
        save(cell.saved, step)
    cut(cell.saved / "step-6" / FILES[0])
    cell.folder.attempt(0).path.mkdir()
    write_attempt_end(cell.folder.attempt(0), AttemptEnd(0, Cause.NAN_LOSS, last_good_step=8))
    assert "attempt 1 continues after step 8" in cell.start(attempt=1)
    write_attempt_end(cell.folder.attempt(1), AttemptEnd(1, Cause.NAN_LOSS))
    words = cell.start(attempt=2)
    assert "over step-8: attempt 1 had no finite loss and gradient after step 8; moved" in words
    assert words.endswith("attempt 2 continues after step 4\n")
    # The last whole one stays; what was saved after it does not.
    save(cell.saved, 5)
    write_attempt_end(cell.folder.attempt(2), AttemptEnd(2, Cause.NAN_LOSS))
    assert cell.start(attempt=3).endswith("attempt 3 continues after step 4\n")
    assert [path.name for path in cell.saved.iterdir()] == ["step-4"]


def test_where_none_is_whole_the_cell_starts_from_its_initial_weights(cell: Started) -> None:
    cut(save(cell.saved, 4) / FILES[0])
    DAMAGES["unfinished"][0](save(cell.saved, 6))
    with pytest.raises(InputError, match="gone is not there"):
        cell.start(*GONE)
    assert cell.start().endswith("starts at the beginning: no checkpoint is whole\n")
    assert cell.step() is None
    # TorchTitan reads checkpoint.initial_load_path only where this folder is not there.
    assert not cell.saved.exists()
    assert len(list((cell.path / "checkpoint-damaged").iterdir())) == 2
    (cell.path / "disk").mkdir()
    cell.saved.symlink_to(cell.path / "disk")
    cell.start(attempt=1)
    assert not cell.saved.exists()


def test_a_folder_that_takes_no_checkpoint_ends_a_start(cell: Started) -> None:
    cell.path.mkdir(parents=True)
    (cell.path / "saved").touch()
    with pytest.raises(InputError, match="saved cannot be written to: File exists"):
        cell.start("--checkpoint.folder=saved")


def test_a_cell_whose_checkpoints_are_out_of_sight_does_not_begin_anew(cell: Started) -> None:
    own = "--checkpoint.async_mode=async"
    cell.start(own)
    # It died in its first save, which is logged before its files are there: it begins anew.
    log, line = (
        cell.folder.attempt(0).log,
        "[rank0]:Finished saving the checkpoint in 0.1 seconds\n",
    )
    log.write_text(f"[rank1]:{line[8:]}\n{line}\n")
    cell.start(own, attempt=1)
    log.write_text(f"{line}\n" * 2)
    save(cell.saved, 6).parent.rename(away := cell.path / "away")
    words = "holds no checkpoint, and attempt 0 had or saved one; mount its disk, move it back, or"
    with pytest.raises(InputError, match=words):
        cell.start(own)
    # Nor is another folder in its place a checkpoint.
    (cell.saved / "step-7-keep").mkdir(parents=True)
    with pytest.raises(InputError, match=words):
        cell.start(own)
    with pytest.raises(InputError, match=r"step-7-keep, for which .* ignore checkpoint.initial_l"):
        cell.start(own, *GONE)
    shutil.rmtree(cell.saved)
    away.rename(cell.saved)
    assert "continues after step 6" in cell.start(own, attempt=2)
    # An attempt that made no step saw it, too.
    log.unlink()
    with pytest.raises(InputError, match="attempt 2 had or saved one"):
        cell.start(own, f"--checkpoint.folder={away}")
    # Where all are damaged the supervisor itself begins anew, and the next attempt again.
    DAMAGES["gone"][0](cell.saved / "step-6")
    for attempt in (3, 4):
        assert "continues" not in cell.start(own, attempt=attempt)


def test_the_model_alone_is_refused_with_the_way_around(cell: Started) -> None:
    save(cell.saved, 4)
    last = save(cell.saved, 6, states=())
    with pytest.raises(InputError) as refused:
        cell.start()
    message = str(refused.value)
    assert "step-6: holds the model without optimizer, lr_scheduler" in message
    assert "(checkpoint.last_save_model_only), so training cannot continue from it" in message
    assert not cell.folder.attempts() and not cell.folder.record.exists()
    # What it says to do does it.
    command = message.rpartition("after step 4, move it away: ")[2]
    _, source, target = command.split()
    shutil.move(source, target)
    assert not last.exists()
    cell.start()
    assert cell.step() == 4


def test_the_model_alone_can_start_a_new_run_and_a_seed_does(cell: Started) -> None:
    last = save(cell.saved, 6, states=())
    with pytest.raises(InputError, match=f"checkpoint.initial_load_path={last}"):
        cell.start()
    # Its new steps would be older than step 6 to whatever looks for the newest.
    with pytest.raises(InputError, match="steps would count from 1 beside step-6; start a new run"):
        cell.start(f"--checkpoint.exclude_from_loading={','.join(PARTS)}")
    shutil.rmtree(last)
    save(cell.saved, 0, states=())
    cell.start()
    assert cell.step() == 0


@pytest.mark.parametrize("step", [0, 6])
def test_exported_weights_are_refused_whatever_is_excluded(cell: Started, step: int) -> None:
    path = cell.saved / f"step-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors.index.json").touch()
    words = rf"holds safetensors files .*_load_path={path} checkpoint.initial_load_in_hf=true"
    for own in ((), (f"--checkpoint.exclude_from_loading={','.join(PARTS)}",)):
        with pytest.raises(InputError, match=words):
            cell.start(*own)


@pytest.mark.parametrize("option", ["data.files=b", "data.shuffle_seed=2", WORKERS])
def test_a_lost_position_in_the_texts_is_refused_or_reads_anew(cell: Started, option: str) -> None:
    for name in "ab":
        (cell.path.parents[2] / f"{name}.jsonl").write_text('{"text": "x"}\n' * 2)
    texts = f"--data.files={cell.path.parents[2]}"
    first = ("--training.dataset=text", f"{texts}/a.jsonl")
    cell.start(*first)
    (cell.path / "attempt-0/metrics.jsonl").touch()
    save(cell.saved, 6)
    changed = (*first, f"{texts}/b.jsonl" if option == "data.files=b" else f"--{option}")
    says = "b.jsonl was not among" if option == "data.files=b" else "differs from the check"
    says = f"{option.partition('=')[0]}: .*{says}"
    with pytest.raises(InputError, match=says):
        cell.start(*changed)
    cell.start(*changed, "--checkpoint.exclude_from_loading=dataloader", attempt=1)
    assert cell.step(1) == 6
    # Attempt 1 saved nothing, so the position is still that of attempt 0.
    with pytest.raises(InputError, match=says):
        cell.start(*changed)
    cell.start(*first, attempt=2)


def test_texts_and_tokenizer_are_what_is_in_them(cell: Started) -> None:
    texts, moved, tokenizer = (cell.path.parents[2] / name for name in ("old", "new", "tokenizer"))
    for path in (texts / "a.txt", texts / "b.txt", tokenizer / "tokenizer.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("text\n" * 40_000 if path.suffix == ".txt" else "{}")
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "e"}')
    own = (
        "--training.dataset=text",
        f"--model.hf_assets_path={tokenizer}",
        f"--data.files={moved}",
    )
    cell.start(*own[:2], f"--data.files={texts}")
    (cell.path / "attempt-0/metrics.jsonl").touch()
    save(cell.saved, 6)
    texts.rename(moved)
    cell.start(*own, attempt=1)
    assert cell.step(1) == 6
    for path, says in {
        moved / "a.txt": f"data.files: {moved}/a.txt has changed since the run recorded them; r",
        moved / "b.txt": "data.files: b.txt, which the run recorded, is missing",
        moved / "c.txt": f"data.files: {moved}/c.txt was not among the files when the run",
        tokenizer
        / "tokenizer.json": f"model.hf_assets_path: {tokenizer}/tokenizer.json has changed",
    }.items():
        before = path.read_text() if path.exists() else None
        path.write_text("other\n") if path.stem != "b" else path.unlink()
        with pytest.raises(InputError) as refused:
            cell.start(*own)
        assert says in str(refused.value)
        path.write_text(before) if before is not None else path.unlink()
    with pytest.raises(InputError, match=r"shares of the tokens or keys differ"):
        cell.start(*own[:2], f"--data.files=0.5:{moved}/a.txt,0.2:{moved}/b.txt")


def test_weights_and_checkpoints_are_what_is_in_them(cell: Started) -> None:
    weights, moved = save(cell.path.parents[2] / "weights", 4), cell.path.parents[2] / "moved"
    own, other = (f"--checkpoint.initial_load_path={path}" for path in (weights, moved))
    cell.start(own)
    (weights / FILES[1]).write_bytes(b"x" * BYTES)
    says = f"initial_load_path: {weights}/{FILES[1]} has changed since the run recorded them; "
    with pytest.raises(InputError, match=says):
        cell.start(own)
    (weights / FILES[1]).write_bytes(bytes(BYTES))
    weights.rename(moved)
    cell.start(other, attempt=1)

    (cell.path / "attempt-1/metrics.jsonl").touch()
    saved, newer = save(cell.saved, 6), save(cell.saved, 7)
    known = []
    for _ in range(2):  # an attempt's end may be noted again, as with another state of its job
        note_saved(cell.folder, cell.folder.attempt(1))
        known.append((cell.path / "attempt-1/texts.json").read_text())
    assert known[0] == known[1] and known[0].count(f'"{saved}/{FILES[1]}"') == 1
    (saved / FILES[1]).write_bytes(b"x" * BYTES)
    for more in (["--checkpoint.load_step=6"], []):
        with pytest.raises(InputError, match=f"checkpoint.folder: {saved}/{FILES[1]} has changed"):
            cell.start(other, *more)
        shutil.rmtree(newer, ignore_errors=True)
    # An attempt that went back and saved this step anew was killed before it recorded it.
    shutil.rmtree(saved)
    save(cell.saved, 5)
    cell.start(other, attempt=2)
    (cell.path / "attempt-2/metrics.jsonl").touch()
    (save(cell.saved, 6) / FILES[1]).write_bytes(b"x" * BYTES)
    cell.start(other, attempt=3)
    assert cell.step(3) == 6


def test_a_step_that_is_asked_for_is_judged_alone(cell: Started) -> None:
    for step in (4, 6, 8):
        save(cell.saved, step)
    cut(cell.saved / "step-6" / FILES[0])
    cut(cell.saved / "step-8" / FILES[0])
    with pytest.raises(InputError, match=r"load_step: step-6: __0_0.distcp has 999 of"):
        cell.start("--checkpoint.load_step=6")
    with pytest.raises(InputError, match="load_step: step-5: is not there"):
        cell.start("--checkpoint.load_step=5")
    back = "--checkpoint.load_step=4"
    assert "step-8: is later than checkpoint.load_step=4; moved to" in cell.start(back)
    assert (cell.step(), [path.name for path in cell.saved.iterdir()]) == (4, ["step-4"])
    # The same line by hand asks for it again.
    save(cell.saved, 8)
    cell.start(back, attempt=1)
    assert cell.step(1) == 4 and (cell.path / "checkpoint-damaged/step-8-2").is_dir()
    save(cell.saved, 20)
    assert "all 20 steps are done, so nothing is left to train; for more" in cell.start(attempt=2)


def test_a_new_run_does_not_continue_another_checkouts_checkpoints(cell: Started) -> None:
    shared = cell.path.parents[2] / "shared"
    words = f"--checkpoint.folder={shared}"
    cell.start(words)
    saved = save(shared / "mine" / NAME, 6)
    cell.start(words, attempt=1)
    assert cell.step(1) == 6
    # Another checkout has no record of it.
    shutil.rmtree(cell.path)
    with pytest.raises(InputError, match="holds checkpoints of another run") as refused:
        cell.start(words)
    assert f"CELL_DIR={cell.path.parent.parent}/another/{NAME}" in str(refused.value)
    saved.rename(saved.with_name("step-0"))
    cell.start(words)
    assert cell.step() == 0


def test_a_checked_line_writes_nothing(cell: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    script = carried(render_script(Point("debug", "bf16", "standard", "local").cell()))
    save(cell.saved, 4)
    cut(save(cell.saved, 6) / FILES[0])
    before = listing(cell.path)
    check(script, OPTIONS)
    assert f"{NAME} may run: 1 node(s) x 2 CPU ranks\n" in cell.capture.readouterr().err
    assert listing(cell.path) == before
    save(cell.saved, 8, states=())
    with pytest.raises(InputError, match="step-8: holds the model without"):
        check(script, OPTIONS)
    # The script has no other precision.
    monkeypatch.setenv("PRECISION", "mxfp8")
    with pytest.raises(InputError, match="PRECISION=mxfp8: this script trains bf16"):
        check(script, OPTIONS)


def test_a_script_started_again_by_hand_keeps_the_requests_of_its_attempts(cell: Started) -> None:
    # A cell of a sweep, never started before.
    of_sweep: dict[str, Any] = {"stand_in_for": "671b", "baseline": "base", "prediction": "fast"}
    of_sweep |= {"repeat_of": "debug", "repeat": 2}
    submitted = replace(Point("debug", "bf16", "standard", "local").cell(), **of_sweep)
    record = submitted.job_record()
    record.options["checkpoint.enable"] = True
    record.write(cell.folder.record)
    cell.start()
    record = replace(read_record(cell.folder.record), published_tokens_per_second_per_gpu=9.0)
    assert {name: getattr(record, name) for name in of_sweep} == of_sweep
    record.write(cell.folder.record)
    first = cell.folder.record.read_text()
    cell.start(attempt=1)
    assert cell.folder.record.read_text() == first
    assert not any(one.record.exists() for one in cell.folder.attempts())
    save(cell.saved, 4)
    cell.start("--checkpoint.load_step=4", "--metrics.enable_wandb", attempt=2)
    assert read_record(cell.folder.record).published_tokens_per_second_per_gpu == 9.0
    for attempt in (3, 4):
        cell.start("--training.steps=30", attempt=attempt)
    kept = [one.record.exists() for one in cell.folder.attempts()]
    assert kept == [False, True, True, False, False]
    assert cell.folder.attempt(1).record.read_text() == first
    newest = read_record(cell.folder.record)
    assert (newest.steps, newest.published_tokens_per_second_per_gpu) == (30, None)
    assert newest.prediction == "fast"
    # The profile has other ranks since then, for which the sweep predicted nothing.
    replace(newest, ranks_per_node=8).write(cell.folder.record)
    cell.start("--training.steps=30", attempt=5)
    assert read_record(cell.folder.record) == replace(newest, prediction=None)
    newest.write(cell.folder.record)
    cell.start("--training.steps=30", "--metrics.log_freq=7", attempt=6)
    assert read_record(cell.folder.record).prediction is None


def test_other_steps_of_a_resumed_run_keep_the_schedule_of_the_learning_rate(
    cell: Started,
) -> None:
    total = "--lr_scheduler.total_steps="
    steps = [f"--training.steps={number}" for number in (20, 30, 40, 50)]
    # A seed checkpoint is of step 0.
    for saved, words, kept in [
        (0, [steps[0]], None),
        (None, [steps[1]], None),
        (5, [steps[2]], 30),
        (None, [steps[3]], 30),
        (None, [steps[1]], None),
        (None, [steps[3], f"{total}60"], 60),
        (None, [steps[3]], 60),
    ]:
        if saved is not None:
            save(cell.saved, saved)
        cell.take_over(*words)
        assert read_record(cell.folder.record).options.get(total[2:-1]) == kept
