#!/usr/bin/env python3
"""Runs `cookbook.verbs.cli` under the cookbook's own Python."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("VENV") or ROOT / ".venv")

# `python submit.py` works without activating what setup.sh made.
if (VENV / "bin/python").exists() and Path(sys.prefix).resolve() != VENV.resolve():
    python = str(VENV / "bin/python")
    os.execv(python, [python, str(ROOT / "submit.py"), *sys.argv[1:]])

sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    try:
        from cookbook.verbs.cli import main
    except ModuleNotFoundError as error:
        sys.exit(f"submit.py: {error.name} is not installed; run: bash {ROOT / 'setup.sh'}")
    sys.exit(main(sys.argv[1:]))
