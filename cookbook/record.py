"""What scripts call that were rendered before the rooms: it says what to do instead of running.

Their options and module names are of another version; one that ran on would train something else
than it says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cookbook.base.command import run_command
from cookbook.base.errors import InputError
from cookbook.run.folder import CellFolder
from cookbook.supervise.begin import note_refusal


def main(words: Sequence[str]) -> int:
    """Refuse; where a supervisor waits, leave it the reason."""
    folder = CellFolder(Path(words[1] if len(words) > 1 else "."))
    error = InputError(
        "train.sh",
        "was rendered by an older version of the cookbook, whose options this one does not have",
        "render it anew (python submit.py render RECIPE -o train.sh) and go on in the same folder "
        f"with CELL_DIR={folder.path}, or check out the commit that run.json names",
    )
    if "--supervised" in words and folder.status.exists():
        note_refusal(folder, str(error))
    raise error


if __name__ == "__main__":
    sys.exit(run_command("cookbook.supervise", lambda: main(sys.argv[1:])))
