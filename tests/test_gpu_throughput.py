"""The benchmark of throughput: its rounds, its cells, and all of it tried out on CPU ranks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_throughput
from bench.corpora import Corpus
from bench.gpu_throughput import measure, read, write
from bench.throughput_cells import CELLS
from bench.throughput_plan import Plan
from bench.throughput_table import Round, ratios, render_report
from bench.torchrun import Job
from bench.training import Outcome
from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.config.resolve import this_machine
from cookbook.observe.console import StepMetrics

H200 = this_machine(4, Gpu("NVIDIA H200", 9.0, 139.8))
COMMAND = [sys.executable, "-m", "bench.gpu_throughput"]


# Rounds.


def corpus(name: str) -> Corpus:
    return Corpus(name, f"/text/{name}", 10, 100, 10.0, 9.0, 8192, 7.0)


def plan(out: Path, *names: str, **changes: Any) -> Plan:
    asked = Plan(
        out,
        {name: CELLS[name] for name in names},
        (corpus("short"), corpus("long")),
        H200,
        repeats=2,
        warm_up=1,
        steps=3,
        deadline=time.monotonic() + 1000,
    )
    return dataclasses.replace(asked, **changes)


class Trainings:
    """Stands in for training: notes what is asked for, and answers with these speeds.

    With `drift`, the machine grows faster by this part of the speed at each training.
    """

    def __init__(
        self, speeds: Mapping[str, float | str], seconds: float = 50.0, drift: float = 0.0
    ) -> None:
        self.speeds, self.seconds, self.drift = speeds, seconds, drift
        self.made = list[str]()

    def __call__(self, job: Job, deadline: float) -> Outcome:
        name = job.cell.name
        text = Path(job.cell.options["training.dataset_path"])
        assert job.folder.parent.name == text.name, "the logs lie under the name of their corpus"
        self.made.append(f"{text.name} {name}")
        speed = self.speeds[name]
        if isinstance(speed, str):
            # What it did until it failed is no measurement.
            steps = [StepMetrics(0, 2, 3.0, tokens_per_second=900.0)]
            return Outcome(speed, self.seconds, steps, None, 70.0, ["torchrun"])
        speed *= 1 + self.drift * (len(self.made) - 1)
        # The first step warms up, and is slow.
        by_step = [1.0, speed, speed + 1, speed - 1]
        steps = [
            StepMetrics(0, number, 4.0 - number, tokens_per_second=found)
            for number, found in enumerate(by_step, 1)
        ]
        return Outcome(None, self.seconds, steps, None, 70.0, ["torchrun"], start_seconds=4.2)


Train = Callable[..., Trainings]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    def stand_in(speeds: Mapping[str, float | str], **changes: float) -> Trainings:
        trainings = Trainings(speeds, **changes)
        monkeypatch.setattr(gpu_throughput, "train_one", trainings)
        return trainings

    return stand_in


PAIR = ("released-deepep", "deepep")
SPEEDS = {"released-deepep": 100.0, "deepep": 130.0, "standard": 80.0}


def test_cells_train_in_turn_on_both_corpora(tmp_path: Path, train: Train) -> None:
    trainings, rounds = train(SPEEDS), list[Round]()
    assert measure(plan(tmp_path, *PAIR), rounds)
    one = ["short released-deepep", "short deepep", "long released-deepep", "long deepep"]
    assert trainings.made == [*one, *one]
    content = json.loads((tmp_path / "throughput.json").read_text())
    run = content["rounds"][0]["runs"]["deepep"]
    assert run["tokens_per_second_per_gpu"] == 130.0
    assert run["by_step"] == [130.0, 131.0, 129.0]
    assert run["losses"] == [3.0, 2.0, 1.0, 0.0]
    assert run["memory_gib"] == 70.0
    assert ratios(rounds, "deepep", "released-deepep") == [1.3] * 4
    text = (tmp_path / "throughput.md").read_text()
    short, long = text.split("## ")[1:]
    assert short.startswith("Short documents") and long.startswith("Long documents")
    row = ["deepep", "2", "130", "130; 130", "129 to 131", "70.0", "4; 4", "0.00000", "1.300x"]
    assert row_of(short, "deepep") == row_of(long, "deepep") == [*row, "1.300 to 1.300", ""]
    assert "Mean attended length in sequences of 8,192: 7 tokens." in short


def row_of(text: str, cell: str) -> list[str]:
    """The cells of a table's row."""
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {cell} "))
    return [word.strip() for word in row.strip("|").split("|")]


