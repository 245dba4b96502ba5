"""The corpora that throughput is measured on: documents as short as C4's, and long ones.

How long documents are decides what attention costs, since no token sees another document. The
long ones are the local corpus as it is. The short ones are the same text, cut and joined to lengths
drawn from C4's distribution, taken as log-normal:

- mean: 156 billion tokens in 365 million documents, 427 each (C4.EN in Dodge et al.,
  arXiv:2104.08758); counted in another way, 421 (Elazar et al., arXiv:2310.20707, table 2).
- spread: of 364,868,892 documents the longest has 101,898 tokens (the same table 2). The largest of
  as many draws is about that where the logarithm's standard deviation is 1.0. The median is then
  260 tokens; 2% of the documents, with 14% of the tokens, have over 2,048.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.attended import mean_attended_length, pieces
from cookbook.base.files import write_whole
from cookbook.install.corpus import BOS, EOS

SEED = 42
MEAN_TOKENS = 430
SIGMA = 1.0
# Table 2 of arXiv:2310.20707.
SHORTEST, LONGEST = 5, 101_898
_BATCH = 64


@dataclass(frozen=True)
class Corpus:
    """A corpus as TorchTitan reads it; lengths are in tokens, without those that mark the ends.

    Attributes:
        path: the folder with its JSON lines.
        mean_attended_length: of a token, in sequences of `seq_len`.
    """

    name: str
    path: str
    documents: int
    tokens: int
    mean_length: float
    median_length: float
    seq_len: int
    mean_attended_length: float


def make_corpora(
    assets: Path, folder: Path, seq_len: int, most_tokens: int | None = None
) -> list[Corpus]:
    """Write the short documents below `folder`, and describe both corpora.

    Args:
        assets: the local corpus and its tokenizer (`cookbook.install.corpus`).
        most_tokens: how much of the text is cut and described; by default all.
    """
    tokenizer = _tokenizer(assets)
    long, short = assets / "corpus", folder / "short"
    cut = cut_documents(_take(read_texts(long), tokenizer, most_tokens))
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in cut)
    write_whole(short / "documents.jsonl", "".join(lines))
    return [
        describe("short", short, assets, seq_len),
        describe("long", long, assets, seq_len, most_tokens),
    ]


def cut_documents(encoded: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The same text in documents of C4's lengths; what is left at the end is left out.

    Args:
        encoded: texts with their encodings by the tokenizer.
    """
    lengths = draw_lengths()
    wanted, parts = next(lengths), list[str]()
    for text, encoding in encoded:
        starts = [start for start, _ in encoding.offsets]
        at = 0
        while at < len(starts):
            until = min(at + wanted, len(starts))
            parts.append(text[starts[at] : starts[until] if until < len(starts) else None])
            wanted -= until - at
            at = until
            if not wanted:
                yield "".join(parts)
                wanted, parts = next(lengths), []


def draw_lengths() -> Iterator[int]:
    """Lengths of C4's documents in tokens, the same ones each time."""
    drawn = random.Random(SEED)
    # So that the mean of the draws, not of their logarithms, is C4's.
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    while True:
        length = drawn.lognormvariate(mu, SIGMA)
        yield max(SHORTEST, min(LONGEST, round(length)))


def describe(
    name: str, path: Path, assets: Path, seq_len: int, most_tokens: int | None = None
) -> Corpus:
    """Count a corpus as one data-parallel rank reads it."""
    tokenizer = _tokenizer(assets)
    begin, end = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    lengths = []

    def stream() -> Iterator[int]:
        for _, encoding in _take(read_texts(path), tokenizer, most_tokens):
            lengths.append(len(encoding.ids))
            yield begin
            yield from encoding.ids
            yield end

    attended = mean_attended_length(pieces(stream(), end, seq_len))
    return Corpus(
        name=name,
        path=str(path),
        documents=len(lengths),
        tokens=sum(lengths),
        mean_length=round(statistics.fmean(lengths), 1),
        median_length=statistics.median(lengths),
        seq_len=seq_len,
        mean_attended_length=round(attended, 1),
    )


def read_texts(folder: Path) -> Iterator[str]:
    """The documents of a folder of JSON lines with a `text` in each."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


def _take(
    texts: Iterable[str], tokenizer: Any, most_tokens: int | None
) -> Iterator[tuple[str, Any]]:
    """Texts with their encodings, until they have `most_tokens` tokens together."""
    taken, source = 0, iter(texts)
    while batch := list(itertools.islice(source, _BATCH)):
        for text, encoding in zip(batch, tokenizer.encode_batch(batch), strict=True):
            if most_tokens is not None and taken >= most_tokens:
                return
            taken += len(encoding.ids)
            yield text, encoding


def _tokenizer(assets: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(assets / "tokenizer" / "tokenizer.json"))
