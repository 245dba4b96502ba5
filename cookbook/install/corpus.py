"""Makes a text corpus and a tokenizer out of Python's own source files, for local training.

Every machine has these files, so a first run needs no download. TorchTitan reads the results with
`--training.dataset=c4_test --training.dataset_path=FOLDER/corpus` and
`--model.hf_assets_path=FOLDER/tokenizer`.
"""

import argparse
import contextlib
import hashlib
import json
import platform
import sys
import sysconfig
import time
from pathlib import Path

from cookbook.base.errors import InputError, run_command
from cookbook.base.files import write_whole
from cookbook.base.paths import LOCAL_ASSETS

STAMP = "stamp.json"

# Vocabulary size of TorchTitan's DeepSeek-V3 debugmodel, including special tokens.
VOCABULARY_SIZE = 2048
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "add_bos_token": True,
    "add_eos_token": True,
}

# Enough text for stable merges; the tokenizer trains on it in about two seconds.
TOKENIZER_CHARACTERS = 4_000_000
# Leave these folders of Python's library out of the corpus. Many Python distributions lack the
# tests, and the contents of the other folders differ between machines.
LEFT_OUT = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib"})
SMALLEST_CORPUS = 1_000_000


def is_made(folder: Path) -> bool:
    """Return whether `folder` holds a complete corpus and tokenizer."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in stamp["bytes"].items())
    return False


def make_corpus(folder: Path, sources: Path | None = None) -> dict[str, int]:
    """Write the corpus and the tokenizer into `folder`; return the files' sizes in bytes.

    The documents are the source files of Python's standard library. They are sorted by a hash of
    their relative paths, which mixes topics and gives the same order on every machine. A stamp file
    is written last; it shows that the other files are complete.
    """
    root = sources or Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    # Exclude _sysconfigdata, which contains paths from the machine that built this Python.
    names = [
        path.as_posix()
        for path in paths
        if LEFT_OUT.isdisjoint(path.parts) and not path.name.startswith("_sysconfigdata")
    ]
    documents = []
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = (root / name).read_text(encoding="utf-8")
            if text.strip():
                documents.append(text)
    if sum(map(len, documents)) < SMALLEST_CORPUS:
        remedy = "use a Python that has its standard library as files"
        raise InputError(str(root), "holds too few Python sources to train on", remedy)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    contents = {
        "corpus/stdlib.jsonl": lines,
        "tokenizer/tokenizer.json": _train_tokenizer(documents),
        "tokenizer/tokenizer_config.json": json.dumps(TOKENIZER_CONFIG, indent=2) + "\n",
    }
    (folder / STAMP).unlink(missing_ok=True)
    for name, text in contents.items():
        write_whole(folder / name, text)
    sizes = {name: (folder / name).stat().st_size for name in contents}
    stamp = {"made_from": f"Python {platform.python_version()}", "bytes": sizes}
    write_whole(folder / STAMP, json.dumps(stamp, indent=2) + "\n")
    return sizes


def _train_tokenizer(documents: list[str]) -> str:
    # Import lazily: `submit.py` and the doctor import this module without the training stack.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    head, characters = [], TOKENIZER_CHARACTERS
    for text in documents:
        head.append(text[: max(characters, 0)])
        characters -= len(text)
    tokenizer.train_from_iterator(filter(None, head), trainer)
    return str(tokenizer.to_str(pretty=True)) + "\n"


def main(arguments: list[str] | None = None) -> int:
    about = "Make a text corpus and a tokenizer from Python's own sources, in seconds."
    parser = argparse.ArgumentParser(description=about)
    where = "where corpus/ and tokenizer/ go (default: %(default)s)"
    parser.add_argument("folder", nargs="?", type=Path, default=LOCAL_ASSETS, help=where)
    parsed = parser.parse_args(arguments)
    if is_made(parsed.folder):
        print(f"corpus and tokenizer exist already: {parsed.folder}")
        return 0
    began = time.monotonic()
    megabytes = make_corpus(parsed.folder)["corpus/stdlib.jsonl"] / 1e6
    seconds = time.monotonic() - began
    print(f"corpus ({megabytes:.1f} MB) and tokenizer made in {seconds:.1f} s: {parsed.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("corpus", main))
