"""Paths in this checkout, or in the snapshot of it that a run carries."""

import os
from pathlib import Path

# The code that runs: a checkout, or the snapshot in a run's folder.
CODE = Path(__file__).resolve().parents[2]
# A snapshot's file that names its checkout, where recipes, tokenizers, data and runs are.
CHECKOUT = "CHECKOUT"


def _checkout() -> Path:
    snapshot = CODE / CHECKOUT
    return Path(snapshot.read_text(encoding="utf-8")) if snapshot.is_file() else CODE


ROOT = _checkout()
RECIPES = ROOT / "recipes"
TEMPLATES = CODE / "templates"
REQUIREMENTS = CODE / "requirements.txt"
# Corpus and tokenizer for local runs, created by setup.sh.
LOCAL_ASSETS = ROOT / "assets" / "local"


def runs_folder() -> Path:
    """Return the folder that holds all runs: COOKBOOK_RUNS, or `runs/` by default.

    A relative path is relative to the checkout, not to the working directory.
    """
    return ROOT / (os.environ.get("COOKBOOK_RUNS") or "runs")


def own_recipes() -> Path:
    """Return the folder of the user's own recipes: COOKBOOK_RECIPES, or `recipes/` by default."""
    return ROOT / (os.environ.get("COOKBOOK_RECIPES") or "recipes")


def python_path(code: Path = CODE) -> str:
    """Return PYTHONPATH with `code` first, for a process that imports the cookbook from there."""
    others = (os.environ.get("PYTHONPATH") or "").split(os.pathsep)
    return os.pathsep.join([str(code), *(one for one in others if one not in ("", str(CODE)))])
