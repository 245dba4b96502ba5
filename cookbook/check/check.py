"""Check cells by rules and by building TorchTitan's Trainer; predict their memory, work and time.

`submit.py` does not import torch, so a subprocess builds the Trainers, in fake process groups.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT, python_path
from cookbook.check.warnings import ADVICE, BUILT_ADVICE
from cookbook.config.cell import ERROR, WARNING, Cell, Finding, Verdict, train_argv
from cookbook.config.dialect.argv import arguments
from cookbook.config.dialect.names import PACKAGE, TORCHTITAN
from cookbook.config.facts import Facts
from cookbook.config.recipe import OF_PRECISION
from cookbook.config.validate import judge, may_read_texts
from cookbook.predict.memory import FITS, TIGHT, StageMemory, predict_memory, state_gib, verdict
from cookbook.predict.rank import Rank, Work, count_work, describe_ranks
from cookbook.predict.step import StepTime, predict_step


@dataclass(frozen=True)
class Built:
    """The outcome of building a cell's model."""

    # For each pipeline stage, its first rank's report, with the keys `active`, `warnings` and
    # `not_exercised`. Empty if any of these ranks failed.
    ranks: tuple[dict[str, Any], ...] = ()
    failure: dict[str, Any] | None = None  # the error of the first rank that failed
    unavailable: str = ""  # why TorchTitan could not run on this machine
    seconds: float = 0.0

    def noted(self, key: str) -> list[str]:
        """Return the distinct texts that the ranks report under `key`, such as `warnings`."""
        return list(dict.fromkeys(text for rank in self.ranks for text in rank[key]))

    def active(self, key: str) -> set[str]:
        found = (rank["active"][key] or "" for rank in self.ranks)
        return {word for words in found for word in words.split(" and ") if word}


@contextlib.contextmanager
def dry_run(module: str = f"{PACKAGE}.dry_build") -> Iterator[Callable[[Cell], Built]]:
    """Start a subprocess, and yield a function that builds a configuration's model in it."""
    with tempfile.TemporaryDirectory(prefix="cookbook-check-") as folder:
        # Errors go to a file: a pipe that nobody reads could block the subprocess.
        said = Path(folder) / "errors"
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "TMPDIR": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            # Hide the GPUs: TorchTitan and the hooks choose CPU or CUDA at import, and forked
            # children cannot use CUDA once their parent has initialized it.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }
        with said.open("w") as errors:
            command = [sys.executable, "-m", module]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            # Start it in its own session, so that its forked children can be killed with it.
            pipes |= {"env": environment, "start_new_session": True}
            process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        assert process.stdin
        assert process.stdout
        requests, answers = process.stdin, process.stdout
        # Wait until the subprocess prints the line that says it is ready, or exits.
        answers.readline()

        @functools.cache
        def answer_to(request: str) -> Built:
            line = ""
            with contextlib.suppress(BrokenPipeError):
                print(request, file=requests, flush=True)
                line = answers.readline()
            if not line.strip():
                last = said.read_text(errors="replace").strip().rpartition("\n")[2]
                return Built(unavailable=last.strip() or "the dry run ended without output")
            answer = json.loads(line)
            ranks, seconds = answer["ranks"], answer["seconds"]
            failure = next((rank for rank in ranks if "error" in rank), None)
            return Built(() if failure else tuple(ranks), failure, seconds=seconds)

        try:
            yield lambda cell: answer_to(json.dumps(_request(cell)))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                requests.close()
            answers.close()


def build_cells(cells: Sequence[Cell]) -> list[Built]:
    with dry_run() as build:
        return [build(cell) for cell in cells]


def _request(cell: Cell) -> dict[str, Any]:
    gpu, exchange = cell.cluster.gpu, cell.facts.exchange
    description = arguments(cell.options.stack.options[Facts.description], cell.description)
    return {
        "argv": [word for word in train_argv(cell) if word not in description],
        "world": cell.world,
        "pp": cell.layout.pp,
        "ranks_per_node": cell.cluster.ranks_per_node,
        "compute_capability": gpu.compute_capability if gpu else None,
        "reads_texts": may_read_texts(cell.facts),
        "stand_ins": {exchange.title: exchange.modules} if exchange.modules else {},
    }


