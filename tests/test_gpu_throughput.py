"""The benchmark of throughput: its corpora, its rounds, and all of it tried out on CPU ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_throughput
from bench.attended import mean_attended_length, pieces
from bench.cells import this_machine
from bench.corpora import MEAN_TOKENS, Corpus, cut_documents, draw_lengths, make_corpora
from bench.gpu_throughput import Plan, measure, read, write
from bench.throughput_cells import CELLS, seq_len_of
from bench.throughput_table import Round, ratios, render_report
from bench.torchrun import Job, released_argv
from bench.training import Outcome
from cookbook.base.gpus import Gpu
from cookbook.base.paths import LOCAL_ASSETS, ROOT
from cookbook.install.corpus import is_made, make_corpus
from cookbook.log.lines import StepMetrics

H200 = this_machine(4, Gpu("NVIDIA H200", 9.0, 139.8))
COMMAND = [sys.executable, "-m", "bench.gpu_throughput"]


# Lengths of documents, and how far their tokens look back.


def test_lengths_are_those_of_c4() -> None:
    lengths = list(itertools.islice(draw_lengths(), 20_000))
    assert lengths == list(itertools.islice(draw_lengths(), 20_000)), "the same ones each time"
    assert statistics.fmean(lengths) == pytest.approx(MEAN_TOKENS, rel=0.03)
    assert statistics.median(lengths) == pytest.approx(261, rel=0.03)
    assert min(lengths) >= 5
    long = [length for length in lengths if length > 2048]
    assert len(long) / len(lengths) == pytest.approx(0.02, abs=0.004)


def test_a_token_attends_to_its_document_in_its_sequence() -> None:
    end = 0
    # Sequences of 4, each with a label more; the fifth token of each is not trained on.
    tokens = [1, end, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, end, end, 5, 1, 2]
    assert list(pieces(tokens, end, 4)) == [2, 2, 4, 3, 1]
    assert mean_attended_length([2, 2, 4, 3, 1]) == (3 + 3 + 10 + 6 + 1) / 12
    assert mean_attended_length([8192]) == 8193 / 2
    with pytest.raises(ValueError, match="no whole sequence"):
        mean_attended_length(pieces([1, 2, 3], end, 4))


@pytest.mark.titan
def test_torchtitans_mask_lets_tokens_look_just_as_far() -> None:
    import torch
    from torchtitan.models.attention import get_causal_mask_mod, get_document_mask_mod

    drawn = random.Random(1)
    for end, seq_len in ((0, 8), (1, 16), (2, 7)):
        stream = [drawn.randrange(6) for _ in range(40 * (seq_len + 1))]
        rows = [stream[at : at + seq_len] for at in range(0, len(stream), seq_len + 1)]
        batch = torch.tensor(rows)
        document, causal = get_document_mask_mod(batch, end), get_causal_mask_mod()
        b, q, k = torch.meshgrid(
            *(torch.arange(size) for size in (len(rows), seq_len, seq_len)), indexing="ij"
        )
        allowed = document(b, b, q, k) & causal(b, b, q, k)
        mean = allowed.sum(-1).float().mean().item()
        assert mean_attended_length(pieces(stream, end, seq_len)) == pytest.approx(mean)


@pytest.fixture(scope="module")
def assets() -> Path:
    if not is_made(LOCAL_ASSETS):
        make_corpus(LOCAL_ASSETS)
    return LOCAL_ASSETS


@pytest.mark.titan
def test_the_corpora_are_described_as_torchtitan_reads_them(assets: Path, tmp_path: Path) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    short, long = make_corpora(assets, tmp_path, seq_len=512, most_tokens=60_000)
    assert (short.name, long.name) == ("short", "long")
    assert 0.6 * MEAN_TOKENS < short.mean_length < 1.6 * MEAN_TOKENS
    assert long.mean_length > 4 * short.mean_length
    assert short.mean_attended_length < long.mean_attended_length < 257

    tokenizer = HuggingFaceTokenizer(str(assets / "tokenizer"))
    dataset = HuggingFaceTextDataset("c4_test", short.path, tokenizer, seq_len=512)
    lengths = []
    for inputs, _ in dataset:
        length = 0
        for token in inputs["input"].tolist():
            length += 1
            if token == tokenizer.eos_id:
                lengths.append(length)
                length = 0
        lengths += [length] if length else []
    assert sum(lengths) % 512 == 0
    assert mean_attended_length(lengths) == pytest.approx(short.mean_attended_length, abs=0.06)


@dataclasses.dataclass
class Letters:
    """An encoding with a token for each letter."""

    text: str

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return [(at, at + 1) for at in range(len(self.text))]


def test_documents_are_the_text_cut_and_joined() -> None:
    texts = ["a" * 700, "b" * 3, "c" * 2000, "d" * 900]
    cut = list(cut_documents((text, Letters(text)) for text in texts))
    lengths = list(itertools.islice(draw_lengths(), len(cut) + 1))
    assert [len(text) for text in cut] == lengths[:-1]
    whole = "".join(texts)
    assert whole.startswith("".join(cut))
    assert len(whole) - sum(map(len, cut)) < lengths[-1]


# Rounds.


def corpus(name: str) -> Corpus:
    return Corpus(name, f"/text/{name}", 10, 100, 10.0, 9.0, 8192, 7.0)


def plan(out: Path, *names: str, **changes: Any) -> Plan:
    asked = Plan(
        out, names, (corpus("short"), corpus("long")), H200, 2, 1, 3, time.monotonic() + 1000
    )
    return dataclasses.replace(asked, **changes)


class Trainings:
    """Stands in for training: notes what is asked for, and answers with these speeds."""

    def __init__(self, speeds: Mapping[str, float | str], seconds: float = 50.0) -> None:
        self.speeds, self.seconds, self.made = speeds, seconds, list[str]()

    def __call__(self, job: Job, deadline: float) -> Outcome:
        name = job.cell.name
        self.made.append(f"{job.folder.parent.name} {name}")
        speed = self.speeds[name]
        if isinstance(speed, str):
            return Outcome(speed, self.seconds, [], None, None, ["torchrun"])
        # The first step warms up, and is slow.
        by_step = [1.0, speed, speed + 1, speed - 1]
        steps = [
            StepMetrics(0, number, 4.0 - number, tokens_per_second=found)
            for number, found in enumerate(by_step, 1)
        ]
        return Outcome(None, self.seconds, steps, None, 70.0, ["torchrun"])


Train = Callable[..., Trainings]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    def stand_in(speeds: Mapping[str, float | str], seconds: float = 50.0) -> Trainings:
        trainings = Trainings(speeds, seconds)
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
    row = "| deepep | 2 | 130 | 129 to 131 | 70.0 | 0.00000 | 1.300x | 1.300 to 1.300 |  |"
    assert row in short and row in long
    assert "Mean attended length in sequences of 8,192: 7 tokens." in short


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
    assert measure(asked, rounds)
    assert trainings.made[2:] == ["short deepep"]


def test_a_cell_that_fails_is_shown_and_tried_again_later(tmp_path: Path, train: Train) -> None:
    asked = plan(tmp_path, *PAIR, corpora=(corpus("short"),))
    trainings, rounds = train({**SPEEDS, "deepep": "out of memory"}), list[Round]()
    assert not measure(asked, rounds)
    # Not in the second round, which would fail in the same way.
    first = "short released-deepep"
    assert trainings.made == [first, "short deepep", first]
    text = (tmp_path / "throughput.md").read_text()
    assert "| deepep | 0 |  |  |  |  |  |  | out of memory |" in text
    assert "| released-deepep | 2 | 100 |" in text
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


# Cells.


@pytest.mark.titan
@pytest.mark.parametrize("name", CELLS)
def test_torchtitan_trains_what_a_cell_says(name: str, tmp_path: Path) -> None:
    from cookbook.cells.argv import train_argv
    from tests.titan_config import parse

    job = plan(tmp_path, name).jobs(corpus("long"))[name]
    found = parse(released_argv(job.cell) if job.released else train_argv(job.cell))
    assert job.released is name.startswith("released")
    assert found["training.dataset_path"] == "/text/long"
    assert (found["training.seq_len"], found["training.steps"]) == (8192, 4)
    assert found["debug.moe_force_load_balance"] is not name.endswith("real")
    backend = "deepep" if "deepep" in name else "standard"
    assert found["parallelism.expert_parallel_comm_backend"] == backend


def test_sequences_of_two_lengths_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = dataclasses.replace(CELLS["deepep"], options={"training.seq_len": 4096})
    monkeypatch.setitem(CELLS, "shorter", shorter)
    assert seq_len_of(["standard", "deepep"], H200) == 8192
    with pytest.raises(ValueError, match=r"\[4096, 8192\]"):
        seq_len_of(["standard", "shorter"], H200)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.titan
def test_it_can_be_tried_out_on_a_cpu(tmp_path: Path, assets: Path) -> None:
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
        (["no-such-cell"], "found 'no-such-cell', allowed: released-standard"),
        (["deepep", "--corpora", "middle"], "found 'middle', allowed: short, long"),
        (["deepep", "deepep"], "named twice"),
        (["deepep", "--steps", "0"], "must be 1 or more"),
    ],
)
def test_a_wrong_word_ends_in_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    answer = run(str(tmp_path), *words)
    assert answer.returncode == 2
    assert said in answer.stderr and "Traceback" not in answer.stderr
    assert not list(tmp_path.iterdir())
