"""How a rank stalls, dies with its torchrun, and ends: with the status of its work."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cookbook.observe.failure import describe_stacks
from cookbook.run.folder import Attempt
from tests.started import lives, python
from tests.submit import ROOT
from tests.titan_ranks import free_port
from tests.titan_run import job
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.titan

_STALL = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from cookbook.titan.common import process
process.STEPS, process.MORE_S = 2.0, 1.0
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
attempt = Path(sys.argv[1])
trace = attempt / "comm_traces" / "rank_0"
alarm = process.StallAlarm(attempt, attempt / "comm_traces" / "rank_", 0)

def stands_still():
    dist.all_reduce(torch.ones(1))
    time.sleep(float(sys.argv[2]))
    # On a busy machine the first trace takes seconds.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (trace.exists() and trace.stat().st_size):
        time.sleep(0.1)

for step in range(6):
    time.sleep(0.2)
    alarm.step()
stands_still()
stacks = attempt / "stacks" / "rank-0.txt"
print(len(stacks.read_text()) if stacks.exists() else 0)
os._exit(0)
"""


def test_a_rank_that_stands_still_says_where(tmp_path: Path) -> None:
    done = python("-c", _STALL, str(tmp_path), "4")
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 0, done.stderr
    assert "stands_still (<string>" in (describe_stacks(Attempt(tmp_path, 0), 1) or "")
    recorded: dict[str, Any] = pickle.loads((tmp_path / "comm_traces" / "rank_0").read_bytes())
    assert "all_reduce" in recorded["entries"][-1]["profiling_name"]


def test_the_alarm_is_set_by_usual_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the first one, which compiles, nor by one that has saved."""
    from cookbook.titan.common import process

    now, alarms = [0.0], list[float]()
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, file: alarms.append(seconds)
    )
    alarm = process.StallAlarm(tmp_path, tmp_path / "rank_", 0)
    for seconds in (100.0, 60.0, 5.0, 5.0, 90.0, 5.0):
        now[0] += seconds
        alarm.step()
    alarm.end()
    # Three steps must be known; then four usual steps, and 8 s.
    assert alarms == [28.0, 4 * 32.5 + 8.0, 28.0]
    # No stacks were written: no file is left.
    assert not list(tmp_path.iterdir())


_ORPHANS = """
import os, signal, time
from cookbook.titan.common.process import die_with_parent
os.environ.pop("TORCHELASTIC_RUN_ID", None)
for is_rank in (True, False):
    if not os.fork():
        if is_rank:
            os.environ["TORCHELASTIC_RUN_ID"] = "1"
        die_with_parent()
        # As a rank that hangs in a kernel does.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, f"{is_rank:d} {os.getpid()}\\n".encode())
        break
time.sleep(60)
"""


_LONG_DOCUMENT = """
import os, sys
from types import SimpleNamespace
from torchtitan.config.job_config import Training
from cookbook.titan.tt_0_2_2.text_data import build_dataloader

os.environ["TORCHELASTIC_RUN_ID"] = "1"
tokens = SimpleNamespace(encode=lambda text, add_bos, add_eos: list(text.encode()))
data = SimpleNamespace(files=[sys.argv[1]], validation_files=[sys.argv[1]])
data.text_key, data.shuffle_seed = "text", 7
loaders, pids = [], open(sys.argv[2], "w")
for dataset in ("text", "c4_test"):
    texts = Training(dataset=dataset, dataset_path=sys.argv[1], seq_len=32, local_batch_size=2)
    texts.dataloader.num_workers = 1
    config = SimpleNamespace(training=texts, validation=texts, data=data)
    for validates in (False, True):
        given = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": tokens, "job_config": config}
        loaders.append(iter(build_dataloader(validates, **given)))
        next(loaders[-1])
        print(loaders[-1]._workers[0].pid, file=pids, flush=True)
os._exit(0)
"""


def test_the_workers_of_data_loaders_end_with_their_rank(tmp_path: Path) -> None:
    """Also those that wait to write a long document into the rank's pipe."""
    texts, pids = tmp_path / "data.jsonl", tmp_path / "pids"
    texts.write_text(json.dumps({"text": "long " * 100_000}) + "\n")
    command = [sys.executable, "-c", _LONG_DOCUMENT, str(tmp_path), str(pids)]
    subprocess.run(command, cwd=ROOT, check=True)
    workers = [int(line) for line in pids.read_text().split()]
    assert len(workers) == 4
    until(lambda: not any(map(lives, workers)))


