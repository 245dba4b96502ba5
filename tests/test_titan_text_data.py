"""Own texts are read in a seeded order, cut over readers, and resumed without losing the place."""

import gzip
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.titan

SEQ_LEN, BATCH = 32, 2


class Letters:
    """A tokenizer of bytes."""

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [256, *text.encode(), 257]


def text_of(name: str, number: int) -> str:
    return f"{name}{number} " * (1 + number % 7)


def write_lines(path: Path, texts: Sequence[str], key: str = "text") -> bytes:
    content = "".join(json.dumps({key: text}) + "\n" for text in texts).encode()
    path.write_bytes(content)
    return content


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 documents of `a` in three kinds of files; 60 of b, c and d in others."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("corpus")
    texts = [text_of("a", number) for number in range(240)]
    write_lines(folder / "a0.jsonl", texts[:90])
    packed = write_lines(folder / "a1.jsonl.gz", texts[90:150])
    (folder / "a1.jsonl.gz").write_bytes(gzip.compress(packed))
    table = pyarrow.table({"text": texts[150:]})
    pyarrow.parquet.write_table(table, folder / "a2.parquet", row_group_size=20)
    packed = write_lines(folder / "b.jsonl.zst", [text_of("b", n) for n in range(60)], "content")
    (folder / "b.jsonl.zst").write_bytes(pyarrow.compress(packed, "zstd", asbytes=True))
    for name in ("books", "hub"):
        (folder / name).mkdir()
    for number in range(60):
        (folder / f"books/{number}.txt").write_text(text_of("c", number))
    for shard in range(5):
        write_lines(folder / f"hub/{shard}.jsonl", [text_of("d", 5 * n + shard) for n in range(12)])
    return folder


def loader(
    files: Sequence[str],
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    seed: int = 7,
    path: Path | None = None,
) -> Any:
    """A loader of own texts or, with `path`, of TorchTitan's data set in that folder."""
    from torchtitan.config.job_config import Training

    from cookbook.titan.tt_0_2_2.text_data import build_dataloader

    training = Training(
        dataset="c4_test" if path else "text",
        dataset_path=path and str(path),
        seq_len=SEQ_LEN,
        local_batch_size=BATCH,
    )
    training.dataloader.num_workers = workers
    data = SimpleNamespace(files=files, text_key="text", shuffle_seed=seed)
    config = SimpleNamespace(training=training, data=data)
    return build_dataloader(
        dp_world_size=world, dp_rank=rank, tokenizer=Letters(), job_config=config
    )


