"""Where the parts of this checkout lie."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
TEMPLATES = ROOT / "templates"
REQUIREMENTS = ROOT / "requirements.txt"
# Corpus and tokenizer for local runs, made by set-up.
LOCAL_ASSETS = ROOT / "assets" / "local"


def runs_folder() -> Path:
    """Where runs go: COOKBOOK_RUNS, else `runs/`.

    A relative path starts at the checkout, as it does in the job, wherever the caller stands.
    """
    return ROOT / (os.environ.get("COOKBOOK_RUNS") or "runs")
