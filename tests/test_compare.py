"""Runs beside one another, and what a comparison's exit status says."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.made_up_run import Run, metrics_line
from tests.submit import Answer, submit


def log_of(
    tps: float, steps: int = 40, seed: int = 0, length: float | None = None, loss: float = 3.0
) -> str:
    random_ = random.Random(seed)
    lines = [
        metrics_line(step, tps=f"{tps * random_.gauss(1, 0.01):.1f}", loss=f"{loss + 9 / step:.5f}")
        for step in range(1, steps + 1)
    ]
    active = {"gpu": "NVIDIA B200"} | ({"mean_attended_length": length} if length else {})
    return f"cookbook active: {json.dumps(active)}\n" + "".join(lines)


class Two:
    """Two runs, `old` and `new`, and the command that compares them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = {name: Run(folder, name=name) for name in ("old", "new")}

    def add(self, run: str, cell: str, log: str, **more: Any) -> None:
        self.runs[run].add(cell, log, **more)

    def repeat(self, run: str, cell: str, *speeds: float, **more: Any) -> None:
        """Add the cell and its repeats; those that are faster have more loss."""
        for number, speed in enumerate(speeds, 1):
            again = {} if number == 1 else {"repeat_of": cell, "repeat": number}
            log = log_of(speed, loss=3 + speed / 1000)
            self.add(run, f"{cell}-r{number}" if again else cell, log, **more, **again)

    def compare(self, *words: str, names: tuple[str, ...] = ("old", "new")) -> Answer:
        for name in names:
            self.runs[name].write(cluster=f"{name}-cluster", stack="2026.02")
        return submit("compare", *names, *words, runs=self.folder)

    def as_json(self, *words: str) -> dict[str, Any]:
        answer = self.compare("--json", *words)
        found: dict[str, Any] = json.loads(answer.stdout)
        assert answer.status == (0 if found["is_fast_enough"] else 1)
        return found


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def of_new(found: dict[str, Any], cell: str = "a") -> dict[str, Any]:
    (row,) = (row for row in found["cells"] if (row["run"], row["cell"]) == ("new", cell))
    return dict(row)


def test_cells_of_the_same_name_stand_beside_one_another(two: Two) -> None:
    for cell, old, new in (("a", 100, 110), ("b", 200, 200)):
        two.add("old", cell, log_of(old))
        two.add("new", cell, log_of(new, seed=3))
    two.add("new", "only-here", log_of(10))
    answer = two.compare()
    assert (answer.status, answer.stderr) == (0, "")
    rows = [line.split("|")[1:-1] for line in answer.stdout.splitlines() if line.startswith("|")]
    table = [[word.strip() for word in row] for row in rows]
    names = [" ".join(row[:2]) for row in table[2:]]
    assert names == ["a old", "a new", "b old", "b new"]
    row = dict(zip(table[0], table[3], strict=True))
    assert row["speed"] == "faster" and row["loss"] == "equivalent"
    assert 1.08 < float(row["over reference"].rstrip("x")) < 1.12
    assert dict(zip(table[0], table[5], strict=True))["speed"] == "inside the noise"
    assert "reference: old; a cell may be 5% slower" in answer.stdout
    assert "- differs: cluster: old-cluster in old, new-cluster in new" in answer.stdout
    assert "stack" not in answer.stdout


def test_what_differs_between_the_runs_is_listed_texts_and_tokenizers_by_name(two: Two) -> None:
    texts, tokenizer = "training.dataset_path", "model.hf_assets_path"
    old = {"training.steps": 20, texts: "short", tokenizer: "one"}
    new = old | {texts: "long", tokenizer: "two"}
    # 1 is TorchTitan's default: setting it is no difference.
    same = {"parallelism.tensor_parallel_degree": 1}
    for cell, changes in (("a", same), ("b", {"training.steps": 40})):
        two.add("old", cell, log_of(100), options=old)
        two.add("new", cell, log_of(100), options=new | changes)
    for run, torch, seconds in (("old", "2.10", 3.1), ("new", "2.11", 3.2)):
        seen = {"versions": {"torch": torch}, "nodes": [run], "self_check": {"seconds": seconds}}
        path = two.runs[run].folder / "a" / "attempt-1" / "environment.json"
        path.write_text(json.dumps(seen))
    assert two.as_json()["differences"] == [
        "cluster: old-cluster in old, new-cluster in new",
        "the tokenizer: model.hf_assets_path: one in old, two in new",
        "the texts: training.dataset_path: short in old, long in new",
        "torch (of a): 2.10 in old, 2.11 in new",
        "training.steps (of b): 20 in old, 40 in new",
    ]


@pytest.mark.parametrize(
    ("speed", "words", "status"),
    [(96, (), 0), (94, (), 1), (94, ("--tolerance", "7"), 0), (98, ("--tolerance", "1"), 1)],
)
def test_slower_is_status_1(two: Two, speed: float, words: tuple[str, ...], status: int) -> None:
    for run, cell, tps in (("old", "a", 100), ("old", "b", 100), ("new", "a", 100)):
        two.add(run, cell, log_of(tps))
    two.add("new", "b", log_of(speed))
    answer = two.compare(*words)
    assert answer.status == status
    said = f"slower than allowed: b in new, by {100 - speed:.1f}%"
    assert (said in answer.stdout) == bool(status)
    assert "a in new" not in answer.stdout


