"""Checkpoints: when TorchTitan's Trainer saves and ends, their content, and other layouts."""

import logging
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from cookbook.run.folder import PARTS, read_checkpoint
from tests.titan_ranks import run_ranks
from tests.titan_run import BF16, EP2, EP4, MXFP8, PP2, STANDARD, TP2, job, run, train

pytestmark = pytest.mark.titan

OPTIONS = (*EP2, *STANDARD, *BF16, "--lr_scheduler.decay_ratio=0.0")
# The last step as TorchTitan saves it by default: the model alone.
SAVED = (*OPTIONS, "--checkpoint.enable", "--checkpoint.interval=100")


def train_until_asked(
    arguments: list[str], attempts: list[Path], asked: int, step: int
) -> dict[str, Any]:
    """`train` in ranks that are each alone on a node, of which one is asked to stop amid a step.

    Rank 1's clock stands still.

    Args:
        attempts: each rank's view of the attempt's folder.
        asked: the rank whose node is asked, in the middle of `step`.
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
    if rank == 1:
        setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: 0.0))  # noqa: B010
    return train(arguments, attempts[rank])


def trained(
    assets: Path, out: Path, *options: str, asked: int = 0, step: int = 0
) -> dict[str, Any]:
    """Four steps on two ranks, unless one is asked to stop; what rank 0 found."""
    attempts = [out / "attempts" / str(rank) for rank in range(2)]
    for attempt in attempts:
        attempt.mkdir(parents=True)
    argv = job(assets, out, *options, steps=4)
    results = run_ranks(train_until_asked, 2, argv, attempts, asked, step)
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
    last_alone = "--checkpoint.last_save_model_only"
    whole = trained(assets, out, *SAVED, *never, last_alone, asked=0, step=4)
    assert len(whole["losses"]) == 4 and saved(out) == ["step-4"]
    assert not list(out.glob("attempts/*/stopped"))
    last = read_checkpoint(4, out / "checkpoint" / "step-4")
    assert (last.damage, last.states, last.text_readers) == (None, frozenset(), 0)
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
    assert (checkpoint.damage, checkpoint.states) == (None, frozenset(PARTS))
    assert checkpoint.text_readers == 2
    # Rank 0 alone says so, once it is whole; with the job that is to be requeued.
    assert (tmp_path / "attempts/0/stopped").read_text() == "77 2\n"
    assert not (tmp_path / "attempts/1/stopped").exists()
    if mode == "async":
        whole = "--checkpoint.exclude_from_loading="
        resumed = run(assets, tmp_path, 2, *options, whole, steps=4)
        assert resumed["losses"] == undisturbed[2:]


def test_the_clock_of_rank_0_decides_in_place_of_steps(assets: Path, tmp_path: Path) -> None:
    # 6 ms are over after each step.
    always = ("--checkpoint.interval_minutes=0.0001", "--checkpoint.keep_latest_k=2")
    # Neither loaded nor purged, whatever is in the name: the user has put them there.
    for own in ("step-1-keep", "step-9-keep"):
        (tmp_path / "checkpoint" / own).mkdir(parents=True)
        (tmp_path / "checkpoint" / own / ".metadata").touch()
    trained(assets, tmp_path, *SAVED, *always)
    # The last save counts among those that are kept.
    assert saved(tmp_path) == ["step-1-keep", "step-3", "step-4", "step-9-keep"]


class Manager(SimpleNamespace):
    """What `Saving` uses of TorchTitan's, of one rank alone, and the steps that were saved."""

    def __init__(self, minutes: float) -> None:
        options = SimpleNamespace(checkpoint=SimpleNamespace(interval_minutes=minutes))
        trainer = SimpleNamespace(job_config=options, device="cpu")
        super().__init__(
            states={"train_state": trainer},
            save=self.note,
            _should_save=lambda step, last: last or step == 1 or step % self.interval == 0,
            save_future=None,
            maybe_wait_for_staging=lambda: None,
            staging=False,
            _purge_stale_checkpoints=lambda: None,
            interval=10,
        )
        self.saved: list[int] = []

    def note(self, step: int, last_step: bool) -> None:
        if self._should_save(step, last_step):
            self.saved.append(step)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank of job 77, without a process group."""
    job = {"COOKBOOK_ATTEMPT_DIR": str(tmp_path), "LOCAL_RANK": "0", "SLURM_JOB_ID": "77"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)


@pytest.mark.usefixtures("alone")
def test_no_save_begins_while_another_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2 import checkpoint

    now = [1000.0]
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    manager = Manager(minutes=2)
    checkpoint.CheckpointPolicy(manager)
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


@pytest.mark.usefixtures("alone")
def test_a_stop_is_told_once_its_checkpoint_is_written(tmp_path: Path) -> None:
    from cookbook.titan.tt_0_2_2 import checkpoint

    told = tmp_path / checkpoint.STOPPED
    manager = Manager(minutes=0)
    manager._async_wait = lambda: manager.saved.append(-1 if told.exists() else 0)
    checkpoint.CheckpointPolicy(manager)
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
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from cookbook.titan.tt_0_2_2 import checkpoint

    caplog.set_level(logging.INFO)
    manager = Manager(minutes=0)
    manager._async_wait = lambda: logging.getLogger().info("waits")
    manager.maybe_wait_for_staging = manager._async_wait
    checkpoint.CheckpointPolicy(manager)
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


def load_from(folders: list[str], steps: list[int], starts: list[int], places: str = "aab") -> str:
    """Load in ranks that are each alone on a node, with a view of its own; the error."""
    from cookbook.titan.tt_0_2_2 import checkpoint

    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "SLURMD_NODENAME": f"worker-{rank}"}
    state = SimpleNamespace(step=starts[rank], ntokens_seen=0)

    class Loader:
        _rank_id = f"dp_rank_{rank // 2}"

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    loader: Any = Loader()
    manager = SimpleNamespace(
        folder=folders[rank],
        states={"train_state": state, "dataloader": loader},
        load=lambda step: loader.load_state_dict({loader._rank_id: places[rank]}) or True,
        initial_load_path=None,
        initial_load_in_hf=False,
    )
    checkpoint.load_the_same(manager)
    try:
        assert manager.load(steps[rank]) is True
    except checkpoint.CheckpointFailedError as error:
        return str(error)
    return ""


def test_nodes_that_see_different_checkpoints_load_none(tmp_path: Path) -> None:
    for folder in ("now", "old"):
        (tmp_path / folder / "step-4").mkdir(parents=True)
        (tmp_path / folder / "step-4/.metadata").write_text("whole")
    now, old = str(tmp_path / "now"), str(tmp_path / "old")
    assert run_ranks(load_from, 3, [now] * 3, [4] * 3, [4] * 3) == [""] * 3
    # A file that is not there yet, and a folder that is not there yet.
    (tmp_path / "now/step-4/__2_0.distcp").touch()
    for stale in (old, str(tmp_path / "none")):
        said = run_ranks(load_from, 3, [now, now, stale], [4] * 3, [4] * 3)
        assert all(words.startswith("load failed: worker-2 would load ") for words in said), said
    said = run_ranks(load_from, 3, [now] * 3, [4] * 3, [4, 2, 4])
    assert all("worker-1 would start after step 2 and 0 tokens" in words for words in said), said
    # Two ranks of one data-parallel rank, which read on at two places.
    said = run_ranks(load_from, 3, [now] * 3, [4] * 3, [4] * 3, "abb")
    assert all("would read the texts at position " in words for words in said), said


def saved_state() -> dict[str, Any]:
    """Types in a state dict, and what loading into it changes: plain weights and sharded ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torchao.prototype.moe_training.conversion_utils import MoEScalingType
    from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor

    from cookbook.titan.tt_0_2_2.checkpoint import save_plain_weights

    mesh = init_device_mesh("cpu", (1,))
    data = {name: torch.full((2, 32, 32), 3.0) for name in ("whole", "sharded")}
    quantized = {
        name: ScaledGroupedMMTensor(value, MoEScalingType.MXFP8) for name, value in data.items()
    }
    model = nn.Module()
    model.whole = nn.Parameter(quantized["whole"])
    model.sharded = nn.Parameter(DTensor.from_local(quantized["sharded"], mesh, [Shard(0)]))
    model.bf16 = nn.Parameter(torch.full((2,), 3.0))
    save_plain_weights(model)
    state = model.state_dict()
    assert state["sharded"].placements == (Shard(0),)
    local = {name: getattr(value, "_local_tensor", value) for name, value in state.items()}
    # As a checkpoint is loaded: in place.
    for value in local.values():
        value.detach().fill_(7.0)
    found = (model.whole._data, model.sharded.to_local()._data, model.bf16)
    return {
        "types": {name: type(value) for name, value in local.items()},
        "loaded": [float(value.detach().min()) for value in found],
        "still": type(model.whole.data).__name__,
    }


