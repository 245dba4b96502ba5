"""Runs `submit.py` as a process of its own: what it prints and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Answer:
    """The exit status and what was printed."""

    status: int
    stdout: str
    stderr: str


def environment(runs: Path, **variables: str) -> dict[str, str]:
    """The environment of a user whose runs go to `runs`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("COOKBOOK_")}
    # Whatever Slurm this machine has.
    own["COOKBOOK_CLUSTER"] = "soperator-b200"
    # The test's own Python, and not one that setup.sh made.
    return {**own, "VENV": sys.prefix, "COOKBOOK_RUNS": str(runs), **variables}


def submit(
    *words: str | bytes,
    runs: Path,
    cwd: Path = ROOT,
    timeout: float = 60,
    variables: Mapping[str, str] | None = None,
) -> Answer:
    """Run `python submit.py WORDS` in `cwd`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "submit.py"), *words],
        cwd=cwd,
        env=environment(runs, **(variables or {})),
        capture_output=True,
        timeout=timeout,
    )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace"))


def listing(folder: Path) -> list[str]:
    """Every file and folder below `folder`, hidden ones included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def broken_corpus(folder: Path) -> Path:
    """A data set that is there, so that the checks pass, and that no training can read."""
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "text.jsonl").write_text('{"text": "so far"}\n{"text": \n')
    return corpus