def test_every_round_counts_and_is_compared_within_itself(tmp_path: Path, train: Train) -> None:
    train(SPEEDS, drift=0.1)
    rounds = list[Round]()
    assert measure(plan(tmp_path, *PAIR, corpora=(corpus("short"),), repeats=3), rounds)
    # The machine is 1.0, 1.1, 1.2, 1.3, 1.4 and 1.5 times as fast, one training after another.
    text = (tmp_path / "throughput.md").read_text()
    assert row_of(text, "released-deepep")[2:5] == ["120", "100; 120; 140", "99 to 141"]
    by_round = [1.3 * 1.1, 1.3 * 1.3 / 1.2, 1.3 * 1.5 / 1.4]
    assert ratios(rounds, "deepep", "released-deepep") == pytest.approx(by_round)
    found = row_of(text, "deepep")
    assert found[2:4] == ["169", "143; 169; 195"]
    assert found[8:10] == ["1.408x", "1.393 to 1.430"]


def test_it_goes_on_where_it_stopped(tmp_path: Path, train: Train) -> None:
    asked, trainings = plan(tmp_path, *PAIR), train(SPEEDS, seconds=400.0)
    # After the first there is no time for another that takes as long.
    measure(dataclasses.replace(asked, deadline=time.monotonic() + 300), rounds := read(asked))
    assert trainings.made == ["short released-deepep"]
    assert not measure(dataclasses.replace(asked, deadline=time.monotonic() + 300), rounds)
    assert len(trainings.made) == 1
    assert measure(asked, read(asked))
    assert trainings.made[1:3] == ["short deepep", "long released-deepep"]
    assert len(trainings.made) == 8
    assert measure(asked, read(asked))
    assert len(trainings.made) == 8, "all is there"
    # A new cell needs rounds of its own, with the one that it is compared with.
    assert measure(plan(tmp_path, "released-deepep", "standard"), read(asked))
    assert trainings.made[8:10] == ["short released-deepep", "short standard"]
    assert len(trainings.made) == 16