def test_a_cell_that_did_not_finish_is_not_fast_enough(two: Two) -> None:
    two.add("old", "a", log_of(100))
    two.add("new", "a", log_of(300), state="failed")
    row = of_new(two.as_json())
    assert (row["speed"], row["is_slower"]) == (None, True)
    assert row["reason"].startswith("is ")


@pytest.mark.parametrize(
    ("other", "length", "reason", "has_loss"),
    [
        ({"recipe": "proxy"}, None, "recipe proxy, and debug in old", False),
        ({"device": "cpu"}, None, "ran on cpu, and on cuda in old", True),
        ({"emulated": True}, None, "emulated numerics have no speed", True),
        ({}, 2600.0, "other texts: a token attends to 2,600 tokens, and to 812 in old", False),
    ],
)
def test_incomparable(
    two: Two, other: dict[str, Any], length: float | None, reason: str, has_loss: bool
) -> None:
    two.add("old", "a", log_of(100, length=812.0))
    two.add("new", "a", log_of(10, length=length), **other)
    answer = two.compare()
    assert answer.status == (0 if has_loss else 2)
    assert ("| equivalent |" in answer.stdout) == has_loss
    refusal = f"submit.py: compare old and new: there is nothing to compare: {reason}\n"
    assert answer.stderr == ("" if has_loss else refusal)
    two.add("old", "b", log_of(100))
    two.add("new", "b", log_of(100))
    assert f"- a in new: {reason}\n" in two.compare().stdout


def test_losses_are_compared_where_batches_are_alike(two: Two) -> None:
    batch = {"training.steps": 40, "training.seq_len": 64, "training.local_batch_size": 2}
    two.add("old", "a", log_of(100), options=batch)
    two.add("old", "b", log_of(100), options=batch)
    two.add("new", "a", log_of(100), options=batch)
    two.add("new", "b", log_of(100), options=batch | {"training.local_batch_size": 4})
    found = two.as_json()
    assert of_new(found)["loss"]["verdict"] == "equivalent"
    assert of_new(found)["loss_last_tenth"]["verdict"] == "cannot tell"
    assert of_new(found, "b")["loss"] is None
    # The other batches of a run's first attempt count, too.
    two.add("old", "c", log_of(100), options=batch)
    resumed = "".join(log_of(100).splitlines(keepends=True)[21:])
    folder = two.runs["new"].add("c", log_of(100, steps=20), resumed, options=batch)
    assert of_new(two.as_json(), "c")["loss"]["verdict"] == "equivalent"
    shutil.copy(folder.parent / "b/cell.yaml", folder / "attempt-1/cell.yaml")
    assert of_new(two.as_json(), "c")["loss"] is None


@pytest.mark.parametrize(
    ("options", "is_alike"),
    [
        ({"data.files": ["other.jsonl"]}, False),
        ({"data.shuffle_seed": 1}, False),
        ({"training.dataset_path": "other"}, False),
        ({"checkpoint.exclude_from_loading": ["dataloader"]}, False),
        ({"model.hf_assets_path": "other"}, False),
        # The same tokens a step, in longer sequences.
        ({"training.seq_len": 128, "training.local_batch_size": 1}, False),
        ({"data.shuffle_seed": -1, "data.text_key": "text", "debug.seed": 7}, True),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_losses_are_compared_where_texts_are_alike(
    two: Two, options: dict[str, Any], is_alike: bool, order: int
) -> None:
    texts = {"training.seq_len": 64, "training.local_batch_size": 2, "data.files": ["a.jsonl"]}
    old, new = (texts, texts | options)[::order]
    two.add("old", "a", log_of(100), options=old)
    two.add("new", "a", log_of(100), options=new)
    assert (of_new(two.as_json())["loss"] is not None) is is_alike


def test_every_repeat_counts(two: Two) -> None:
    two.repeat("old", "a", 50, 100, 200)
    two.repeat("new", "a", 55, 110, 220)
    two.repeat("old", "b", 100)
    two.repeat("new", "b", 100, 110)
    found = two.as_json()
    assert of_new(found)["speed"]["basis"] == "repeats"
    assert of_new(found)["speed"]["ratio"] == pytest.approx(1.1, abs=0.01)
    assert of_new(found, "b")["speed"]["basis"] == "steps"


def test_nothing_to_compare_is_an_error(two: Two, tmp_path: Path) -> None:
    two.add("old", "a", log_of(100))
    two.add("new", "b", log_of(100))
    for words, names, said in (
        ((), ("old", "new"), "there is nothing to compare: no cell is in both"),
        (("--tolerance", "-1"), ("old", "new"), "--tolerance: found -1, allowed: 0 to 100 percent"),
    ):
        answer = two.compare(*words, names=names)
        assert (answer.status, answer.stdout) == (2, "")
        assert said in answer.stderr and answer.stderr.count("\n") == 1
