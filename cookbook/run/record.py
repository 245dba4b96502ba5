"""The record of a cell: all that its folder keeps of what was asked, in `cell.yaml`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.files import write_whole
from cookbook.base.schema import Unchecked, Words, fill
from cookbook.base.yamlfile import read_yaml


@dataclass(frozen=True)
class CellRecord:
    """What a cell was asked to do; a value that is not known is None.

    Attributes:
        emulated: low precision is computed in software; its speed says nothing.
        stand_in_for: the recipe that was asked for, where this machine runs another.
        refused: why the cell does not run.
        published_tokens_per_second_per_gpu: only where the cell is just what was published.
        baseline: the cell that speed-ups are against.
        options: TorchTitan's options that are set, by dotted name.
    """

    name: str | None = None
    recipe: str | None = None
    precision: str | None = None
    ep_backend: str | None = None
    cluster: str | None = None
    stack: str | None = None
    nodes: int = 1
    ranks_per_node: int = 1
    device: str | None = None
    emulated: bool = False
    stand_in_for: str | None = None
    refused: str | None = None
    published_tokens_per_second_per_gpu: float | None = None
    published_source: str | None = None
    baseline: str | None = None
    environment: Words = field(default_factory=Words)
    options: Unchecked = field(default_factory=Unchecked)

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def steps(self) -> int | None:
        """Training steps that were asked for."""
        return self._count("training.steps")

    @property
    def loss_rank(self) -> int:
        """The global rank that prints the real loss: the first of the last pipeline stage."""
        degree = self._count("parallelism.pipeline_parallel_degree") or 1
        # This schedule's last stage is on the rank that has the first one.
        v_shaped = self.options.get("parallelism.pipeline_parallel_schedule") == "ZBVZeroBubble"
        return 0 if v_shaped else self.world // degree * (degree - 1)

    def as_yaml(self) -> str:
        """The content of `cell.yaml`."""
        content = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in dataclasses.asdict(self).items()
        }
        text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
        return text

    def write(self, path: Path) -> None:
        """Write it to `path`."""
        write_whole(path, self.as_yaml())

    def _count(self, option: str) -> int | None:
        """An option that is a positive whole number, None for anything else."""
        value = self.options.get(option)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if is_count else None


def read_record(path: Path) -> CellRecord:
    """The record at `path`; what cannot be read is an InputError that says why.

    Keys that are not known here are another version's, and left out.
    """
    file = read_yaml(path)
    return fill(CellRecord, file, beside=[key.partition(".")[0] for key in file.content])


def shown_with_places(record: CellRecord, places: dict[str, str]) -> CellRecord:
    """The record with each option as its value and the place that set it."""
    options: dict[str, Any] = {
        name: {"value": value, "from": places[name]} for name, value in record.options.items()
    }
    return dataclasses.replace(record, options=Unchecked(options))
