"""The verb `check-line`: an sbatch line judged before it waits in the queue.

The script itself is run, up to its own check, so that an edited copy is judged by what it says. A
script without that check would train here, or do anything else, so it is refused and never run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.run.slurm import submit_environment
from cookbook.supervise.__main__ import CHECKED

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Lines of every rendered script: by these it asks whether it may run, and ends where it may not.
_CHECKS = (
    "set -euo pipefail",
    'JOB=("${VENV}/bin/python" -m cookbook.supervise)',
    'ANSWER="$(',
    'read -r ATTEMPT LOG_RANK SHOWN_RANKS <<<"${ANSWER}"',
)


@dataclass(frozen=True)
class _Line:
    """`NAME=VALUE ... sbatch OPTIONS SCRIPT WORDS`."""

    variables: dict[str, str]
    options: list[str]
    script: Path
    words: list[str]


def check_line(arguments: argparse.Namespace) -> int:
    """Say whether the job that an sbatch line asks for may run."""
    line = _parse(arguments.line)
    content = line.script.read_text(encoding="utf-8", errors="replace").splitlines()
    _refuse_another(line.script, content)
    header = [
        option for text in content if text.startswith("#SBATCH ") for option in text.split()[1:]
    ]
    # Options on the line win over those in the file.
    options = [*header, *line.options]
    environment = {
        **submit_environment(),
        "COOKBOOK_CHECK": "1",
        "SLURM_JOB_ID": "0",
        "SLURM_JOB_NUM_NODES": _value(options, "--nodes", "-N") or "1",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
    }
    if gpus := _value(options, "--gpus-per-node", None):
        environment["SLURM_GPUS_ON_NODE"] = gpus.rpartition(":")[2]
    folder = line.script.resolve().parent
    if "COOKBOOK_ROOT" not in os.environ and (folder / "submit.py").is_file():
        environment["COOKBOOK_ROOT"] = str(folder)
    command = ["bash", str(line.script), *line.words]
    done = subprocess.run(command, env=environment | line.variables, stdout=subprocess.DEVNULL)
    if done.returncode == CHECKED:
        return 0
    print(f"submit.py: {line.script} would end with status {done.returncode}", file=sys.stderr)
    return 2 if done.returncode == 2 else 1


def _parse(line: Sequence[str]) -> _Line:
    words = list(line)
    variables = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words and words[0] in ("sbatch", "bash"):
        words.pop(0)
    # The value of an option may stand by itself, so the script is the first word that is a file.
    for position, word in enumerate(words):
        if not word.startswith("-") and Path(word).is_file():
            return _Line(variables, words[:position], Path(word), words[position + 1 :])
    raise InputError(
        "check-line",
        "names no script that is here",
        "write: python submit.py check-line PRECISION=mxfp8 sbatch --nodes=16 train_671b.sh",
    )


def _refuse_another(script: Path, content: Sequence[str]) -> None:
    """Refuse what is no script of the cookbook: one that does not ask before it trains."""
    lines = [line.strip() for line in content]
    if content[:1] == ["#!/bin/bash"] and all(check in lines for check in _CHECKS):
        return
    raise InputError(
        f"check-line: {script}",
        "is no script of the cookbook, and was not run",
        "name train_671b.sh, train_16b.sh, a script of `python submit.py render`, or a copy",
    )


def _value(options: Sequence[str], name: str, short: str | None) -> str:
    """The last value of an sbatch option; of a range of nodes, the least."""
    found = ""
    for word, following in zip(options, [*options[1:], ""], strict=True):
        if word.startswith(f"{name}="):
            found = word.partition("=")[2]
        elif word == name or (short and word == short):
            found = following
        elif short and word.startswith(short):
            found = word.removeprefix(short)
    return found.strip("'\"").partition("-")[0]