_MEMORY = "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management"
# Ignore TorchTitan's warnings that start with these words. They do not matter here, or the
# cookbook's own checks report the same problem.
_ROUTINE = (
    *("HF assets path", "Pipeline Parallel loss is not visible", "Warmup", "decay"),
    "model.safetensors.index.json",
)


@dataclass
class CellCheck:
    cell: Cell
    judged: Verdict
    advice: tuple[Finding, ...] = ()
    built: Built | None = None
    ranks: tuple[Rank, ...] = ()  # empty if the cell was not built or cannot be predicted
    stages: tuple[StageMemory, ...] = ()  # the predicted memory of each of `ranks`
    work: Work | None = None
    step: StepTime | None = None
    no_step: str = ""  # why the step time is unknown

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.judged.findings, *self.advice)

    @property
    def may_run(self) -> bool:
        return not self.judged.errors

    @property
    def peak(self) -> StageMemory | None:
        return max(self.stages, key=lambda stage: stage.total, default=None)

    @property
    def is_built(self) -> bool:
        return bool(self.built and self.built.ranks)

    @property
    def active(self) -> dict[str, str]:
        if not self.built or not self.built.ranks:
            return {}
        found = {key: self.built.active(key) for key in self.built.ranks[0]["active"]}
        return {k: " and ".join(sorted(one - {"bf16"} or one)) for k, one in found.items() if one}

    @property
    def verdict(self) -> str | None:
        """`fits`, `tight` or `will not fit`; None if there is no GPU or the memory is unknown."""
        room, peak = self.room_gib, self.peak
        return verdict(peak.total, room, self.cell.facts) if peak and room else None

    @property
    def room_gib(self) -> float | None:
        """The memory of a rank: its GPU's, or its part of this machine's; None if not known."""
        cluster = self.cell.cluster
        if cluster.gpu:
            return cluster.gpu.memory_gib
        if cluster.scheduler != "local":
            return None
        return float(psutil.virtual_memory().total) / 2**30 / cluster.ranks_per_node

    @property
    def summary(self) -> str:
        """Why the cell cannot run, or how it fits into memory, in one line."""
        if self.judged.refused:
            return self.judged.refused
        if self.peak is None:
            not_built = "by the rules; TorchTitan did not build it"
            return f"built; {self.no_step}" if self.is_built else not_built
        rank = "a GPU" if self.cell.cluster.gpu else "a rank"
        words = f"needs {size_text(self.peak.total)} {rank}"
        unit = "" if self.cell.cluster.gpu else " GiB"
        return f"{self.verdict}: {words} of {self.room_gib:.0f}{unit}" if self.room_gib else words


def check_cells(cells: Sequence[Cell], *, build: bool = True) -> list[CellCheck]:
    """Check whether cells, which are single training configurations, can run.

    Apply the rules to each cell. With `build`, also build the model of each cell that breaks no
    rule, even if this machine lacks packages or files that the job needs.
    """
    checks = []
    for cell in cells:
        judged = judge(cell)
        # Advice computed from wrong input, such as an invalid layout, would mislead.
        is_divided = not any(finding.is_input for finding in judged.rules)
        advice = tuple(found for rule in ADVICE for found in rule(cell)) if is_divided else ()
        checks.append(CellCheck(cell, judged, advice))
    wanted = [one for one in checks if build and not one.judged.rules]
    answers = build_cells([one.cell for one in wanted]) if wanted else ()
    for check, built in zip(wanted, answers, strict=True):
        check.built = built
        if built.ranks:
            try:
                ranks = describe_ranks(check.cell)
                check.stages = tuple(predict_memory(check.cell, rank) for rank in ranks)
                check.ranks, check.work = ranks, count_work(check.cell, ranks)
                check.step = predict_step(check.cell, ranks)
            except InputError as error:
                check.no_step = str(error)
        found = [*_build_findings(check, built)]
        errors = tuple(finding for finding in found if finding.level == ERROR)
        check.judged = replace(check.judged, built=None if built.unavailable else errors)
        check.advice += tuple(finding for finding in found if finding.level != ERROR)
    return checks


