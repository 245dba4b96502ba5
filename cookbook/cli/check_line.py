"""The verb `check-line`: validate an sbatch command without submitting it.

It runs the script itself up to its own check, so that edited copies count. A script without that
check would train here, or do anything else, so it is refused and never run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cookbook.base.errors import InputError, nearest
from cookbook.base.gpus import has_slurm
from cookbook.run.slurm import node_groups, submit_environment
from cookbook.supervise.__main__ import CHECKED

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Lines of every rendered script, by which it asks whether it may run.
_CHECKS = (
    "set -euo pipefail",
    'if [[ -z "${COOKBOOK_ATTEMPT_DIR:-}" ]]; then',
    'exec "${VENV}/bin/python" -m cookbook.supervise "${CELL_DIR}" --script="${SCRIPT}" \\',
)
_SEEN = "looked at: the rules, this environment"


class _Line(NamedTuple):
    """`NAME=VALUE ... sbatch OPTIONS SCRIPT WORDS`."""

    variables: dict[str, str]
    runner: str
    options: list[str]
    script: Path
    words: list[str]


def check_line(arguments: argparse.Namespace) -> int:
    """Return 0 if the job that an sbatch line asks for may run."""
    line = _parse(arguments.line)
    text = line.script.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    if lines[:1] != ["#!/bin/bash"] or not {line.strip() for line in lines}.issuperset(_CHECKS):
        raise InputError(
            f"check-line: {line.script}",
            "is no script of the cookbook, and was not run",
            "name train_671b.sh, train_16b.sh, a script of `python submit.py render`, or a copy",
        )
    header = _options([*_header(line.script, lines)])
    # Options on the line win over those in the file.
    typed = _options(line.options)
    export = typed.export or header.export or ""
    variables = line.variables | dict(
        item.split("=", 1) for item in export.split(",") if _VARIABLE.match(item)
    )
    known = set(re.findall(r"\$\{([A-Z_]+):?-", text)) | {"PRECISION", "EP_BACKEND", "RECIPE"}
    for name in variables:
        close = nearest(name, known)
        if name not in known and close and f"{{{name}" not in text:
            found = "is no variable that the script reads"
            raise InputError(name, found, f"did you mean {close[0]}?")
    nodes = (typed.nodes or header.nodes or "1").partition("-")[0]
    if not nodes.isdecimal():
        raise InputError("sbatch --nodes", f"found {nodes!r}, allowed: a whole number")
    num_nodes = int(nodes)
    environment = {**submit_environment(), "COOKBOOK_ATTEMPT_DIR": "", "COOKBOOK_CHECK": "1"}
    if line.runner == "sbatch":
        job = {"JOB_ID": "0", "JOB_NUM_NODES": nodes, "SUBMIT_DIR": str(Path.cwd())}
        environment |= {f"SLURM_{name}": value for name, value in job.items()}
    counts = (_gpus_per_node(options, num_nodes) for options in (typed, header))
    if (gpus := next((one for one in counts if one is not None), None)) is not None:
        environment["SLURM_GPUS_ON_NODE"] = str(gpus)
    folder = line.script.resolve().parent
    if "COOKBOOK_ROOT" not in os.environ and (folder / "submit.py").is_file():
        environment["COOKBOOK_ROOT"] = str(folder)
    command = ["bash", str(line.script), *line.words]
    status = subprocess.call(command, env=environment | variables, stdout=subprocess.DEVNULL)
    if status != CHECKED:
        # With 2 the script has said why.
        if status != 2:
            print(f"submit.py: {line.script} would end with status {status}", file=sys.stderr)
        return 2 if status == 2 else 1
    if line.runner == "bash" or not has_slurm() or not node_groups():
        print(f"{_SEEN}; not: TorchTitan's build, Slurm", file=sys.stderr)
        return 0
    command = ["sbatch", "--test-only", *line.options, *command[1:]]
    environment = submit_environment() | variables
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    if answer.returncode:
        print(f"submit.py: sbatch refuses it: {answer.stderr.strip()}", file=sys.stderr)
        return 1
    print(f"{_SEEN}, Slurm; not: TorchTitan's build", file=sys.stderr)
    return 0


def _parse(line: Sequence[str]) -> _Line:
    words = list(line)
    variables = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    runner = words.pop(0) if words and words[0] in ("sbatch", "bash") else "sbatch"
    if words and not words[0].startswith("-") and not Path(words[0]).is_file():
        found = f"found {words[0]!r}, which is no file; allowed: sbatch or bash, options, a script"
        raise InputError("check-line", found)
    # The value of an option may stand by itself, so the script is the first word that is a file.
    for position, word in enumerate(words):
        if not word.startswith("-") and Path(word).is_file():
            return _Line(variables, runner, words[:position], Path(word), words[position + 1 :])
    remedy = "write: python submit.py check-line PRECISION=mxfp8 sbatch --nodes=16 train_671b.sh"
    raise InputError("check-line", "names no script that is here", remedy)


def _header(script: Path, content: Sequence[str]) -> Iterator[str]:
    """Return the options of the `#SBATCH` lines; sbatch reads none below the first command."""
    command = 0
    for number, text in enumerate(content, 1):
        if text.startswith("#SBATCH "):
            if command:
                raise InputError(
                    f"{script}:{number}",
                    f"sbatch does not read `{text}`: it stands below the command in line {command}",
                    "move that command below all #SBATCH lines",
                )
            yield from text.split()[1:]
        elif text.strip() and not text.lstrip().startswith("#"):
            command = command or number


def _options(words: Sequence[str]) -> argparse.Namespace:
    """Parse the sbatch options that bear on the check; the last of each counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flags in (("--nodes", "-N"), ("--gpus", "-G"), ("--gres",), ("--gpus-per-node",)):
        parser.add_argument(*flags)
    parser.add_argument("--export")
    return parser.parse_known_args([word.replace("'", "").replace('"', "") for word in words])[0]


def _gpus_per_node(options: argparse.Namespace, nodes: int) -> int | None:
    """Return the GPUs on each node, from whichever option names them; None if none does."""
    per_node = options.gpus_per_node or (options.gres or "").removeprefix("gpu:")
    count, total = per_node.rpartition(":")[2], (options.gpus or "").rpartition(":")[2]
    if count.isdigit() and not total:
        return int(count)
    return int(total) // nodes if total.isdigit() else None