def test_a_rank_ends_with_its_torchrun_and_another_program_does_not() -> None:
    command = [sys.executable, "-c", _ORPHANS]
    torchrun = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert torchrun.stdout is not None
    found = dict(torchrun.stdout.readline().split() for _ in range(2))
    rank, other = int(found["1"]), int(found["0"])
    torchrun.kill()
    torchrun.wait()
    until(lambda: not lives(rank))
    assert lives(other)
    os.kill(other, signal.SIGKILL)


_RANK = """
import os, sys, time
from pathlib import Path
from cookbook.titan.common.process import die_with_parent
die_with_parent()
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def test_ranks_outlive_slurms_sigterm_and_obey_torchruns(tmp_path: Path) -> None:
    slurm, script = tmp_path / "slurmstepd", tmp_path / "rank.py"
    slurm.symlink_to(shutil.which("kill") or "")
    script.write_text(_RANK)
    words = ["-m", "cookbook.titan.common.outlive", f"{sys.prefix}/bin/torchrun"]
    words += ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    words += ["--local-addr=127.0.0.1", str(script), str(tmp_path)]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    task = subprocess.Popen(command, env=own, stdout=-1, stderr=-1, text=True)
    ranks = [tmp_path / "0", tmp_path / "1"]
    until(lambda: all(path.exists() and path.read_text() for path in ranks) or task.poll())
    tree = [task.pid, *(one.pid for one in psutil.Process(task.pid).children(recursive=True))]
    for pid in tree:
        subprocess.run([slurm, "-TERM", str(pid)], check=True)
    assert task.stdout and "a node got SIGTERM" in task.stdout.readline()
    assert all(map(lives, tree))
    os.kill(int(ranks[0].read_text()), signal.SIGKILL)
    said = task.communicate(timeout=HANG_S)[1]
    assert task.returncode == 1
    # Else torchrun would have waited for it in vain, and killed it.
    assert "exitcode  : -15" in said, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
def test_all_other_signals_reach_torchrun_whose_end_is_the_tasks(number: int) -> None:
    command = [sys.executable, "-m", "cookbook.titan.common.outlive", "sleep", "600"]
    task = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    found = psutil.Process(task.pid)
    until(lambda: [one for one in found.children() if one.name() == "sleep"])
    (sleep,) = found.children()
    os.kill(sleep.pid if number == signal.SIGKILL else task.pid, number)
    assert task.communicate(timeout=HANG_S)[1] == "" and task.returncode == -number
    assert not sleep.is_running()


def test_a_program_that_is_missing_is_named_in_one_line() -> None:
    done = python("-m", "cookbook.titan.common.outlive", "torchrun-x", "--nnodes=1")
    assert (done.returncode, done.stderr) == (1, "torchrun-x: No such file or directory\n")


def test_a_run_that_is_done_ends_well_whatever_comes_after(assets: Path, tmp_path: Path) -> None:
    """One rank of `python -m torchtitan.train`, which aborts when its interpreter shuts down."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1"}
    place |= {"RANK": "0", "LOCAL_RANK": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options = ("--experimental.custom_import=tests.aborting", "--metrics.enable_tensorboard")
    argv = job(assets, tmp_path, *options, steps=1)
    ended = python("-m", "torchtitan.train", *argv, variables=place)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (ended.stdout + ended.stderr).count("cookbook active: ") == 1
    # Nothing of what it wrote is lost.
    assert "Process group destroyed" in ended.stdout + ended.stderr
    (events,) = tmp_path.glob("tb/**/events.*")
    written = EventAccumulator(str(events)).Reload().Scalars("loss_metrics/global_avg_loss")
    assert [scalar.step for scalar in written] == [1]


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
        ("torchtitan.train", ["refused"], 3),
        ("torchtitan.train", ["done", "fails"], 1),
        # Another program has a status of its own: it may have found a wrong kernel.
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
    ended = python("-m", module, *how, cwd=tmp_path, variables={"PYTHONUNBUFFERED": ""})
    assert ended.returncode == status, ended.stderr
    assert ("the last words" in ended.stdout) == ("fails" not in how)