def _build_findings(check: CellCheck, built: Built) -> Iterator[Finding]:
    cell, trainer = check.cell, f"{TORCHTITAN}/train.py"
    if built.unavailable:
        reason = f"TorchTitan could not be asked: {built.unavailable}"
        remedy = "run: bash setup.sh; until then only the rules were applied"
        yield Finding(WARNING, "not_built", "", reason, remedy, trainer)
        return
    if built.failure:
        message, place = built.failure["error"], built.failure["place"]
        # Blame an option whose last part (`steps` of `training.steps`) is in the message.
        named = [name for name in cell.options.settings if name.rpartition(".")[2] in message]
        version, (package, _, file) = cell.options.stack.pins["torchtitan"], place.partition("/")
        reason = f"TorchTitan {version} refuses it: {message} (rank {built.failure['rank']}, "
        reason += f"{place or built.failure['kind']})"
        file = file.rpartition(":")[0] if package == "torchtitan" else "train.py"
        option = max(named, key=len, default="")
        yield Finding(ERROR, "torchtitan", option, reason, "", f"{TORCHTITAN}/{file}")
        return
    peak, gpu, room = check.peak, cell.cluster.gpu, check.room_gib
    if peak and room and check.verdict != FITS:
        level = WARNING if check.verdict == TIGHT else ERROR
        owner = f"a {gpu.name}'s" if gpu else "a rank's part of this machine's memory,"
        reason = f"needs about {size_text(peak.total)} of {owner} {room:.4g} "
        reason += f"(rank {peak.rank}, at {peak.moment}); most of it: {peak.largest} "
        reason += f"({size_text(peak.terms[peak.largest])})"
        yield Finding(level, "memory", "", reason, _remedy(check, peak.largest), _MEMORY)
    for text in built.noted("warnings"):
        if not text.startswith(_ROUTINE):
            yield Finding(WARNING, "torchtitan", "", f"TorchTitan warns: {text}", "", trainer)
    if check.ranks:
        yield from (found for rule in BUILT_ADVICE for found in rule(cell))
    # Only the built model shows whether a filter excluded all layers from quantization, or whether
    # TorchTitan chose another kernel for the GPU.
    for key in OF_PRECISION:
        words, precision = built.active(key), cell.precision
        if key == "linear_layers":
            words = words - {"bf16"} or words
        expected, active = precision.expects(key), " and ".join(sorted(words)) or "none"
        if expected != active:
            reason = f"precision {precision.name} expects {key} {expected}, and {active} is active "
            reason += "in the model that TorchTitan builds: the job would stop at its first step"
            remedy = f"correct the options, or `expect` in {precision.path.name}"
            reference = f"{TORCHTITAN}/components/quantization"
            yield Finding(ERROR, "expectation", "", reason, remedy, reference)


def size_text(gib: float) -> str:
    """Format an amount of memory: in GiB, or in MiB where that would be a fraction of one."""
    return f"{gib:,.0f} GiB" if gib >= 1 else f"{1024 * gib:,.0f} MiB"


def _remedy(check: CellCheck, largest: str) -> str:
    if largest in ("activations", "recomputed layer", "layer's temporaries"):
        is_full = check.cell.facts.ac_mode == "full"
        more = "" if is_full else f"set {Facts.ac_mode} full, or "
        return f"{more}lower {Facts.local_batch}"
    if largest == "logits and loss":
        return f"lower {Facts.local_batch}, or compile the loss"
    if largest in ("gathered parameters", "unreduced gradients"):
        return "spread the experts over more ranks (EP), or use fewer pipeline ranks"
    state, more = (
        size_text(state_gib(check.ranks[0])),
        "GPUs" if check.cell.cluster.gpu else "memory",
    )
    return f"use more {more}: parameters, gradients and optimizer state alone take {state}"
