"""The checkpoints in a cell's folder: which of them are whole, and what each one holds.

PyTorch writes the data files of `step-N` first and `.metadata` last, which lists for each tensor
its bytes in a file. So a checkpoint without `.metadata` was never finished, and one with shorter
files was damaged since; changed bytes are not noticed. `.metadata` is a pickle, read here without
torch.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step-([0-9]+)")
_METADATA = ".metadata"
# TorchTitan takes this for a checkpoint too, and then cannot load it.
_HUGGING_FACE = "model.safetensors.index.json"
_TEXTS = "dataloader.dp_rank_"
# The state beside the model that training needs, by the head of its entries' names.
STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")


@dataclass(frozen=True)
class Checkpoint:
    """One `step-N` folder.

    Attributes:
        damage: why it cannot be loaded, None if it is whole.
        states: those of STATES that it holds.
        text_readers: data-parallel ranks that saved their position in the texts.
    """

    path: Path
    step: int
    damage: str | None
    states: frozenset[str] = frozenset()
    text_readers: int = 0


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of each `step-N` in `folder`, whole or not, the newest first."""
    found = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


def read_checkpoint(step: int, path: Path) -> Checkpoint:
    """Read which state the checkpoint in `path` holds, and whether it is whole."""
    if not (path / _METADATA).is_file():
        if (path / _HUGGING_FACE).is_file():
            return Checkpoint(path, step, None)
        return Checkpoint(path, step, f"has no {_METADATA}, so it was not written to its end")
    try:
        names, needed = _read_metadata(path / _METADATA)
    except (OSError, ValueError) as error:
        return Checkpoint(path, step, f"{_METADATA} cannot be read: {error}")
    return Checkpoint(
        path,
        step,
        next(_short_files(path, needed), None),
        frozenset(name.partition(".")[0] for name in names) & frozenset(STATES),
        sum(name.startswith(_TEXTS) for name in names),
    )


def _short_files(path: Path, needed: dict[str, int]) -> Iterator[str]:
    for name, size in sorted(needed.items()):
        try:
            found = (path / name).stat().st_size
        except OSError:
            yield f"{name} is missing"
            continue
        if found < size:
            yield f"{name} has {found:,} of {size:,} bytes"


class _Inert:
    """Stands for any object of the pickle, whose classes are torch's."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # A frozen dataclass with slots has a list here, which nothing below needs.
        self.__dict__.update(state if isinstance(state, dict) else {})


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {})


def _read_metadata(path: Path) -> tuple[list[str], dict[str, int]]:
    """Return the names of a checkpoint's entries, and the bytes that each file must have.

    Raises:
        ValueError: PyTorch does not write such a file.
    """
    try:
        with path.open("rb") as file:
            metadata = _InertUnpickler(file).load()
        needed: dict[str, int] = {}
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
        return [str(name) for name in metadata.state_dict_metadata], needed
    except OSError:
        raise
    except Exception as error:
        # A cut pickle may raise anything.
        raise ValueError(f"{type(error).__name__}: {error}") from None