def test_weights_are_saved_and_loaded_without_their_wrapper() -> None:
    (found,) = run_ranks(saved_state, 1)
    assert found["types"] == dict.fromkeys(("whole", "sharded", "bf16"), torch.Tensor)
    assert found["loaded"] == [7.0, 7.0, 7.0]
    # The model goes on quantizing.
    assert found["still"] == "ScaledGroupedMMTensor"


def test_a_failed_checkpoint_names_its_root_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torchtitan.components.checkpoint import CheckpointManager

    from cookbook.titan.tt_0_2_2.checkpoint import CheckpointFailedError, name_checkpoint_causes

    missing = ModuleNotFoundError("No module named 'safetensors'")

    def load(manager: CheckpointManager) -> None:
        stack = StackSummary()
        raise CheckpointException("load", {1: (missing, stack), 0: (missing, stack)})

    for name in ("save", "maybe_wait_for_staging", "_async_wait", "close"):
        monkeypatch.setattr(CheckpointManager, name, getattr(CheckpointManager, name))
    monkeypatch.setattr(CheckpointManager, "load", load)
    name_checkpoint_causes()
    with pytest.raises(CheckpointFailedError) as error:
        CheckpointManager.load(None)
    assert str(error.value) == (
        "load failed on rank 0, 1: ModuleNotFoundError: No module named 'safetensors'"
    )


