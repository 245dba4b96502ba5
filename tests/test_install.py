"""What installed packages can do, whether a build is the wanted one; the local corpus."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.install import corpus, deepep
from cookbook.install.deepep import CannotBuildError, DeepEp, Plan, Toolkit, is_built, make_plan
from tests.waiting import HANG_S

BUILT = Plan("c0ffee", "2.10.0", "12.8", "9.0;10.0", "3.4.5")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DeepEP as `BUILT` says; the stamp of its build."""
    stamp = tmp_path / "deep_ep.json"
    stamp.write_text(json.dumps(asdict(BUILT)))
    found = DeepEp("1.2.1", BUILT.commit, tmp_path, True)
    monkeypatch.setattr(deepep, "STAMP", stamp)
    monkeypatch.setattr(deepep, "find_deepep", lambda: found)
    torch = SimpleNamespace(version=BUILT.torch)
    monkeypatch.setattr(deepep, "find_distribution", lambda name: torch)
    monkeypatch.setattr(deepep, "torch_cuda", lambda: BUILT.cuda)
    monkeypatch.setattr(deepep, "deepep_pin", lambda: SimpleNamespace(value=BUILT.commit))
    return stamp


@pytest.mark.parametrize(
    ("change", "arch", "expected"),
    [
        ({}, "", True),
        ({}, "9.0", True),
        ({}, "9.0;10.0", True),
        ({}, "10.0;12.0", False),
        ({"commit": "another"}, "", False),
        ({"torch": "another"}, "", False),
        ({"cuda": "another"}, "", False),
        (None, "", False),
    ],
)
def test_a_build_counts_for_its_pin_its_torch_and_its_gpus(
    built: Path, change: dict[str, str] | None, arch: str, expected: bool
) -> None:
    if change is None:
        built.unlink()
    else:
        built.write_text(json.dumps(asdict(BUILT) | change))
    assert is_built(arch) == expected


@pytest.mark.parametrize(
    ("releases", "reason"),
    [
        ([], "no CUDA toolkit"),
        ([(13, 0)], "torch is built for CUDA 12.8 and the toolkit found is CUDA 13.0"),
        ([(11, 8), (13, 0)], "the major versions must agree"),
        # It goes on with the one that fits, up to the next obstacle.
        ([(13, 0), (12, 4)], r"CUDA 12.4 in /cuda-12 cannot compile for GPUs 10.0"),
    ],
)
def test_the_toolkit_is_of_torchs_major_version(
    built: Path, monkeypatch: pytest.MonkeyPatch, releases: list[tuple[int, int]], reason: str
) -> None:
    found = [Toolkit(Path(f"/cuda-{release[0]}"), release) for release in releases]
    monkeypatch.setattr(deepep, "_find_toolkits", lambda: found)
    with pytest.raises(CannotBuildError, match=reason):
        make_plan("10.0")


def make(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cookbook.install.corpus", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
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
    def test_only_a_cut_file_is_made_again(self, made: Path, tmp_path: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
        result = make(made)
        assert result.returncode == 0 and "exist already" in result.stdout
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
