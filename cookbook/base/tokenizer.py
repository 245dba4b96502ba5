"""What TorchTitan makes of a tokenizer's folder, without importing it.

It loads `tokenizer.json`, adds the special tokens of `tokenizer_config.json`, and puts BOS and EOS
around each document. A test compares this with TorchTitan's `HuggingFaceTokenizer`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError

_NAMED = [f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")]
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFiles:
    """The two files; `config` is None where there is no `tokenizer_config.json`."""

    content: dict[str, Any]
    config: dict[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles":
        """Read the files in `folder`; raise OSError or ValueError if that fails."""
        config = folder / "tokenizer_config.json"
        content = json.loads((folder / "tokenizer.json").read_bytes())
        return cls(content, json.loads(config.read_bytes()) if config.exists() else None)

    def named(self, name: str) -> str | None:
        found = (self.config or {}).get(f"{name}_token")
        return found["content"] if isinstance(found, dict) else found

    @property
    def specials(self) -> dict[str, dict[str, bool]]:
        """Map each special token of the configuration to its flags, in the order of addition."""
        config = self.config or {}
        found = [config.get(name) for name in _NAMED]
        found += config.get("added_tokens_decoder", {}).values()
        flags = {one: {"special": True} for one in found if isinstance(one, str)}
        of = {"normalized": True, "special": True}
        tokens = [one for one in found if isinstance(one, dict)]
        return flags | {
            one["content"]: of | {flag: one[flag] for flag in _FLAGS if flag in one}
            for one in tokens
        }

    @property
    def largest(self) -> int:
        """The largest token id, with the special tokens that are appended."""
        vocab = self.content.get("model", {}).get("vocab", {})
        if isinstance(vocab, list):
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in self.content.get("added_tokens", ())}
        known = vocab | added
        return max(known.values(), default=0) + len(self.specials.keys() - known.keys())


class Lengths:
    """Counts tokens as training does."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer

        path, remedy = folder / "tokenizer.json", "name a folder with tokenizer.json"
        if not path.is_file():
            raise InputError("--tokenizer", f"{path} is not there", remedy)
        try:
            self._tokenizer, files = Tokenizer.from_file(str(path)), TokenizerFiles.read(folder)
        except Exception as error:
            # The tokenizers package raises plain Exception.
            raise InputError("--tokenizer", f"{path} is no tokenizer ({error})", remedy) from None
        specials = [AddedToken(token, **flags) for token, flags in files.specials.items()]
        self._tokenizer.add_special_tokens(specials)
        around = {files.named("bos"), files.named("eos")} - {None}
        self._added = len(around - set(self._tokenizer.encode("").tokens))

    def of(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each document."""
        return [len(found.ids) + self._added for found in self._tokenizer.encode_batch(texts)]
