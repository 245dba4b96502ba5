"""Which rank is named where all stand still: the one that is not where the others wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from cookbook.observe.stacks import describe_stacks
from cookbook.run.folder import Attempt

_HEAD = "Timeout (0:00:12)!\n"
_OTHER_THREAD = """Thread 0x00007f1 (most recent call first):
  File "/venv/torch/utils/data/worker.py", line 3 in get
"""
_MAIN = "Thread 0x00007f2 (most recent call first):\n"
WAITING = f"""{_HEAD}{_OTHER_THREAD}{_MAIN}  File "/venv/torch/distributed/c10d.py", line 9 in wait
  File "/venv/torchtitan/train.py", line 500 in train_step
"""
READING = f"""{_HEAD}{_OTHER_THREAD}{_MAIN}  File "/venv/datasets/iterable.py", line 40 in read
  File "/venv/torchtitan/train.py", line 400 in batch_generator
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    (tmp_path / "stacks").mkdir()
    return Attempt(tmp_path, 0)


def write(attempt: Attempt, **stacks: str) -> None:
    for rank, text in stacks.items():
        (attempt.stacks / f"rank-{rank[1:]}.txt").write_text(text)


def test_a_rank_that_left_no_stack_is_named(attempt: Attempt) -> None:
    write(attempt, r0=WAITING, r1=WAITING, r2="", r3=WAITING)
    assert describe_stacks(attempt, 4) == (
        "rank 2 not heard of (stopped, or gone); the other 3 in wait < train_step (train.py:500)"
    )


def test_a_rank_that_stands_elsewhere_is_named(attempt: Attempt) -> None:
    write(attempt, r0=WAITING, r1=READING, r2=WAITING, r3=WAITING)
    assert describe_stacks(attempt, 4) == (
        "rank 1 in read (iterable.py:40); the other 3 in wait < train_step (train.py:500)"
    )


def test_without_a_stack_nobody_is_named(attempt: Attempt) -> None:
    assert describe_stacks(attempt, 4) is None
    write(attempt, r0="", r1="Timeout (0:00:12)!\n")
    assert describe_stacks(attempt, 2) is None
