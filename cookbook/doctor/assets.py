"""The doctor's checks of what recipes read from `assets/`: tokenizers and the local corpus."""

from __future__ import annotations

import re

from cookbook.doctor.check import Finding, check
from cookbook.doctor.surroundings import Surroundings
from cookbook.install.corpus import is_made


@check(local=False)
def tokenizers(here: Surroundings) -> list[Finding]:
    """One finding per recipe that names its tokenizer's folder."""
    findings = []
    for recipe in sorted((here.repository / "recipes").glob("*.yaml")):
        # Read as text: the doctor also works where PyYAML is not installed yet.
        match = re.search(
            r"^[^#\n]*\bhf_assets_path:\s*[\"']?([^\s\"'#]+)",
            recipe.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        # The local tokenizer belongs to the local corpus, which has its own check.
        if match is None or match[1].startswith("assets/local"):
            continue
        folder = here.repository / match[1]
        name = f"tokenizer {recipe.stem}"
        wanted = ("tokenizer.json", "tokenizer_config.json")
        if not all((folder / file).is_file() for file in wanted):
            findings.append(
                Finding(
                    name,
                    "warning" if here.trains_for_real else "not here",
                    f"not in {match[1]}",
                    f"run ./setup.sh where the hub can be reached, or copy {' and '.join(wanted)}",
                )
            )
        else:
            findings.append(Finding(name, "ok", match[1]))
    return findings


@check(local=True)
def local_corpus(here: Surroundings) -> Finding:
    folder = here.repository / "assets/local"
    if is_made(folder):
        return Finding("local corpus", "ok", "assets/local")
    return Finding(
        "local corpus", "warning", "not made: local runs have no data", "run ./setup.sh --local"
    )
