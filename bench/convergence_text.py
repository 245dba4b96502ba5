"""The text of the convergence experiment: short pieces in a mixed order, alike at every step.

The first experiment read whole files one after another. Long generated tables among them made the
loss dip, and what chance does to a run up to six times as large there (docs/convergence.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from bench.corpora import read_texts
from cookbook.base.files import write_whole
from cookbook.install.corpus import is_made, make_corpus

# About 600 tokens, a little more than a sequence.
CHARACTERS = 2000
PIECES = "pieces"


def make_text(assets: Path, sources: Path | None) -> str:
    """Write the tokenizer and the pieces of all Python sources below `sources` to `assets`.

    Returns:
        The SHA-256 of both, which runs that are compared must share.
    """
    if not is_made(assets):
        make_corpus(assets, sources)
    target = assets / PIECES / "pieces.jsonl"
    texts = read_texts(assets / "corpus")
    pieces = sorted((piece for text in texts for piece in cut(text)), key=_mixed)
    write_whole(
        target, "".join(json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in pieces)
    )
    found = hashlib.sha256(target.read_bytes())
    found.update((assets / "tokenizer" / "tokenizer.json").read_bytes())
    return found.hexdigest()


def cut(text: str) -> Iterator[str]:
    """The text in pieces of at most 2,000 characters that end with a line, where it has lines."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > CHARACTERS:
            yield piece
            piece = ""
        piece += line
        while len(piece) > CHARACTERS:
            yield piece[:CHARACTERS]
            piece = piece[CHARACTERS:]
    if piece.strip():
        yield piece


def _mixed(piece: str) -> bytes:
    return hashlib.sha256(piece.encode()).digest()
