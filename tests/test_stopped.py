"""What is stopped here is said to be, and nothing of it stays; a disk that is full."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cookbook.launch.script import render_script
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.run import Run, read_run
from cookbook.run.states import cancel_run, cell_states
from tests.cells import Point
from tests.programs import PYTHON, set_command, write_program
from tests.submit import ROOT
from tests.waiting import HANG_S, until

CELL = Point("debug", "bf16", "standard", "local")


def write_script(folder: Path, torchrun: str) -> Path:
    """The cell's script, and an environment for it whose torchrun is that."""
    write_program(folder / "venv/bin/torchrun", torchrun)
    write_program(folder / "venv/bin/python", PYTHON)
    script = folder / "train.sh"
    script.write_text(render_script(CELL.cell()))
    return script


def start_script(folder: Path, trap: str = "", **more: str) -> subprocess.Popen[bytes]:
    """Start the cell's script by bash, for `runs/r/a` in `folder`; wait until it trains."""
    torchrun = f"#!/bin/bash\n{trap}echo trains\nfor i in {{1..600}}; do sleep 0.1; done\n"
    write_script(folder, torchrun)
    process = start(folder, **more)
    log = folder / "runs/r/a/attempt-0/train.log"
    until(lambda: log.exists() and "trains" in log.read_text())
    return process


def start(folder: Path, **more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["bash", str(folder / "train.sh")],
        cwd=ROOT,
        env=os.environ | {"VENV": f"{folder}/venv", "CELL_DIR": f"{folder}/runs/r/a"} | more,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGTERM, 0)]
)
def test_a_stopped_script_is_cancelled(tmp_path: Path, number: signal.Signals, status: int) -> None:
    # torchrun may end well of it, having saved a checkpoint.
    process = start_script(tmp_path, "trap 'exit 0' TERM\n" if status == 0 else "")
    os.killpg(process.pid, number)
    assert process.wait(timeout=HANG_S) == (status or 143)
    said = json.loads((tmp_path / "runs/r/a/status.json").read_text())
    assert (said["state"], said["reason"]) == ("cancelled", number.name)


# The second is the job of a shell by salloc.
@pytest.mark.parametrize("job", ["", "7"])
def test_a_script_by_bash_is_followed_and_cancelled_like_a_run(tmp_path: Path, job: str) -> None:
    process = start_script(tmp_path, SLURM_JOB_ID=job)
    run = read_run(tmp_path / "runs/r")
    try:
        (state,) = cell_states(run)
        assert (state.state, state.reason) == ("running", None)
        second = start(tmp_path, SLURM_JOB_ID=job)
        said = second.communicate(timeout=HANG_S)[1].decode()
        assert second.returncode == 2 and f"process {process.pid} trains here; wait" in said
        process.kill()
        process.wait()
        (state,) = cell_states(run)
        assert state.state == "running" and "was killed" in (state.reason or ""), state
        assert cancel_run(run) == ["a"]
        until(lambda: not processes(run))
        (state,) = cell_states(run)
        assert state.state == "failed" and "is gone" in (state.reason or "")
    finally:
        process.kill()
        kill(processes(run))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose script has started two ranks, as processes of their own."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    cell = CELL.cell()
    run = create_run("stopped", [cell])
    set_command(run.cells[0], "sleep 300 &\nsleep 300 &\ntouch $CELL_DIR/started\nwait\n")
    submit_run(run, [cell])
    until((run.cells[0].path / "started").exists)
    yield run
    kill(processes(run))


def processes(run: Run) -> list[psutil.Process]:
    """All that the run has started."""
    found = []
    for process in psutil.process_iter():
        # It may end at any of these looks.
        with contextlib.suppress(psutil.Error):
            belongs = process.environ().get("COOKBOOK_RUN") == str(run.folder)
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def supervisor(run: Run) -> psutil.Process:
    (found,) = (one for one in processes(run) if "cookbook.supervise" in one.cmdline())
    return found


def printed(run: Run) -> psutil.Process:
    (state,) = cell_states(run)
    return psutil.Process(int(state.job_id or 0))


def test_a_run_whose_printed_process_was_killed_goes_on_and_can_be_cancelled(run: Run) -> None:
    printed(run).kill()
    until(lambda: len(processes(run)) == 4)
    (state,) = cell_states(run)
    assert (state.state, state.reason) == ("running", None)
    assert cancel_run(run) == [run.cells[0].name]
    until(lambda: not processes(run))
    (state,) = cell_states(run)
    assert (state.state, state.reason) == ("cancelled", "SIGTERM")


def test_ranks_that_nobody_supervises_are_named_and_can_be_cancelled(run: Run) -> None:
    # An editor of the log, and another run's training.
    log = run.cells[0].path / "started"
    other = {**os.environ, "COOKBOOK_RUN": f"{run.folder}-2"}
    strangers = [
        subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL),
        subprocess.Popen(["sleep", "300"], env=other),
    ]
    try:
        for process in (supervisor(run), printed(run)):
            process.kill()
        until(lambda: len(processes(run)) == 3)
        (state,) = cell_states(run)
        assert state.state == "running" and f"cancel {run.name}" in (state.reason or ""), state
        cancel_run(run)
        until(lambda: not processes(run))
        (state,) = cell_states(run)
        assert state.state == "failed" and "is gone" in (state.reason or "")
        assert cancel_run(run) == []
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


# More than a disk of this size holds; the training itself writes nothing else and ends well.
_TORCHRUN = """\
#!/bin/bash
echo "[rank0]: step 1"
head -c 8M /dev/zero >"${DISK}/runs/a-file-of-somebody-else"
for i in {1..2000}; do echo "[rank0]: a line of the log, the last step is far away ${i}"; done
exit "${TORCHRUN_STATUS:-0}"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own needs root, which CI has")
@pytest.mark.parametrize(("status", "state"), [(0, "finished"), (1, "failed")])
def test_a_full_disk_changes_nothing_of_the_end(tmp_path: Path, status: int, state: str) -> None:
    disk, script = tmp_path / "disk", write_script(tmp_path, _TORCHRUN)
    disk.mkdir()
    # The mount is this process's own, and gone with it.
    shell = (
        'mount -t tmpfs -o size=4m disk "${DISK}" && bash "$1"; echo "code=$?"; '
        'cat "${CELL_DIR}/status.json"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", shell, "bash", str(script)],
        cwd=ROOT,
        env={
            **os.environ,
            "DISK": str(disk),
            "CELL_DIR": str(disk / "runs/r/a"),
            "COOKBOOK_RUNS": str(disk / "runs"),
            "VENV": str(tmp_path / "venv"),
            "TORCHRUN_STATUS": str(status),
        },
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    words, _, found = done.stdout.rpartition("code=")
    code, _, written = found.partition("\n")
    assert json.loads(written)["state"] == state, done
    assert int(code) == status, done
    assert "Traceback" not in done.stderr + words
    # The job's own log is elsewhere, and whole.
    assert "far away 2000" in words
