"""Write the files that random cases name: tokenizers and texts, whole and damaged."""

import gzip
import json
from pathlib import Path

from cookbook.config.dialect.names import Names

_LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
_TOKENIZERS = ("good", "no-config", "no-eos", "one-token", "large", "truncates", "broken", "absent")
_TEXTS = {
    "good/a.jsonl": "".join(
        json.dumps({"text": "".join(_LETTERS[i * i * k % 26] for i in range(90 + k))}) + "\n"
        for k in range(1, 80)
    ),
    "one/a.jsonl": '{"text": "abc"}\n',
    "empty/a.jsonl": "",
    "blank/a.jsonl": "\n\n",
    "other-key/a.jsonl": '{"content": "abc"}\n' * 9,
    "number/a.jsonl": '{"text": 5}\n' * 9,
    "half/a.jsonl": '{"text": "x\\ud83d"}\n' * 9,
    "broken/a.jsonl": '{"text": "abc"}\n{"text"\n',
    "txt/a.txt": "abc def\n" * 400,
    "empty-text/a.jsonl": '{"text": ""}\n' * 9,
}
_NAMES = [*{name.partition("/")[0] for name in _TEXTS}]
# Options that name files, and what they may name; most draw from these.
FILES = {
    Names.assets: [f"tokenizer/{name}" for name in _TOKENIZERS],
    Names.dataset_path: sorted(f"texts/{name}" for name in (*_NAMES, "absent")),
    Names.validation_path: sorted(f"texts/{name}" for name in _NAMES),
    Names.text_files: sorted(f"texts/{name}" for name in _TEXTS),
    Names.validation_files: sorted(f"texts/{name}" for name in _TEXTS),
    Names.initial_load_path: ["texts/good", "tokenizer/good", "absent"],
}


def write_files(folder: Path) -> None:
    """Write all of them below `folder`."""
    for name in _TOKENIZERS[:-1]:
        _write_tokenizer(folder / "tokenizer" / name, name)
    for name, text in _TEXTS.items():
        path = folder / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    cut = gzip.compress(_TEXTS["good/a.jsonl"].encode(), mtime=0)[:-9]
    (folder / "texts/cut").mkdir()
    (folder / "texts/cut/a.jsonl.gz").write_bytes(cut)


def _write_tokenizer(folder: Path, kind: str) -> None:
    words = ["<bos>", "<eos>", "<unk>", *_LETTERS]
    if kind == "large":
        words += [f"w{number}" for number in range(5000)]
    model = {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(words)}}
    content = {
        "version": "1.0",
        "model": model | {"unk_token": "<unk>"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": ""},
            "behavior": "Isolated",
            "invert": False,
        },
    }
    if kind == "truncates":
        content["truncation"] = {
            "direction": "Right",
            "max_length": 9,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    special |= {"bos_token": "<eos>"} if kind == "one-token" else {}
    if kind == "no-eos":
        del special["eos_token"]
    folder.mkdir(parents=True)
    text = json.dumps(content)
    (folder / "tokenizer.json").write_text(text[:-9] if kind == "broken" else text)
    if kind != "no-config":
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
