"""When TorchTitan's Trainer saves, and how it ends where it is asked to: on CPU ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.run.checkpoints import STATES, read_checkpoint
from tests.titan_ranks import run_ranks
from tests.titan_run import BF16, EP2, STANDARD, job, run, train, write_assets

pytestmark = pytest.mark.titan

OPTIONS = (*EP2, *STANDARD, *BF16, "--lr_scheduler.decay_ratio=0.0")
# The last step as TorchTitan saves it by default: the model alone.
SAVED = (*OPTIONS, "--checkpoint.enable", "--checkpoint.interval=100")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    yield folder


def train_until_asked(
    arguments: list[str], attempts: list[Path], asked: int, step: int, slow: int
) -> dict[str, Any]:
    """`train` in ranks that are each alone on a node, of which one is asked to stop amid a step.

    Args:
        attempts: each rank's view of the attempt's folder.
        asked: the rank whose node is asked, in the middle of `step`.
        slow: the rank whose clock stands still.
    """
    from torchtitan.components.metrics import MetricsProcessor

    from cookbook.titan.tt_0_2_2 import checkpoint

    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "SLURM_JOB_ID": "77"}
    log = MetricsProcessor.log

    def ask(self: Any, of_step: int, *rest: Any, **extra: Any) -> None:
        if (rank, of_step) == (asked, step):
            (attempts[rank] / checkpoint.STOP).touch()
        log(self, of_step, *rest, **extra)

    MetricsProcessor.log = ask
    if rank == slow:
        setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: 0.0))  # noqa: B010
    return train(arguments, attempts[rank])


def trained(
    assets: Path, out: Path, *options: str, asked: int = 0, step: int = 0, slow: int = 1
) -> dict[str, Any]:
    """Four steps on two ranks, unless one is asked to stop; what rank 0 found."""
    attempts = [out / "attempts" / str(rank) for rank in range(2)]
    for attempt in attempts:
        attempt.mkdir(parents=True)
    argv = job(assets, out, *options, steps=4)
    results = run_ranks(train_until_asked, 2, argv, attempts, asked, step, slow, seconds=200)
    # Every rank made the same steps, and ended by itself.
    assert [result["ended"] for result in results] == [False, False]
    assert len({len(result["losses"]) for result in results}) == 1
    found: dict[str, Any] = results[0]
    return found


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoint").iterdir())


@pytest.fixture(scope="module")
def undisturbed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of 4 steps; asked to stop in the last of them, the job ends as ever."""
    out = tmp_path_factory.mktemp("whole")
    # An hour is never over, whatever the steps say.
    never = ("--checkpoint.interval_minutes=60", "--checkpoint.interval=1")
    whole = trained(assets, out, *SAVED, *never, asked=0, step=4)
    assert len(whole["losses"]) == 4 and saved(out) == ["step-4"]
    assert not list(out.glob("attempts/*/stopped"))
    losses: list[float] = whole["losses"]
    return losses


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_asked_on_one_node_all_ranks_end_at_one_checkpoint_and_lose_nothing(
    assets: Path, tmp_path: Path, undisturbed: list[float], mode: str
) -> None:
    options = (*SAVED, f"--checkpoint.async_mode={mode}")
    stopped = trained(assets, tmp_path, *options, asked=1, step=2)
    assert stopped["losses"] == undisturbed[:2]
    assert "cookbook: asked to stop; the run ends at a checkpoint of step 2" in stopped["said"]
    assert saved(tmp_path) == ["step-2"]
    checkpoint = read_checkpoint(2, tmp_path / "checkpoint" / "step-2")
    assert (checkpoint.damage, checkpoint.states) == (None, frozenset(STATES))
    # Rank 0 alone says so, once it is whole; with the job that is to be requeued.
    assert (tmp_path / "attempts/0/stopped").read_text() == "77 2\n"
    assert not (tmp_path / "attempts/1/stopped").exists()
    if mode == "async":
        resumed = run(assets, tmp_path, 2, *options, steps=4)
        assert resumed["losses"] == undisturbed[2:]


def test_without_checkpoints_there_is_nothing_to_stop_for(assets: Path, tmp_path: Path) -> None:
    ended = trained(assets, tmp_path, *OPTIONS, asked=0, step=1)
    assert len(ended["losses"]) == 4
    assert not list(tmp_path.glob("attempts/*/stopped"))


def test_the_clock_of_rank_0_decides_in_place_of_steps(assets: Path, tmp_path: Path) -> None:
    # 6 ms are over after each step.
    always = ("--checkpoint.interval_minutes=0.0001", "--checkpoint.keep_latest_k=0")
    trained(assets, tmp_path, *SAVED, *always)
    assert saved(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]


