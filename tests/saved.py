"""Checkpoints as PyTorch lays them out in a folder, without PyTorch."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.run.folder import PARTS

BYTES = 1000
FILES = ("__0_0.distcp", "__1_0.distcp")


@dataclass
class Metadata:
    """As torch.distributed.checkpoint's class of this name, whose other fields nobody reads."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]


@dataclass(frozen=True)
class Index:
    """A key of `storage_data`."""

    fqn: str
    rank: int
    half: int


@dataclass
class Place:
    """A value of `storage_data`."""

    relative_path: str
    offset: int
    length: int


def save(folder: Path, step: int, states: tuple[str, ...] = PARTS, readers: int = 2) -> Path:
    """Write the checkpoint `step-<step>` of two ranks, each file of BYTES bytes."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    names = ["norm.weight", *(f"{state}.x" for state in states)]
    if "dataloader" in states:
        names += [f"dataloader.dp_rank_{rank}" for rank in range(readers)]
    places: dict[Index, Place] = {}
    for rank, file in enumerate(FILES):
        (path / file).write_bytes(bytes(BYTES))
        places |= {
            Index(name, rank, half): Place(file, half * BYTES // 2, BYTES // 2)
            for half in (1, 0)
            for name in names
        }
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(dict.fromkeys(names), places)))
    return path


def cut(path: Path, size: int = BYTES - 1) -> None:
    """Truncate a file."""
    with path.open("r+b") as file:
        file.truncate(size)
