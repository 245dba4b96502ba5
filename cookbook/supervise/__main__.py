"""What the rendered scripts call.

    python -m cookbook.supervise begin CELL_FOLDER --cell NAME ... -- WORDS -- SBATCH WORDS
    python -m cookbook.supervise preflight CELL_FOLDER --attempt K
    python -m cookbook.supervise end CELL_FOLDER --exit-status N --signal NAME

Environment: COOKBOOK_SUPERVISED where a supervisor notes the run; COOKBOOK_CHECK where `begin` is
to end with its verdict, before anything is written (`submit.py check-line` sets it).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cookbook.base.errors import InputError, JobError, run_command
from cookbook.run.folder import CellFolder
from cookbook.supervise.begin import Start, begin, end, judge, note_refusal
from cookbook.supervise.preflight import preflight
from cookbook.supervise.resume import find_checkpoint

# The script must not go on, and nothing is wrong.
CHECKED = 3
# Starting the job again would not help.
CANNOT_START = 4


def main(words: Sequence[str]) -> int:
    """Run one of the commands; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m cookbook.supervise")
    commands = parser.add_subparsers(dest="command", required=True)
    started = commands.add_parser("begin")
    started.add_argument("folder", type=Path)
    for name in ("cell", "recipe", "precision", "ep-backend", "cluster"):
        started.add_argument(f"--{name}", required=True)
    started.add_argument("--nodes", type=int, required=True)
    checked = commands.add_parser("preflight")
    checked.add_argument("folder", type=Path)
    checked.add_argument("--attempt", type=int, required=True)
    ended = commands.add_parser("end")
    ended.add_argument("folder", type=Path)
    ended.add_argument("--exit-status", type=int, required=True)
    ended.add_argument("--signal", default="", help="that the script was told to stop with")
    ended.add_argument("--decision", help="what the script does about it, where it goes on")
    # argparse would take TorchTitan's words for its own.
    own, train, line = _parts(words)
    arguments = parser.parse_args(own)
    folder = CellFolder(arguments.folder)
    if arguments.command == "end":
        end(folder, arguments.exit_status, arguments.signal, arguments.decision)
        return 0
    if arguments.command == "preflight":
        return _preflight(folder, arguments.attempt)
    start = Start(
        folder=folder,
        cell=arguments.cell,
        recipe=arguments.recipe,
        precision=arguments.precision,
        ep_backend=arguments.ep_backend,
        cluster=arguments.cluster,
        nodes=arguments.nodes,
        words=train,
        own_words=line,
    )
    supervised = bool(os.environ.get("COOKBOOK_SUPERVISED"))
    try:
        if os.environ.get("COOKBOOK_CHECK"):
            cell = judge(start)
            find_checkpoint(folder, cell)
            verdict = f"{cell.name} may run: {cell.nodes} node(s) x {cell.cluster.ranks}"
            print(verdict, file=sys.stderr)
            return CHECKED
        print(begin(start, supervised))
    except InputError as error:
        if supervised:
            note_refusal(folder, str(error))
        raise
    return 0


def _preflight(folder: CellFolder, attempt: int) -> int:
    try:
        print(",".join(preflight(folder, attempt)))
    except (JobError, InputError) as error:
        reason = f"preflight: {error}" if isinstance(error, JobError) else str(error)
        note_refusal(folder, reason)
        print(f"cookbook.supervise: {reason}", file=sys.stderr)
        return CANNOT_START
    return 0


def _parts(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The words before the first `--`, those up to the second, and the rest."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(word)
    own, train, line = [*parts, [], []][:3]
    return own, train, line


if __name__ == "__main__":
    sys.exit(run_command("cookbook.supervise", lambda: main(sys.argv[1:])))
