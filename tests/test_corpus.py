"""The local corpus: made once from Python's sources, repaired, and read by TorchTitan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.install import corpus


def make(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cookbook.install.corpus", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "with a space"
    result = make(folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.titan
class TestMade:
    def test_files_and_size(self, made: Path) -> None:
        assert sorted(files_below(made)) == [
            "corpus/stdlib.jsonl",
            "stamp.json",
            "tokenizer/tokenizer.json",
            "tokenizer/tokenizer_config.json",
        ]
        assert 8e6 < (made / "corpus/stdlib.jsonl").stat().st_size < 40e6

    def test_only_a_cut_file_is_made_again(self, made: Path, tmp_path: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
        result = make(made)
        assert result.returncode == 0 and "are there" in result.stdout
        assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
        assert make(tmp_path, RAYON_NUM_THREADS="1").returncode == 0
        # The same bytes, whatever the threads.
        assert files_below(tmp_path) == files_below(made)
        with (tmp_path / "corpus/stdlib.jsonl").open("r+b") as file:
            file.truncate(1000)
        assert not corpus.is_made(tmp_path)
        assert make(tmp_path).returncode == 0
        assert files_below(tmp_path) == files_below(made)
        (tmp_path / corpus.STAMP).unlink()
        assert not corpus.is_made(tmp_path)

    def test_torchtitan_reads_both(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torchtitan.components.tokenizer import HuggingFaceTokenizer
        from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

        # What a killed run leaves behind is not read as data.
        leftover = made / "corpus/.stdlib.jsonl.abc"
        leftover.write_text('{"text": "left')
        tokenizer = HuggingFaceTokenizer(str(made / "tokenizer"))
        assert tokenizer.get_vocab_size() == corpus.VOCABULARY_SIZE
        text = "def naïve(x):\n\treturn 'ß' * x  # 数\n"
        tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
        assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert tokenizer.decode(tokens[1:-1]) == text

        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
        dataset = HuggingFaceTextDataset("c4_test", str(made / "corpus"), tokenizer, seq_len=128)
        batch, labels = next(iter(dataset))
        assert batch["input"].shape == labels.shape == (128,)
        leftover.unlink()


def test_too_few_sources_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass\n")
    with pytest.raises(InputError, match="too few Python sources"):
        corpus.make_corpus(tmp_path / "out", sources=tmp_path)
    assert not (tmp_path / "out").exists()
