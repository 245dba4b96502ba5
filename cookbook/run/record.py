"""Read and write a cell's record, `cell.yaml`: what was last requested for the cell."""

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.family import loss_rank
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import (
    Block,
    Count,
    Flag,
    Natural,
    Number,
    Text,
    Words,
    dump_yaml,
    fill,
    read_yaml,
)
from cookbook.run.folder import CellFolder

# Fields that `cell.yaml` leaves out where they are empty.
_SELDOM = (
    *("files", "environment_from", "command", "spare_nodes", "commit", "code", "too_few_nodes"),
    "profile",
)
# How many steps the learning-rate schedule covers; `training.steps` if it is not set.
TOTAL_STEPS = "lr_scheduler.total_steps"


@dataclass(frozen=True)
class CellRecord:
    """What was requested for a cell; an unknown value is None."""

    name: Text | None = None
    recipe: Text | None = None
    precision: Text | None = None
    ep_backend: Text | None = None
    cluster: Text | None = None
    stack: Text | None = None
    nodes: Count = 1
    ranks_per_node: Count = 1
    device: Text | None = None
    emulated: Flag = False  # whether software emulates the precision or EP backend
    stand_in_for: Text | None = None  # the requested recipe, if its `stand_in` is trained instead
    refused: Text | None = None  # why the cell does not run
    # The published speed; set only if the cell is exactly the published configuration.
    published_tokens_per_second_per_gpu: Number | None = None
    published_source: Text | None = None
    baseline: Text | None = None  # the cell that speed-ups are relative to
    prediction: Text | None = None  # text from the sweep about the expected speed
    repeat_of: Text | None = None  # the cell that this one repeats; `repeat` is then 2 or more
    repeat: Count = 1
    max_restarts: Natural = 3  # maximum number of restarts of the cell within one job
    environment: Words = field(default_factory=Words)
    # `A: B` sets environment variable A to the value of variable B, unless A is set already.
    environment_from: Words = field(default_factory=Words)
    options: dict[str, Any] = field(default_factory=dict)  # TorchTitan's options, by dotted name
    # The bash lines that start torchrun for an attempt, in which the supervisor sets variables.
    command: Text | None = None
    spare_nodes: Natural = 0  # nodes that the job has in addition, to take the place of bad ones
    # Of the code that the job runs: its commit, and the name of its snapshot in the run's folder.
    commit: Text | None = None
    code: Text | None = None
    # Paths of the user's own YAML files, by part (`recipe`, ...). Other parts are in `recipes/`.
    files: Words = field(default_factory=Words)
    too_few_nodes: Text | None = None  # if too few nodes are healthy: `wait` in the queue or `stop`
    # The content of the cluster's YAML file, so that a job never reads the file again.
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def steps(self) -> int | None:
        return self._count("training.steps")

    @property
    def schedule_steps(self) -> int | None:
        """The number of steps that the learning-rate schedule covers."""
        return self._count(TOTAL_STEPS) or self.steps

    @property
    def loss_rank(self) -> int:
        """The global rank that prints the real loss: the first rank of the last pipeline stage."""
        degree = self._count("parallelism.pipeline_parallel_degree") or 1
        schedule = str(self.options.get("parallelism.pipeline_parallel_schedule", ""))
        return loss_rank(schedule, degree, self.world)

    @property
    def tokens_per_step_per_gpu(self) -> float | None:
        """Tokens per step divided by the number of GPUs, as in TorchTitan's `tps`."""
        length = self._count("training.seq_len")
        local = self._count("training.local_batch_size")
        total = self._count("training.global_batch_size")
        if length and total:
            return total * length / self.world
        sharing = [f"parallelism.{n}_parallel_degree" for n in ("tensor", "context", "pipeline")]
        shared_by = math.prod(self._count(option) or 1 for option in sharing)
        return local * length / shared_by if length and local else None

    def as_yaml(self) -> str:
        content = dataclasses.asdict(self)
        content["command"] = Block(self.command) if self.command else None
        return dump_yaml({k: one for k, one in content.items() if one or k not in _SELDOM})

    def write(self, path: Path) -> None:
        write_whole(path, self.as_yaml())

    def _count(self, option: str) -> int | None:
        value = self.options.get(option)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if is_count else None


def read_record(path: Path) -> CellRecord:
    """Read the record at `path`; ignore unknown keys, which another version may have written."""
    file = read_yaml(path)
    return fill(CellRecord, file, beside=[key.partition(".")[0] for key in file.content])


def earlier_record(folder: CellFolder) -> CellRecord | None:
    """Return the folder's record; None if it is missing or unreadable."""
    with contextlib.suppress(InputError):
        return read_record(folder.record)
    return None


def attempt_records(folder: CellFolder, newest: CellRecord) -> dict[int, CellRecord]:
    """Return the record that each attempt ran with, by the attempt's number."""
    records, record = dict[int, CellRecord](), newest
    for attempt in reversed(folder.attempts()):
        # `keep_request` copies a record to the last attempt that ran with it.
        record = read_record(attempt.record) if attempt.record.exists() else record
        records[attempt.number] = record
    return records
