"""The supervisor of a script that was started with sbatch or bash: the script hands over to it.

    python -m cookbook.supervise CELL_DIR --script=FILE --cell=NAME ... -- ARGS -- SBATCH ARGS

Environment: COOKBOOK_CHECK ends it with its verdict, before anything is written
(`submit.py check-line` sets it).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cookbook.base.errors import run_command
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from cookbook.supervise.admit import Start, start_run, validate
from cookbook.supervise.supervisor import Supervisor

# The exit status of a check that passed: the script goes no further.
CHECKED = 3


def parse(words: Sequence[str]) -> Start:
    """Return the facts that a script hands over."""
    parser = argparse.ArgumentParser(prog="python -m cookbook.supervise")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--script", type=Path, required=True)
    for name in ("cell", "recipe", "precision", "ep-backend", "cluster"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--spare-nodes", type=int, default=0)
    # argparse would take TorchTitan's options for its own.
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(word)
    own_options, arguments, own = [*parts, [], []][:3]
    given = vars(parser.parse_args(own_options))
    folder = CellFolder(given.pop("folder"))
    return Start(folder=folder, arguments=arguments, own=own, **given)


def main(words: Sequence[str]) -> int:
    """Validate the script, then train with it, which exits; return the status of a check."""
    start = parse(words)
    if os.environ.get("COOKBOOK_CHECK"):
        cell = validate(start)
        verdict = f"{cell.name} may run: {cell.nodes} node(s) x {cell.cluster.ranks}"
        print(verdict, file=sys.stderr)
        return CHECKED
    start_run(start)
    # submitit sets it in its own jobs; `slurm` marks the batch step of a Slurm job.
    os.environ["SUBMITIT_EXECUTOR"] = str(read_record(start.folder.record).profile["scheduler"])
    return Supervisor([start.folder], start.own)()


if __name__ == "__main__":
    sys.exit(run_command("cookbook.supervise", lambda: main(sys.argv[1:])))
