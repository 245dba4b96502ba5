"""Paths in this checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
TEMPLATES = ROOT / "templates"
REQUIREMENTS = ROOT / "requirements.txt"
# Corpus and tokenizer for local runs, created by setup.sh.
LOCAL_ASSETS = ROOT / "assets" / "local"


def runs_folder() -> Path:
    """Return the folder that holds all runs: COOKBOOK_RUNS, or `runs/` by default.

    A relative path is relative to the checkout, not to the working directory.
    """
    return ROOT / (os.environ.get("COOKBOOK_RUNS") or "runs")


def python_path() -> str:
    """Return PYTHONPATH with this checkout first, for a process that imports the cookbook."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