def texts(batches: Any, count: int) -> list[str]:
    """Inputs and labels of each of the next `count` batches."""
    return [f"{batch['input']} {labels}" for batch, labels in itertools.islice(batches, count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_two_resumes_in_epochs_1_and_2_read_what_one_run_reads(
    corpus: Path, world: int, workers: int
) -> None:
    # Of 240 documents of 25 tokens each rank has some 95 / world batches an epoch.
    files = [f"0.7:{corpus}/a*", f"0.1:{corpus}/b.jsonl.zst#content", f"0.1:{corpus}/books"]
    files.append(f"0.1:hub:{corpus}/hub")
    first, second, rest = 40 // world, 110 // world, 30
    for rank in range(world):
        whole = texts(iter(loader(files, rank, world, workers)), first + second + rest)
        found = []
        state: Any = None
        for count in (first, second, rest):
            one = loader(files, rank, world, workers)
            if state is not None:
                one.load_state_dict(pickle.loads(state))
            batches = iter(one)
            found += texts(batches, count)
            state = pickle.dumps(one.state_dict())
        assert found == whole
        assert len(set(whole)) == len(whole)


def test_ranks_read_every_document_once_an_epoch_and_epochs_differ(corpus: Path) -> None:
    from cookbook.base.text_files import find_sources
    from cookbook.titan.tt_0_2_2.text_data import Place, read_texts

    (source,) = find_sources([f"{corpus}/a*"], "text")

    def read(rank: int, epochs: int, seed: int) -> list[str]:
        return [*itertools.islice(read_texts(source, seed, rank, 3, Place()), 80 * epochs)]

    ranks = [read(rank, 2, 7) for rank in range(3)]
    first = sorted(text for rank in ranks for text in rank[:80])
    assert first == sorted(text_of("a", number) for number in range(240))
    assert sorted(text for rank in ranks for text in rank[80:]) == first
    assert ranks[0][:80] != ranks[0][80:]
    assert read(0, 1, 8) != ranks[0][:80]
    assert read(1, 1, -1) == [text_of("a", number) for number in range(1, 240, 3)]


def test_readers_of_a_hub_data_set_have_shards_of_their_own_if_there_are_enough(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cookbook.base.text_files import find_sources
    from cookbook.titan.tt_0_2_2.text_data import Place, read_texts

    said = list[str]()
    log = "cookbook.titan.tt_0_2_2.text_data.logger.warning"
    monkeypatch.setattr(log, lambda text, *to: said.append(text % to))

    (source,) = find_sources([f"hub:{corpus}/hub"], "text")
    # Five shards of 12 documents: of two readers, the first has three shards.
    for counts in ([36, 24], [10] * 6):
        places = [Place() for _ in counts]
        found = [
            [*itertools.islice(read_texts(source, 7, rank, len(counts), places[rank]), count)]
            for rank, count in enumerate(counts)
        ]
        assert Counter(itertools.chain(*found)) == Counter(text_of("d", n) for n in range(60))
    assert all("has 5 shards: each of its 6 readers downloads all of them" in one for one in said)
    assert said


def test_workers_share_the_texts_of_torchtitans_data_sets(tmp_path: Path) -> None:
    from cookbook.titan.tt_0_2_2.text_data import packed, unpacked

    # Each of eight documents fills a sequence, so four batches are an epoch.
    write_lines(tmp_path / "all.jsonl", [letter * (SEQ_LEN - 1) for letter in "abcdefgh"])
    one = loader([], workers=2, path=tmp_path)
    first = texts(iter(one), 2)
    other = loader([], workers=2, path=tmp_path)
    other.load_state_dict(one.state_dict())
    # What checkpoints had before readers sent arrays.
    assert unpacked(packed([3, 4])) == unpacked([3, 4]) == [3, 4]
    found = first + texts(iter(other), 2)
    assert all(f" {ord(letter)}," in str(found) for letter in "abcdefgh")
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        texts(iter(loader([], world=4, workers=3, path=tmp_path)), 1)
    with pytest.raises(SystemExit):
        texts(iter(loader([], rank=8, world=9, path=tmp_path)), 1)


@pytest.mark.parametrize(
    "config",
    [
        *(None, {}, {"bos_token": "<s>"}, {"eos_token": "</s>"}, {"pad_token": "<p>"}),
        {"bos_token": "</s>", "eos_token": "</s>"},
        {"bos_token": {"content": "<s>"}, "eos_token": "<new>", "add_eos_token": False},
        {"eos_token": "</s>", "added_tokens_decoder": {"9": {"content": "b c", "lstrip": True}}},
    ],
)
@pytest.mark.parametrize("adds", [False, True])
def test_tokens_are_counted_as_torchtitan_makes_them(
    tmp_path: Path, config: dict[str, Any] | None, adds: bool
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from cookbook.base.tokenizer import Lengths, TokenizerFiles

    words = Tokenizer(models.WordLevel({"a": 0, "?": 1, "<s>": 2, "</s>": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds:
        words.post_processor = processors.BertProcessing(("</s>", 3), ("<s>", 2))
    words.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, found = HuggingFaceTokenizer(str(tmp_path)), ["", "a", "a b c</s> <s>a <new>?", "<p> a"]
    expected = [len(theirs.encode(text, add_bos=True, add_eos=True)) for text in found]
    assert Lengths(tmp_path).of(found) == expected
    files = TokenizerFiles.read(tmp_path)
    assert files.largest == max(theirs.get_vocab().values())
    ends = files.named("eos") not in (None, files.named("bos"))
    assert ends == (theirs.eos_id is not None)


def test_sources_are_mixed_by_their_share_of_the_tokens(tmp_path: Path) -> None:
    # Documents of 10 and of 100 tokens.
    letters = {"s": 8, "l": 98}
    for letter, length in letters.items():
        write_lines(tmp_path / f"{letter}.jsonl", [letter * length])
    batches = iter(loader([f"0.75:{tmp_path}/s.jsonl", f"0.25:{tmp_path}/l.jsonl"]))
    seen: Counter[int] = Counter()
    for _ in range(200):
        seen.update(next(batches)[0]["input"].flatten().tolist())
    tokens = {letter: seen[ord(letter)] * (n + 2) / n for letter, n in letters.items()}
    assert tokens["s"] / sum(tokens.values()) == pytest.approx(0.75, abs=0.03)


def test_fewer_documents_than_readers_are_refused(corpus: Path, caplog: Any) -> None:
    with pytest.raises(SystemExit):
        texts(iter(loader([f"{corpus}/books"], rank=62, world=64)), 1)
    assert f"cookbook refuses: {corpus}/books: has 60 documents for 64 data" in caplog.text
