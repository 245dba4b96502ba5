"""Attended lengths of a stream of documents, and those of its slowest rank.

A token attends to those before it in its own document and sequence. Ranks meet in every layer, so
the rank whose batch has the longest documents sets the pace.
"""

from __future__ import annotations

import functools
import math
import random
import shlex
import statistics
from dataclasses import dataclass

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.base.text_files import find_sources, read_lengths
from cookbook.config.cell import Cell
from cookbook.predict.rank import model_of

_SEED = 42
# Sequences that the distribution is drawn from, and how often ranks are drawn from these.
_SEQUENCES, _DRAWS = 2000, 400


@dataclass(frozen=True)
class Documents:
    """Documents whose lengths, in tokens, are taken as log-normal.

    Attributes:
        source: where the two figures are from.
    """

    mean_tokens: float
    median_tokens: float
    source: str

    @property
    def sigma(self) -> float:
        """The standard deviation of the lengths' logarithm."""
        return math.sqrt(2 * math.log(self.mean_tokens / self.median_tokens))


C4 = Documents(430, 260, "arXiv:2104.08758 and arXiv:2310.20707, lognormal, median 260")
LOCAL = Documents(6453, 3520, "counted: docs/evidence/performance/h200x2-8layers.json")


def documents_of(cell: Cell, named: Documents | None = None) -> Documents | None:
    """Return the documents that bound attention; None where tokens attend to whole sequences.

    Args:
        named: taken in place of those of the cell's dataset.

    Raises:
        InputError: a dataset whose documents are not known here.
    """
    if not model_of(cell).by_document:
        return None
    if named:
        return named
    name, path = cell.options["training.dataset"], cell.options["training.dataset_path"]
    if name == "text":
        return _counted(cell)
    if name == "c4" or (name == "c4_test" and not path):
        return C4
    if path and path.rstrip("/").endswith("assets/local/corpus"):
        return LOCAL
    raise InputError(
        cell.options.origin("training.dataset_path" if path else "training.dataset"),
        f"the length of the documents of {path or name} is not known, and attention depends on it",
        "pass it: --documents MEAN:MEDIAN, in tokens",
    )


def attended_text(documents: Documents | None, seq_len: int) -> str:
    """Say what tokens attend within."""
    if documents is None:
        return f"whole sequences of {seq_len:,} tokens, across documents"
    return f"documents of {documents.mean_tokens:,.0f} tokens on average ({documents.source})"


def _counted(cell: Cell) -> Documents:
    files, key = cell.options["data.files"], cell.options["data.text_key"]
    assets = cell.options["model.hf_assets_path"] or ""
    tokenizer, lengths = ROOT / assets / "tokenizer.json", None
    if tokenizer.is_file():
        lengths = read_lengths(find_sources(files, ROOT), key, tokenizer)
    if lengths is None:
        words = ["data", *files, "--tokenizer", assets]
        words += ["--text-key", key] if key != "text" else []
        raise InputError(
            cell.options.origin("data.files"),
            "the length of their documents was not counted, and attention depends on it",
            f"run: python submit.py {shlex.join(words)}",
        )
    mean, median = lengths
    return Documents(mean, min(mean, median), "counted by submit.py data")


def parse_documents(place: str, text: str) -> Documents:
    """Parse `MEAN:MEDIAN`, in tokens."""
    mean, colon, median = text.partition(":")
    try:
        found = Documents(float(mean), float(median), place)
    except ValueError:
        found = None
    if not colon or found is None or not 1 <= found.median_tokens < found.mean_tokens < math.inf:
        raise InputError(place, f"found {text!r}, allowed: MEAN:MEDIAN in tokens, as 430:260")
    return found


def mean_attended_tokens(documents: Documents, seq_len: int) -> float:
    """Return the mean number of tokens that a token attends to, itself included."""
    return statistics.fmean(_attended(documents, seq_len))


@functools.cache
def slowest_attended_tokens(
    documents: Documents, seq_len: int, sequences: int, ranks: int
) -> float:
    """Return the mean of the slowest of `ranks`, each with a batch of `sequences`."""
    attended = _attended(documents, seq_len)
    drawn = random.Random(_SEED)
    # Neighbours stay together: a document that is longer than a sequence fills several of them.
    sums = [0.0]
    for one in attended:
        sums.append(sums[-1] + one)
    last = len(attended) - sequences

    def batch() -> float:
        start = drawn.randint(0, max(last, 0))
        taken = min(sequences, len(attended))
        return (sums[start + taken] - sums[start]) / taken

    return statistics.fmean(max(batch() for _ in range(ranks)) for _ in range(_DRAWS))


@functools.cache
def _attended(documents: Documents, seq_len: int) -> tuple[float, ...]:
    """Return the mean attended length of each of a stream's sequences."""
    drawn = random.Random(_SEED)
    mu, sigma = math.log(documents.median_tokens), documents.sigma
    found = []
    left = 0
    for _ in range(_SEQUENCES):
        room, pairs = seq_len, 0
        while room:
            left = left or max(1, round(drawn.lognormvariate(mu, sigma)))
            piece = min(left, room)
            pairs += piece * (piece + 1) // 2
            left -= piece
            room -= piece
        found.append(pairs / seq_len)
    return tuple(found)
