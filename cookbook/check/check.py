"""A verdict on cells: the rules, what TorchTitan builds, memory and work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.check.advice import advice
from cookbook.check.advice_kernels import hints_from_model
from cookbook.check.advice_saving import saving
from cookbook.check.declared import undeclared
from cookbook.check.dry_run import Built, build_cells
from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, WARNING, Finding
from cookbook.config.validate import validation_errors
from cookbook.predict.memory import StageMemory, predict_memory, state_gib, verdict
from cookbook.predict.step import StepTime, predict_step
from cookbook.predict.work import Work, count_work

_TRAINER = "https://github.com/pytorch/torchtitan/blob/v0.2.2"
# Warnings of TorchTitan's that say nothing about whether and how the cell runs.
_ROUTINE = (
    "Pipeline Parallel loss is not visible",
    "model.safetensors.index.json",
    "Warmup",
    "decay",
)


@dataclass(frozen=True)
class CellCheck:
    """All that a check found out about one cell; `stages` and `work` are empty where it was not
    built. `no_step` says why the time of its step is not known.
    """

    cell: Cell
    findings: tuple[Finding, ...]
    stages: tuple[StageMemory, ...] = ()
    views: tuple[Mapping[str, Any], ...] = ()
    work: Work | None = None
    built: Built | None = None
    step: StepTime | None = None
    no_step: str = ""

    @property
    def errors(self) -> list[Finding]:
        """What refuses the cell."""
        return [finding for finding in self.findings if finding.level == ERROR]

    @property
    def may_run(self) -> bool:
        """Whether nothing refuses the cell."""
        return not self.errors

    @property
    def peak(self) -> StageMemory | None:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total, default=None)

    @property
    def active(self) -> dict[str, str]:
        """What TorchTitan built, over all stages; a stage with nothing quantized does not count."""
        found: dict[str, str] = {}
        for key in self.views[0]["active"] if self.views else ():
            kinds = {view["active"][key] for view in self.views} - {None}
            quantized = kinds - {"bf16"} or kinds
            if quantized:
                found[key] = " and ".join(sorted(quantized))
        return found

    @property
    def verdict(self) -> str | None:
        """`fits`, `tight` or `will not fit`; None without a GPU, or where nothing was built."""
        gpu = self.cell.cluster.gpu
        if self.peak is None or gpu is None:
            return None
        return verdict(self.peak.total, gpu.memory_gib, self.cell.options)

    @property
    def summary(self) -> str:
        """One line: why not, or how it fits."""
        if self.errors:
            return str(self.errors[0])
        if self.peak is None:
            return "by the rules; TorchTitan did not build it"
        words = f"needs {self.peak.total:.0f} GiB a GPU"
        gpu = self.cell.cluster.gpu
        return f"{self.verdict}: {words} of {gpu.memory_gib:.0f}" if gpu else words


def judge(cell: Cell) -> list[Finding]:
    """What is known without building the cell: why it cannot run, else what it should know."""
    refused = validation_errors(cell)
    # Advice on a layout that does not divide would be about something else.
    return refused if any(finding.is_input for finding in refused) else [*refused, *advice(cell)]


def check_cells(cells: Sequence[Cell], *, build: bool = True) -> list[CellCheck]:
    """Check every cell; without `build`, by the rules alone, which takes no time.

    A cell that the rules refuse is not built.
    """
    found = [judge(cell) for cell in cells]
    wanted = [
        cell
        for cell, findings in zip(cells, found, strict=True)
        if build and not any(finding.level == ERROR for finding in findings)
    ]
    built = dict(
        zip((cell.name for cell in wanted), build_cells(wanted) if wanted else (), strict=True)
    )
    return [
        _with_build(cell, findings, built[cell.name])
        if cell.name in built
        else CellCheck(cell, tuple(findings))
        for cell, findings in zip(cells, found, strict=True)
    ]


def _with_build(cell: Cell, findings: list[Finding], built: Built) -> CellCheck:
    if built.unavailable:
        findings = [*findings, _not_tried(built.unavailable)]
        return CellCheck(cell, tuple(findings), built=built)
    if built.failure is not None:
        return CellCheck(cell, (*findings, _refusal(cell, built.failure)), built=built)
    findings = [
        *undeclared(cell, built.views),
        *findings,
        *_warnings(built),
        *hints_from_model(cell, built.views[0]),
        *saving(cell, built.views[0]),
    ]
    stages = tuple(predict_memory(cell, view) for view in built.views)
    checked = replace(
        _with_step(cell, built),
        findings=tuple(findings),
        stages=stages,
        work=count_work(cell, built.views),
    )
    shortage = _shortage(checked)
    return checked if shortage is None else replace(checked, findings=(shortage, *findings))


def _with_step(cell: Cell, built: Built) -> CellCheck:
    """What was built, with its time where the model knows it."""
    checked = CellCheck(cell, (), views=built.views, built=built)
    try:
        return replace(checked, step=predict_step(cell, built.views))
    except InputError as error:
        return replace(checked, no_step=str(error))


def _not_tried(reason: str) -> Finding:
    return Finding(
        WARNING,
        "not_built",
        "",
        f"TorchTitan could not be asked: {reason}",
        "run: bash setup.sh; until then only the rules were applied",
        f"{_TRAINER}/torchtitan/train.py",
    )


def _refusal(cell: Cell, failure: Mapping[str, Any]) -> Finding:
    """TorchTitan's own words, at the option that they name."""
    message = failure["error"]
    named = [
        name
        for name in cell.options.settings
        if name in message or name.rpartition(".")[2] in message
    ]
    place = f" (rank {failure['rank']}, {failure['place'] or failure['kind']})"
    file = failure["place"].rpartition(":")[0]
    return Finding(
        ERROR,
        "torchtitan",
        max(named, key=len) if named else "",
        f"TorchTitan {cell.options.stack.pins['torchtitan']} refuses it: {message}{place}",
        "",
        f"{_TRAINER}/{file}"
        if file.startswith("torchtitan/")
        else f"{_TRAINER}/torchtitan/train.py",
    )