def test_a_round_is_of_one_machine_and_one_time(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan(tmp_path, *PAIR, corpora=(corpus("short"),), repeats=1)
    for change in (
        lambda rounds: monkeypatch.setattr("socket.gethostname", lambda: "another"),
        lambda rounds: rounds[-1].update(began=rounds[-1]["began"] - 3600),
    ):
        trainings, rounds = train(SPEEDS), list[Round]()
        measure(asked, rounds)
        del rounds[0]["runs"]["deepep"]
        change(rounds)
        assert measure(asked, rounds)
        assert trainings.made[2:] == ["short released-deepep", "short deepep"]
        assert ratios(rounds, "deepep", "released-deepep") == [1.3]


def test_a_changed_cell_is_trained_again(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan(tmp_path, *PAIR, corpora=(corpus("short"),), repeats=1)
    trainings, rounds = train(SPEEDS), list[Round]()
    measure(asked, rounds)
    changed = dataclasses.replace(CELLS["deepep"], options={"training.local_batch_size": 2})
    monkeypatch.setitem(CELLS, "deepep", changed)
    asked = plan(tmp_path, *PAIR, corpora=(corpus("short"),), repeats=1)
    assert measure(asked, rounds)
    assert trainings.made[2:] == ["short deepep"]
    # What it was before is not mixed in, also where the round is too old to be gone on with.
    monkeypatch.setitem(CELLS, "deepep", dataclasses.replace(changed, options={}))
    rounds[-1]["began"] -= 3600
    train({**SPEEDS, "deepep": 150.0})
    asked = plan(tmp_path, *PAIR, corpora=(corpus("short"),), repeats=1)
    assert measure(asked, rounds)
    assert row_of((tmp_path / "throughput.md").read_text(), "deepep")[3] == "150"


def test_a_cell_that_fails_is_shown_and_tried_again_later(tmp_path: Path, train: Train) -> None:
    asked = plan(tmp_path, *PAIR, corpora=(corpus("short"),))
    trainings, rounds = train({**SPEEDS, "deepep": "out of memory"}), list[Round]()
    assert not measure(asked, rounds)
    # Not in the second round, which would fail in the same way.
    first = "short released-deepep"
    assert trainings.made == [first, "short deepep", first]
    text = (tmp_path / "throughput.md").read_text()
    assert row_of(text, "deepep") == ["deepep", "0", *[""] * 8, "out of memory"]
    assert row_of(text, "released-deepep")[1:3] == ["2", "100"]
    trainings = train(SPEEDS)
    assert measure(asked, rounds)
    assert trainings.made == ["short deepep", first, "short deepep"]


def test_what_was_measured_otherwise_is_not_mixed_in(tmp_path: Path, train: Train) -> None:
    asked, _ = plan(tmp_path, *PAIR), train(SPEEDS)
    measure(asked, [])
    for change in ({"steps": 4}, {"warm_up": 2}, {"machine": this_machine(2, None)}):
        with pytest.raises(SystemExit, match="name another folder"):
            read(dataclasses.replace(asked, **change))
    assert len(read(dataclasses.replace(asked, repeats=9))) == 4


def test_nothing_measured_makes_no_table(tmp_path: Path) -> None:
    asked = plan(tmp_path, *PAIR)
    write(asked, [])
    assert "|" not in (tmp_path / "throughput.md").read_text()
    content = json.loads((tmp_path / "throughput.json").read_text())
    assert "not a result" in render_report({**content, "device": "cpu"})


# The whole program.


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.titan
def test_it_can_be_tried_out_on_a_cpu(tmp_path: Path) -> None:
    words = [str(tmp_path), "standard", "deepep", "--device", "cpu", "--corpora", "short"]
    words += ["--repeats", "1", "--warm-up", "1", "--steps", "2"]
    first = run(*words)
    assert first.returncode == 0, first.stdout + first.stderr
    content = json.loads((tmp_path / "throughput.json").read_text())
    ((standard, deepep),) = (round_["runs"].values() for round_ in content["rounds"])
    assert len(standard["losses"]) == 3
    assert standard["losses"] == pytest.approx(deepep["losses"], rel=1e-3)
    assert standard["active"]["ep_backend"] == "standard"
    assert deepep["active"]["ep_backend"] == "deepep"
    assert "not a result" in first.stdout
    # All is there: no training starts.
    written = (tmp_path / "throughput.json").read_text()
    again = run(*words)
    assert again.returncode == 0
    assert "tokens/s/GPU (" not in again.stdout
    assert (tmp_path / "throughput.json").read_text() == written


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-cell"], "unknown cell 'no-such-cell'; allowed: deepep, "),
        (["deepep", "--corpora", "middle"], "found 'middle', allowed: short, long"),
        (["deepep", "deepep"], "named twice"),
        (["deepep", "--steps", "0"], "--steps: found 0, allowed: 1 or more"),
        (["deepep", "--repeats", "0"], "must be 1 or more"),
    ],
)
def test_a_wrong_word_ends_in_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    answer = run(str(tmp_path), *words, "--device", "cpu")
    assert answer.returncode == 2
    assert said in answer.stderr and "Traceback" not in answer.stderr
    assert not list(tmp_path.iterdir())
