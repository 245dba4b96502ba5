"""How a training process ends: what its threads do at the very end must not fail the job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cookbook.install.corpus import make_corpus

pytestmark = pytest.mark.titan

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_corpus(folder)
    return folder


def train(assets: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """One rank of `python -m torchtitan.train`, which aborts when its interpreter shuts down."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "1"}
    place |= {"RANK": "0", "LOCAL_RANK": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [
            *(sys.executable, "-m", "torchtitan.train"),
            "--job.custom_config_module=cookbook.titan.tt_0_2_2.job_config",
            "--experimental.custom_import=tests.aborting",
            f"--job.dump_folder={out}",
            *("--model.name=deepseek_v3", "--model.flavor=debugmodel"),
            f"--model.hf_assets_path={assets / 'tokenizer'}",
            *("--training.dataset=c4_test", f"--training.dataset_path={assets / 'corpus'}"),
            *("--training.seq_len=32", "--training.local_batch_size=1", "--training.steps=1"),
            *("--activation_checkpoint.mode=none", "--metrics.log_freq=1"),
            *("--metrics.enable_tensorboard", "--comm.trace_buf_size=0"),
            *options,
        ],
        cwd=ROOT,
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_run_that_is_done_ends_well_whatever_comes_after(assets: Path, tmp_path: Path) -> None:
    ended = train(assets, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (ended.stdout + ended.stderr).count("cookbook active: ") == 1
    # Nothing of what it wrote is lost.
    assert "Process group destroyed" in ended.stdout + ended.stderr
    (events,) = tmp_path.glob("tb/**/events.*")
    written = EventAccumulator(str(events)).Reload().Scalars("loss_metrics/global_avg_loss")
    assert [scalar.step for scalar in written] == [1]


def test_a_run_that_fails_is_torn_down_by_python(assets: Path, tmp_path: Path) -> None:
    # Without the early exit the stand-in does abort, here after the error was printed.
    ended = train(assets, tmp_path, "--training.dataset_path=/missing")
    assert ended.returncode < 0
    assert "/missing" in ended.stderr


# Ends as a job or as another program, without a model.
_PROGRAM = """
import sys
import torch.distributed as dist
from cookbook.titan.common.process import exit_without_teardown

exit_without_teardown()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if "done" in sys.argv:
    dist.destroy_process_group()
if "fails" in sys.argv:
    raise ValueError("on purpose")
print("the last words")
sys.exit(3 if "refused" in sys.argv else 0)
"""


@pytest.mark.parametrize(
    ("module", "how", "status"),
    [
        ("torchtitan.train", ["done"], 0),
        ("torchtitan.train", ["refused"], 3),
        ("torchtitan.train", ["done", "fails"], 1),
        # What is no training has a status of its own: it may have found a wrong kernel.
        ("another", ["done", "refused"], 3),
    ],
)
def test_the_status_is_the_programs_own(
    module: str, how: list[str], status: int, tmp_path: Path
) -> None:
    path = tmp_path / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text(_PROGRAM)
    # An empty text is as if the variable were not set: what is printed waits in a buffer.
    place = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        [sys.executable, "-m", module, *how],
        cwd=tmp_path,
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == status, ended.stderr
    assert ("the last words" in ended.stdout) == ("fails" not in how)
