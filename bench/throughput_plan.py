"""What `bench.gpu_throughput` is asked for: cells, corpora, machine, rounds and steps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cells import first_gpu
from bench.corpora import Corpus, make_corpora
from bench.throughput_cells import CELLS, CPU_RANKS, Trained, cell_of, choose, seq_len_of
from bench.torchrun import Job, released_argv
from cookbook.base.errors import InputError
from cookbook.base.paths import LOCAL_ASSETS
from cookbook.config.cluster import Cluster
from cookbook.config.resolve import this_machine
from cookbook.install.corpus import is_made, make_corpus
from cookbook.run.run import commit

CORPORA = ("short", "long")
# As the cookbook's profiles have it.
_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Of text, to try the benchmark out with.
_CPU_TOKENS = 50_000
# Fewer steps than this do not make a median worth reporting.
_LEAST_STEPS = 10


@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        cells: by name; the first is what the others are compared with.
        repeats: rounds on each corpus.
        warm_up: steps of each training that are not measured, before `steps` that are.
        deadline: of `time.monotonic`.
    """

    out: Path
    cells: Mapping[str, Trained]
    corpora: tuple[Corpus, ...]
    machine: Cluster
    repeats: int
    warm_up: int
    steps: int
    deadline: float

    @property
    def settings(self) -> dict[str, Any]:
        """What all measurements of a file have in common."""
        return {
            "device": self.machine.device,
            "gpu": self.machine.gpu.name if self.machine.gpu else None,
            "ranks": self.machine.ranks_per_node,
            "commit": commit(),
            "warm_up": self.warm_up,
            "steps": self.steps,
        }

    def jobs(self, corpus: Corpus) -> dict[str, Job]:
        """The trainings of a round on `corpus`, by the cells' names."""
        text, tokenizer = Path(corpus.path), LOCAL_ASSETS / "tokenizer"
        steps = self.warm_up + self.steps
        return {
            name: Job(
                cell_of(name, trained, self.machine, text, tokenizer, steps),
                folder=self.out / "runs" / corpus.name / name,
                caches=self.out,
                released=trained.released and self.machine.gpu is not None,
            )
            for name, trained in self.cells.items()
        }


def read_plan(description: str, words: Sequence[str] | None = None) -> Plan:
    """The plan that the command line asks for, with its corpora made; ends on a wrong word."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="+", metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument(
        "--cell",
        dest="defined",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "BASE SECTION.KEY=VALUE"),
        help="define a CELL: that of another, with other options",
    )
    parser.add_argument("--corpora", default=",".join(CORPORA), help=f"of {','.join(CORPORA)}")
    parser.add_argument("--repeats", type=int, default=3, help="rounds on each corpus")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=15, help="steps that are measured")
    parser.add_argument("--gpus", type=int, default=4, help="of this machine; EP is over all")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args(words)
    wanted = asked.corpora.split(",")
    for name in wanted:
        if name not in CORPORA:
            parser.error(f"found {name!r}, allowed: {', '.join(CORPORA)}")
    least = 1 if asked.device == "cpu" else _LEAST_STEPS
    if asked.steps < least:
        parser.error(f"--steps: found {asked.steps}, allowed: {least} or more")
    if min(asked.repeats, asked.warm_up + 1) < 1:
        parser.error("--repeats must be 1 or more, --warm-up 0 or more")
    if asked.device == "cpu":
        machine = this_machine(CPU_RANKS, None)
    else:
        machine = this_machine(asked.gpus, first_gpu(asked.gpus, "--device cpu"), _ENVIRONMENT)
    try:
        cells = choose(asked.cells, asked.defined)
        seq_len = seq_len_of(cells, machine)
        _check_released(cells, machine)
    except (InputError, ValueError) as error:
        parser.error(str(error))
    out = asked.out.resolve()
    if not is_made(LOCAL_ASSETS):
        make_corpus(LOCAL_ASSETS)
    corpora = make_corpora(LOCAL_ASSETS, out, seq_len, None if machine.gpu else _CPU_TOKENS)
    return Plan(
        out=out,
        cells=cells,
        corpora=tuple(corpus for corpus in corpora if corpus.name in wanted),
        machine=machine,
        repeats=asked.repeats,
        warm_up=asked.warm_up,
        steps=asked.steps,
        deadline=began + asked.seconds,
    )


def _check_released(cells: Mapping[str, Trained], machine: Cluster) -> None:
    """Refuse a cell that asks the released TorchTitan for what only the hooks know."""
    for name, trained in cells.items():
        if trained.released and machine.gpu is not None:
            released_argv(cell_of(name, trained, machine, Path(), Path(), 1))
