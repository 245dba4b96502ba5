"""Where the parts of this checkout lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
TEMPLATES = ROOT / "templates"
REQUIREMENTS = ROOT / "requirements.txt"
# Corpus and tokenizer for local runs, made by set-up.
LOCAL_ASSETS = ROOT / "assets" / "local"