def _warnings(built: Built) -> list[Finding]:
    texts = {text: None for view in built.views for text in view["warnings"]}
    return [
        Finding(
            WARNING,
            "torchtitan",
            "",
            f"TorchTitan warns: {text}",
            "",
            f"{_TRAINER}/torchtitan/train.py",
        )
        for text in texts
        if not text.startswith(_ROUTINE)
    ]


def _shortage(checked: CellCheck) -> Finding | None:
    peak, gpu = checked.peak, checked.cell.cluster.gpu
    if peak is None or gpu is None or checked.verdict == "fits":
        return None
    fits = checked.verdict == "tight"
    return Finding(
        WARNING if fits else ERROR,
        "memory",
        "",
        f"needs about {peak.total:.0f} GiB of a {gpu.name}'s {gpu.memory_gib:g} "
        f"(rank {peak.rank}, at {peak.moment}); most of it: "
        f"{peak.largest} ({peak.terms[peak.largest]:.0f} GiB)",
        _remedy(checked),
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
    )


def _remedy(checked: CellCheck) -> str:
    """What lowers the largest term."""
    assert checked.peak
    state = state_gib(checked.views[0])
    if checked.peak.largest in ("activations", "recomputed layer", "layer's temporaries"):
        mode = checked.cell.options["activation_checkpoint.mode"]
        more = "" if mode == "full" else "set activation_checkpoint.mode full, or "
        return f"{more}lower training.local_batch_size"
    if checked.peak.largest == "logits and loss":
        return "lower training.local_batch_size, or compile the loss"
    if checked.peak.largest in ("gathered parameters", "unreduced gradients"):
        return "spread the experts over more ranks (EP), or use fewer pipeline ranks"
    return f"use more GPUs: parameters, gradients and optimizer state alone take {state:.0f} GiB"
