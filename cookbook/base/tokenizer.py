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

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}


@dataclass(frozen=True)
class TokenizerFiles:
    """The two files; `config` is None where there is no `tokenizer_config.json`."""

    content: dict[str, Any]
    config: dict[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles":
        """Read the files in `folder`; raise OSError or ValueError if that fails."""
        config = folder / "tokenizer_config.json"
        texts = (folder / "tokenizer.json").read_bytes(), config.exists() and config.read_bytes()
        content, read = (json.loads(text) if text else None for text in texts)
        if not isinstance(content, dict) or not isinstance(read, dict | None):
            raise ValueError("no mapping")
        return cls(content, read)

    def named(self, name: str) -> str | None:
        found = (self.config or {}).get(f"{name}_token")
        return found.get("content") if isinstance(found, dict) else found

    @property
    def specials(self) -> dict[str, dict[str, Any]]:
        """Map each special token of the configuration to its flags, in the order of addition."""
        config = self.config or {}
        found = [config[name] for name in _NAMED if config.get(name) is not None]
        found += [one for one in config.get("added_tokens_decoder", {}).values() if one]
        pairs = [(one, {}) if isinstance(one, str) else (one["content"], one) for one in found]
        return {
            token: {"special": given.get("special", True)}
            | ({n: given.get(n, _FLAGS[n]) for n in _FLAGS} if given else {})
            for token, given in pairs
        }

    @property
    def largest(self) -> int:
        """The largest token id, with the special tokens that are appended."""
        vocab = self.content.get("model", {}).get("vocab", {})
        known = (
            dict(vocab) if isinstance(vocab, dict) else {one[0]: n for n, one in enumerate(vocab)}
        )
        known |= {token["content"]: token["id"] for token in self.content.get("added_tokens", ())}
        appended = [token for token in self.specials if token not in known]
        return max(known.values(), default=0) + len(appended)


class Lengths:
    """Counts tokens as training does."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer

        path, remedy = folder / "tokenizer.json", "name a folder with tokenizer.json"
        if not path.is_file():
            raise InputError("--tokenizer", f"{path} is not there", remedy)
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
            files = TokenizerFiles.read(folder)
        except Exception as error:
            # The tokenizers package raises plain Exception.
            raise InputError("--tokenizer", f"{path} is no tokenizer ({error})", remedy) from None
        specials = files.specials.items()
        self.tokenizer.add_special_tokens([AddedToken(token, **flags) for token, flags in specials])
        around = {token for token in (files.named("bos"), files.named("eos")) if token}
        self._added = len(around - set(self.tokenizer.encode("").tokens))

    def of(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each document."""
        return [len(found.ids) + self._added for found in self.tokenizer.encode_batch(texts)]
