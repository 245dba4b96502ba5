"""The way into a job: train the cells in these folders, as their `cell.yaml` says.

    python -m cookbook.supervise CELL_DIR...

A script that is started by hand calls it with --script. What the script carries, on standard input,
first becomes the request in CELL_DIR; then this module starts once more, from the code that the run
keeps. With --check, what the script carries is only validated.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cookbook.base.errors import InputError, run_command
from cookbook.base.paths import python_path
from cookbook.base.yamlfile import parse_yaml
from cookbook.config.request import HANDED_OVER
from cookbook.run.folder import CellFolder
from cookbook.supervise.start import check, take_over
from cookbook.supervise.supervisor import Supervisor


def main(words: Sequence[str]) -> int:
    """Train, or validate; return only from a validation."""
    parser = argparse.ArgumentParser(prog="python -m cookbook.supervise", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="CELL_DIR")
    parser.add_argument("--script", type=Path)
    parser.add_argument("--check", action="store_true")
    # Split by hand: argparse would parse TorchTitan's options as its own.
    cut = [*words, "--"].index("--")
    given, unknown = parser.parse_known_args(words[:cut])
    if unknown or bool(given.script) == bool(given.folders):
        remedy = "render the script again, or copy train_671b.sh anew"
        raise InputError("this script", "is of an earlier version of the cookbook", remedy)
    if given.script is None:
        return Supervisor([CellFolder(folder) for folder in given.folders])()
    script = given.script.read_text(encoding="utf-8")
    # Errors name lines of the script.
    above = script.partition(f"{HANDED_OVER}\n")[0].count("\n") + 1
    carried = parse_yaml("\n" * above + sys.stdin.read(), given.script)
    if not given.check:
        folder, code = take_over(carried, words[cut + 1 :], script)
        python = f"{os.environ.get('VENV') or sys.prefix}/bin/python"
        os.environ["PYTHONPATH"] = python_path(code)
        os.execv(python, [python, "-m", "cookbook.supervise", str(folder.path)])
    check(carried, words[cut + 1 :])
    return 0


if __name__ == "__main__":
    sys.exit(run_command("cookbook.supervise", lambda: main(sys.argv[1:])))
