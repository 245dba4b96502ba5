"""The corpora of the benchmark of throughput: their lengths, and how far their tokens look back."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from pathlib import Path

import pytest

from bench.attended import mean_attended_length, pieces
from bench.corpora import MEAN_TOKENS, cut_documents, draw_lengths, make_corpora
from cookbook.base.paths import LOCAL_ASSETS
from cookbook.install.corpus import is_made, make_corpus


def test_lengths_are_those_of_c4() -> None:
    lengths = list(itertools.islice(draw_lengths(), 20_000))
    assert lengths == list(itertools.islice(draw_lengths(), 20_000)), "the same ones each time"
    assert statistics.fmean(lengths) == pytest.approx(MEAN_TOKENS, rel=0.03)
    assert statistics.median(lengths) == pytest.approx(261, rel=0.03)
    assert min(lengths) >= 5
    long = [length for length in lengths if length > 2048]
    assert len(long) / len(lengths) == pytest.approx(0.02, abs=0.004)


def test_a_token_attends_to_its_document_in_its_sequence() -> None:
    end = 0
    # Sequences of 4, each with a label more; the fifth token of each is not trained on.
    tokens = [1, end, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, end, end, 5, 1, 2]
    assert list(pieces(tokens, end, 4)) == [2, 2, 4, 3, 1]
    assert mean_attended_length([2, 2, 4, 3, 1]) == (3 + 3 + 10 + 6 + 1) / 12
    assert mean_attended_length([8192]) == 8193 / 2
    with pytest.raises(ValueError, match="no whole sequence"):
        mean_attended_length(pieces([1, 2, 3], end, 4))


@pytest.mark.titan
def test_torchtitans_mask_lets_tokens_look_just_as_far() -> None:
    import torch
    from torchtitan.models.attention import get_causal_mask_mod, get_document_mask_mod

    drawn = random.Random(1)
    for end, seq_len in ((0, 8), (1, 16), (2, 7)):
        stream = [drawn.randrange(6) for _ in range(40 * (seq_len + 1))]
        rows = [stream[at : at + seq_len] for at in range(0, len(stream), seq_len + 1)]
        batch = torch.tensor(rows)
        document, causal = get_document_mask_mod(batch, end), get_causal_mask_mod()
        b, q, k = torch.meshgrid(
            *(torch.arange(size) for size in (len(rows), seq_len, seq_len)), indexing="ij"
        )
        allowed = document(b, b, q, k) & causal(b, b, q, k)
        mean = allowed.sum(-1).float().mean().item()
        assert mean_attended_length(pieces(stream, end, seq_len)) == pytest.approx(mean)


@pytest.fixture(scope="module")
def assets() -> Path:
    if not is_made(LOCAL_ASSETS):
        make_corpus(LOCAL_ASSETS)
    return LOCAL_ASSETS


@pytest.mark.titan
def test_the_corpora_are_described_as_torchtitan_reads_them(assets: Path, tmp_path: Path) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    short, long = make_corpora(assets, tmp_path, seq_len=512, most_tokens=60_000)
    assert (short.name, long.name) == ("short", "long")
    assert 0.6 * MEAN_TOKENS < short.mean_length < 1.6 * MEAN_TOKENS
    assert long.mean_length > 4 * short.mean_length
    assert short.mean_attended_length < long.mean_attended_length < 257

    tokenizer = HuggingFaceTokenizer(str(assets / "tokenizer"))
    dataset = HuggingFaceTextDataset("c4_test", short.path, tokenizer, seq_len=512)
    lengths = []
    for inputs, _ in dataset:
        length = 0
        for token in inputs["input"].tolist():
            length += 1
            if token == tokenizer.eos_id:
                lengths.append(length)
                length = 0
        lengths += [length] if length else []
    assert sum(lengths) % 512 == 0
    assert mean_attended_length(lengths) == pytest.approx(short.mean_attended_length, abs=0.06)


@dataclasses.dataclass
class Letters:
    """An encoding with a token for each letter."""

    text: str

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return [(at, at + 1) for at in range(len(self.text))]


def test_documents_are_the_text_cut_and_joined() -> None:
    texts = ["a" * 700, "b" * 3, "c" * 2000, "d" * 900]
    cut = list(cut_documents((text, Letters(text)) for text in texts))
    lengths = list(itertools.islice(draw_lengths(), len(cut) + 1))
    assert [len(text) for text in cut] == lengths[:-1]
    whole = "".join(texts)
    assert whole.startswith("".join(cut))
    assert len(whole) - sum(map(len, cut)) < lengths[-1]
