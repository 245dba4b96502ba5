"""Calls `submit.py` as a user does: in this process, or as one of its own where that matters."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from cookbook.base import paths
from cookbook.cli.main import main
from tests.waiting import HANG_S

ROOT = paths.ROOT
FORK_RANKS = ROOT / "tests/fork_ranks"
# These train, submit or run scripts, which outlive the call.
_STARTS = {"run", "sweep", "profile", "doctor", "check-line"}


@dataclass(frozen=True)
class Answer:
    """How a command ended and what it printed."""

    status: int
    stdout: str
    stderr: str


def environment(runs: Path, **variables: str) -> dict[str, str]:
    """The environment of a user whose runs go to `runs`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("COOKBOOK_")}
    # The default is what this machine's Slurm has; tests mean the published cluster.
    own["COOKBOOK_CLUSTER"] = "soperator-b200"
    # The test's own Python, and not one that setup.sh made; its torchrun forks ranks.
    path = os.pathsep.join(filter(None, [str(FORK_RANKS), own.get("PYTHONPATH")]))
    own |= {"VENV": sys.prefix, "PYTHONPATH": path}
    return {**own, "COOKBOOK_RUNS": str(runs), **variables}


def submit(
    *words: str | bytes,
    runs: Path,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> Answer:
    """Call `python submit.py WORDS` in `cwd`."""
    env = environment(runs, **(variables or {}))
    if words and words[0] in _STARTS and not {"--dry-run", "--help"} & {*words}:
        done = subprocess.run(
            [sys.executable, str(ROOT / "submit.py"), *words],
            cwd=cwd,
            env=env,
            capture_output=True,
            timeout=HANG_S,
        )
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace"))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        patch.dict(os.environ, env, clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main([os.fsdecode(word) for word in words])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return Answer(status, *texts)


def listing(folder: Path) -> list[str]:
    """Every file and folder below `folder`, hidden ones included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