EVERY_2 = ("--lr_scheduler.decay_ratio=0.0", "--checkpoint.enable", "--checkpoint.interval=2")
# BF16 rounds at other places where the ranks divide the work otherwise.
RESHARDED = (*STANDARD, *BF16, *EVERY_2, "--training.mixed_precision_param=float32")


@pytest.fixture(scope="module")
def two_ranks(
    assets: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The folder of a run of 2 ranks for 4 steps, and what they come to."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(assets, folder, 2, *EP2, *RESHARDED, steps=4)


@pytest.mark.parametrize("layout", [(*EP4, *TP2), (*EP2, *PP2)], ids=["to TP 2, EP 4", "to PP 2"])
def test_twice_the_ranks_go_on_with_the_same_losses(
    assets: Path, two_ranks: tuple[Path, Any], tmp_path: Path, layout: tuple[str, ...]
) -> None:
    folder, whole = two_ranks
    shutil.copytree(folder / "checkpoint/step-2", tmp_path / "checkpoint/step-2")
    # The last rank is of the last stage, which knows the loss.
    more = run(assets, tmp_path, 4, *layout, *RESHARDED, of_rank=-1, steps=4)
    assert any("Loading the checkpoint from" in text for text in more["said"])
    assert more["losses"] == pytest.approx(whole["losses"][2:], rel=1e-5)


@pytest.mark.nightly
def test_a_quantized_run_resumes_where_it_stopped(assets: Path, tmp_path: Path) -> None:
    options = (*EP2, *STANDARD, *MXFP8, *EVERY_2)
    whole = run(assets, tmp_path, 2, *options, steps=3)
    shutil.rmtree(tmp_path / "checkpoint/step-3")
    resumed = run(assets, tmp_path, 2, *options, steps=3)
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["grad_norms"] == whole["grad_norms"][2:]