class Manager(SimpleNamespace):
    """What `Saving` uses of TorchTitan's, of one rank alone, and the steps that were saved."""

    def __init__(self, minutes: float) -> None:
        options = SimpleNamespace(checkpoint=SimpleNamespace(interval_minutes=minutes))
        trainer = SimpleNamespace(job_config=options, device="cpu")
        super().__init__(
            states={"train_state": trainer},
            save=self.note,
            _should_save=lambda step: step % 10 == 0,
            save_future=None,
            maybe_wait_for_staging=lambda: None,
            staging=False,
            enable_first_step_checkpoint=True,
        )
        self.saved: list[int] = []

    def note(self, step: int, last_step: bool) -> None:
        if self._should_save(step, last_step):
            self.saved.append(step)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)


@pytest.mark.usefixtures("alone")
def test_no_save_begins_while_another_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2 import checkpoint

    now = [1000.0]
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    manager = Manager(minutes=2)
    checkpoint.Saving(manager)
    saved: list[int] = manager.saved
    # When each step ends, in seconds; the first is saved whatever the clock says.
    for step, seconds in enumerate((10, 100, 129, 131, 200, 250, 252), 1):
        now[0] = 1000.0 + seconds
        manager.save_future = Future()
        if step not in (4, 6):
            manager.save_future.set_result(None)
        manager.save(step)
    # Two minutes after the first save one is still being written, and two minutes after the next.
    assert saved == [1, 5]
    now[0] += 70
    manager.save(8)
    assert saved == [1, 5, 8]


@pytest.mark.parametrize(
    ("enable", "load_only", "decides"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_job_that_only_loads_saves_nothing(
    enable: bool, load_only: bool, decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cookbook.titan.tt_0_2_2 import checkpoint

    manager = Manager(minutes=2)
    manager.enable, manager.load_only = enable, load_only
    monkeypatch.setattr(checkpoint, "_initialize", lambda manager: None)
    checkpoint._initialize_and_decide(manager)
    assert (manager.save != manager.note) is decides


@pytest.mark.usefixtures("alone")
def test_a_stop_is_told_once_its_checkpoint_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cookbook.titan.tt_0_2_2 import checkpoint

    monkeypatch.setenv("COOKBOOK_ATTEMPT_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    told = tmp_path / checkpoint.STOPPED
    manager = Manager(minutes=0)
    manager._async_wait = lambda: manager.saved.append(-1 if told.exists() else 0)
    checkpoint.Saving(manager)
    manager.save(6)
    (tmp_path / checkpoint.STOP).touch()
    manager.save(7)
    assert manager.saved == [7, 0] and told.read_text() == "77 7\n"
    # In its last step the job ends as ever.
    told.unlink()
    manager.save(8, last_step=True)
    assert manager.saved == [7, 0, 8] and not told.exists()
    assert manager.states["train_state"].should_continue_training() is False


@pytest.mark.usefixtures("alone")
def test_what_training_waits_for_is_said_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from cookbook.titan.tt_0_2_2 import checkpoint

    monkeypatch.setenv("COOKBOOK_ATTEMPT_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    caplog.set_level(logging.INFO)
    manager = Manager(minutes=0)
    manager._async_wait = lambda: logging.getLogger().info("waits")
    manager.maybe_wait_for_staging = manager._async_wait
    checkpoint.Saving(manager)
    manager.maybe_wait_for_staging()
    manager.staging, manager.staging_future, manager.save_future = True, Future(), Future()
    manager.maybe_wait_for_staging()
    manager.staging_future.set_result(None)
    manager.maybe_wait_for_staging()
    (tmp_path / checkpoint.STOP).touch()
    manager.save(7)
    manager.save_future.set_result(None)
    manager.save(8)
    asked = "cookbook: asked to stop; the run ends at a checkpoint of step"
    copied = ["cookbook: waiting until the checkpoint is copied", "waits"]
    written = ["cookbook: waiting until the checkpoint is written", "waits"]
    assert [record.getMessage() for record in caplog.records] == [
        *("waits", *copied, "cookbook: the checkpoint is copied", "waits"),
        *(f"{asked} 7", *written, f"{asked} 8", "waits"),
    ]


def stopped_on(rank_asked: int, attempts: Path) -> dict[str, Any]:
    """What a rank that is alone on its node does after a step in which one of them is asked."""
    from cookbook.titan.tt_0_2_2 import checkpoint

    rank = os.environ["RANK"]
    attempt = attempts / rank
    attempt.mkdir()
    os.environ |= {"LOCAL_RANK": "0", "COOKBOOK_ATTEMPT_DIR": str(attempt)}
    if int(rank) == rank_asked:
        (attempt / checkpoint.STOP).touch()
    manager = Manager(minutes=0)
    manager._async_wait = lambda: None
    checkpoint.Saving(manager)
    manager.save(7)
    return {"saved": manager.saved, "told": (attempt / checkpoint.STOPPED).exists()}


def test_all_ranks_stop_where_one_node_is_asked(tmp_path: Path) -> None:
    found = run_ranks(stopped_on, 2, 1, tmp_path)
    assert found == [{"saved": [7], "told": True}, {"saved": [7], "told": False}]
