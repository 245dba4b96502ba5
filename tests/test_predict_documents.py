"""How far back tokens look, on average and on the slowest rank."""

import json
import os
import shlex
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.cli.main import main
from cookbook.predict.hardware import (
    C4,
    LOCAL,
    Documents,
    documents_of,
    parse_documents,
    slowest_attended_tokens,
)
from tests.check_cells import cell_of, with_options


def mean_attended_tokens(documents: Documents, seq_len: int) -> float:
    return slowest_attended_tokens(documents, seq_len, sequences=2000, ranks=1)


def test_it_agrees_with_what_was_counted_on_both_corpora() -> None:
    # docs/evidence/performance/h200x2-8layers.json: of the corpora that the measured cells read.
    assert mean_attended_tokens(C4, 8192) == pytest.approx(511.0, rel=0.05)
    assert mean_attended_tokens(LOCAL, 8192) == pytest.approx(2929.2, rel=0.05)


def test_documents_of_one_length_attend_to_half_of_it() -> None:
    alike = Documents(64.0000001, 64.0, "drawn")
    # A document of n tokens: 1, 2, ... n, on average.
    assert mean_attended_tokens(alike, 8192) == (64 + 1) / 2
    endless = Documents(10_000_001, 10_000_000, "drawn")
    assert mean_attended_tokens(endless, 4096) == pytest.approx((4096 + 1) / 2, rel=0.01)


def test_the_documents_of_a_cell() -> None:
    cell = cell_of("deepseek_v3_16b")
    assert documents_of(cell) == C4
    copy = with_options(cell, {"training.dataset_path": "/mnt/data/c4"})
    assert documents_of(copy) == C4
    local = {"training.dataset": "c4_test", "training.dataset_path": "assets/local/corpus/"}
    assert documents_of(with_options(cell, local)) == LOCAL
    other = {"training.dataset": "c4_test", "training.dataset_path": "/texts"}
    with pytest.raises(InputError, match=r"documents in /texts .* pass it to plan: --documents"):
        documents_of(with_options(cell, other))


@pytest.mark.titan
def test_texts_have_the_lengths_that_the_verb_data_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    words = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ends))
    for name, lengths in {"short": [2, 4, 6], "long": [98, 198]}.items():
        lines = [json.dumps({"text": "a " * (length - 2)}) + "\n" for length in lengths]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def documents(*files: str) -> Documents:
        options = {"training.dataset": "text", "data.files": [*files]}
        options |= {"model.hf_assets_path": str(tmp_path)}
        found = documents_of(with_options(cell_of("deepseek_v3_16b"), options))
        assert found is not None
        return found

    both = f"{tmp_path}/*.jsonl"
    command = ["data", both, "--tokenizer", str(tmp_path)]
    with pytest.raises(InputError) as caught:
        documents(both)
    assert f"run: python submit.py {shlex.join(command)}" in str(caught.value)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "documents  5\ntokens     308\nlength     mean 62, median 6, longest 198" in said
    found = documents(f"{tmp_path}/short.jsonl", f"{tmp_path}/long.jsonl")
    assert found.mean_tokens == pytest.approx(61.6) and found.median_tokens == 6
    # Half of the tokens of each: 37 short documents are read for each long one.
    weighted = [f"0.5:{tmp_path}/short.jsonl", f"0.5:{tmp_path}/long.jsonl"]
    assert main(["data", *weighted, "--tokenizer", str(tmp_path)]) == 0
    found = documents(*weighted)
    assert found.mean_tokens == pytest.approx(1 / (0.5 / 4 + 0.5 / 148))
    assert found.median_tokens == 4
    documents(both)
    # Other texts of the same size count as others, too.
    os.utime(tmp_path / "long.jsonl", (1, 1))
    with pytest.raises(InputError, match="was not counted"):
        documents(both)


def test_documents_are_named_by_mean_and_median() -> None:
    assert parse_documents("--documents", "900:300").mean_tokens == 900
    for text in ("900", "900:", "a:b", "300:900", "300:300", "900:0", "inf:3", "900:300:2"):
        with pytest.raises(InputError, match=r"--documents: found .* MEAN:MEDIAN"):
            parse_documents("--documents", text)
