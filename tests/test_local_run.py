"""`submit.py` on this machine: real TorchTitan on the CPU, followed and stopped."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.submit import ROOT, Answer, environment, submit
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.titan

SMALL = ["--cluster", "local", "--set", "training.seq_len=64"]
# A machine with GPUs would train on those.
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module", autouse=True)
def _corpus() -> None:
    if not (ROOT / "assets/local/stamp.json").exists():
        command = [sys.executable, "-m", "cookbook.install.corpus", "assets/local"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)


def _submit(*words: str, runs: Path) -> Answer:
    return submit(*words, runs=runs, variables=ON_CPU)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """The folder of runs, with the one run in it, and what its sweep printed."""
    runs = tmp_path_factory.mktemp("runs")
    words = ["sweep", "smoke", *SMALL, "--set", "training.steps=3"]
    return runs, _submit(*words, runs=runs)


def _report(runs: Path) -> dict[str, Any]:
    answer = _submit("report", "--format", "json", runs=runs)
    assert answer.status == 0, answer.stderr
    report: dict[str, Any] = json.loads(answer.stdout)
    return report


def test_a_sweep_trains_what_can_run_and_ends_in_a_table(smoke: tuple[Path, Answer]) -> None:
    runs, answer = smoke
    assert (answer.status, answer.stderr) == (0, ""), answer
    (run,) = runs.iterdir()
    assert f"# {run.name}" in answer.stdout
    table = [line for line in answer.stdout.splitlines() if line.startswith("| debug-")]
    assert len(table) == 4
    assert "finished, emulated" in table[2] and "refused" in table[3]
    # Below what is printed, the file has what a terminal has no room for.
    said = answer.stdout[answer.stdout.index(f"# {run.name}") :]
    printed, _, page = said.rpartition("\n\nAs a page: ")
    assert (run / "report.md").read_text(encoding="utf-8").startswith(printed)
    assert page.startswith(f"{run / 'report.html'}, ") and (run / "report.html").is_file()


def test_the_report_says_what_ran_and_what_not(smoke: tuple[Path, Answer]) -> None:
    report = _report(smoke[0])
    assert (report["sweep"], report["baseline"]) == ("smoke", "debug-bf16-standard")
    cells = {cell["name"]: cell for cell in report["cells"]}
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "debug-bf16-standard": "finished",
        "debug-bf16-deepep": "refused",
        "debug-mxfp8-standard": "finished",
        "debug-mxfp8-deepep": "refused",
    }
    for cell in cells.values():
        if cell["status"] == "refused":
            assert "needs CUDA GPUs" in cell["reason"] and cell["steps"] is None
        else:
            assert cell["steps"] == 3 and 1 < cell["final_loss"] < 20
            assert cell["tokens_per_second_per_gpu"] > 0 and cell["memory_gib"] > 0
    # Emulated numerics are labelled, and never get a speed-up.
    emulated = cells["debug-mxfp8-standard"]
    assert "emulated" in emulated["reason"] and emulated["speedup"] is None
    # Both saw the same data with the same weights: the losses are close, and not the same number.
    losses = [cells[f"debug-{precision}-standard"]["final_loss"] for precision in ("bf16", "mxfp8")]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.05


def test_status_logs_and_report_agree(smoke: tuple[Path, Answer]) -> None:
    runs, _ = smoke
    (run,) = runs.iterdir()
    cells = {cell["name"]: cell for cell in _report(runs)["cells"]}
    lines = _submit("status", runs=runs).stdout.splitlines()
    assert lines[0].startswith(run.name)
    for line in lines[1:]:
        name, state = line.split()[:2]
        assert state == cells[name]["status"]
        assert ("step 3/3" in line) == (state == "finished")
    assert len(lines) == 5
    log = _submit("logs", f"{run.name}/debug-mxfp8-standard", runs=runs)
    assert log.status == 0
    losses = re.findall(r"step: +(\d+) +loss: +([0-9.]+)", log.stdout)
    assert [int(step) for step, _ in losses] == [1, 2, 3]
    assert float(losses[-1][1]) == pytest.approx(cells["debug-mxfp8-standard"]["final_loss"])
    answer = _submit("logs", f"{run.name}/debug-bf16-deepep", runs=runs)
    assert answer.status == 2 and "has no log: refused" in answer.stderr
    answer = _submit("cancel", runs=runs)
    assert answer.status == 0 and "have ended already" in answer.stdout


def _processes_of(folder: Path) -> list[psutil.Process]:
    names = {str(folder), str(folder.resolve())}
    words = {one: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
    return [process for process, said in words.items() if any(name in said for name in names)]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A driver whose cell trains for long, once it trains; all of it is gone afterwards."""
    # A link, as to scratch.
    runs = tmp_path / "runs"
    (tmp_path / "scratch").mkdir()
    runs.symlink_to(tmp_path / "scratch")
    words = ["run", "debug", *SMALL, "--set", "training.steps=5000"]
    driver = subprocess.Popen(
        [sys.executable, str(ROOT / "submit.py"), *words],
        cwd=ROOT,
        env=environment(runs, **ON_CPU),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        logs = "*/debug-bf16-standard/attempt-0/train.log"

        def said() -> str:
            return "".join(log.read_text(errors="replace") for log in runs.glob(logs))

        # On a busy machine a step takes half a minute.
        until(lambda: "step:" in said(), said)
        yield runs, driver
    finally:
        driver.kill()
        driver.wait()
        for process in _processes_of(runs):
            process.kill()


def test_ctrl_c_leaves_the_job_to_cancel(started: tuple[Path, subprocess.Popen[str]]) -> None:
    runs, driver = started
    (run,) = [path for path in runs.iterdir() if not path.name.startswith(".")]
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=HANG_S)
    assert driver.returncode == 130, output
    assert "Traceback" not in output
    assert "The jobs keep running." in output
    for verb in ("status", "logs", "report", "cancel"):
        assert f"python submit.py {verb} {run.name}" in output
    # Supervisor, script, torchrun and two ranks at least.
    assert len(_processes_of(run)) >= 4
    answer = _submit("status", run.name, runs=runs)
    assert re.search(r"debug-bf16-standard +running .*step \d+/5000", answer.stdout)
    assert _report(runs)["cells"][0]["status"] == "running"
    again = _submit("run", "--resume", run.name, runs=runs)
    assert again.status == 2 and "is running; wait for its end" in again.stderr
    answer = _submit("cancel", run.name, runs=runs)
    assert (answer.status, answer.stdout) == (0, "cancelled: debug-bf16-standard\n")
    until(lambda: not _processes_of(run))
    assert " cancelled" in _submit("status", runs=runs).stdout
    assert _report(runs)["cells"][0]["status"] == "cancelled"
    # What it had reached is still known.
    assert _report(runs)["cells"][0]["steps"] >= 1
