"""Write the files that random cases name, whole and damaged: tokenizers, texts and weights."""

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from cookbook.config.dialect.names import Names

_LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
_TOKENIZERS = ("good", "no-config", "no-eos", "one-token", "large", "truncates", "broken", "absent")
_WORDS = ("".join(_LETTERS[i * i * k % 26] for i in range(90 + k)) for k in range(1, 80))
_TEXTS = {
    "good/a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in _WORDS),
    "one/a.jsonl": '{"text": "abc"}\n',
    "empty/a.jsonl": "",
    "blank/a.jsonl": "\n\n",
    "other-key/a.jsonl": '{"content": "abc"}\n' * 9,
    "number/a.jsonl": '{"text": 5}\n' * 9,
    "half/a.jsonl": '{"text": "x\\ud83d"}\n' * 9,
    "broken/a.jsonl": '{"text": "abc"}\n{"text"\n',
    "no-text/a.jsonl": '{"text": ""}\n' * 9,
    "txt/a.txt": "abc def\n" * 400,
}
_FOLDERS = sorted(f"texts/{name.partition('/')[0]}" for name in _TEXTS)
_WEIGHTS = ["native", "absent"]
_WEIGHTS += [f"{name}/step-2" for name in ("native", "bare", "cut", "hf", "hf-cut", "hf-gap")]
# Options that name files, and what they may name.
FILES = {
    Names.assets: [f"tokenizer/{name}" for name in _TOKENIZERS],
    Names.dataset_path: [*_FOLDERS, "texts/absent", "texts/cut", "texts/good/a.jsonl"],
    Names.validation_path: _FOLDERS,
    Names.text_files: [*_FOLDERS, "texts/cut/a.jsonl.gz", "texts/good/*", "texts/absent"],
    Names.validation_files: _FOLDERS,
    Names.initial_load_path: [*(f"weights/{name}" for name in _WEIGHTS), "texts/good"],
}


def write_files(folder: Path) -> None:
    """Write tokenizers and texts below `folder`."""
    for name in _TOKENIZERS[:-1]:
        _write_tokenizer(folder / "tokenizer" / name, name)
    for name, text in _TEXTS.items():
        path = folder / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "texts/cut").mkdir()
    whole = gzip.compress(_TEXTS["good/a.jsonl"].encode(), mtime=0)
    (folder / "texts/cut/a.jsonl.gz").write_bytes(whole[:-9])


def write_weights(folder: Path, train: Callable[[Mapping[str, str], Path], object]) -> None:
    """Save a checkpoint, and an export, by training; damage copies of both."""
    alone = {Names.last_save_in_hf: "true", Names.last_save_model_only: "true"}
    for name in ("native", "hf"):
        own = folder / "weights" / name
        own.mkdir(parents=True)
        done = train({Names.checkpoints: "true", **(alone if name == "hf" else {})}, own)
        assert (own / "saved/step-2").is_dir(), done
        (own / "saved/step-2").rename(own / "step-2")
    for name, source in (("bare", "native"), ("cut", "native"), ("hf-cut", "hf"), ("hf-gap", "hf")):
        shutil.copytree(folder / "weights" / source / "step-2", folder / f"weights/{name}/step-2")
    (folder / "weights/bare/step-2/.metadata").unlink()
    cut = [folder / "weights/cut/step-2/__0_0.distcp"]
    cut += [*(folder / "weights/hf-cut/step-2").glob("*.safetensors")][:1]
    for path in cut:
        path.write_bytes(path.read_bytes()[:-100])
    index = folder / "weights/hf-gap/step-2/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))


def _write_tokenizer(folder: Path, kind: str) -> None:
    words = ["<bos>", "<eos>", "<unk>", *_LETTERS]
    words += [f"w{number}" for number in range(5000)] if kind == "large" else []
    vocabulary = {word: number for number, word in enumerate(words)}
    splits = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        "pre_tokenizer": splits,
    }
    if kind == "truncates":
        how = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
        content["truncation"] = how
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    special |= {"bos_token": "<eos>"} if kind == "one-token" else {}
    special = {} if kind == "no-eos" else special
    folder.mkdir(parents=True)
    text = json.dumps(content)
    (folder / "tokenizer.json").write_text(text[:-9] if kind == "broken" else text)
    if kind != "no-config":
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
