"""A verdict on cells: the rules, what TorchTitan builds, memory and work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.check.build import Built, build_cells
from cookbook.check.warnings import ADVICE, BUILT_ADVICE
from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, WARNING, Finding, Rule, Verdict
from cookbook.config.validate import judge
from cookbook.predict.memory import StageMemory, predict_memory, state_gib, verdict
from cookbook.predict.step import StepTime, predict_step
from cookbook.predict.traffic import Work, count_work

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
    judged: Verdict
    advice: tuple[Finding, ...] = ()
    stages: tuple[StageMemory, ...] = ()
    views: tuple[Mapping[str, Any], ...] = ()
    work: Work | None = None
    built: Built | None = None
    step: StepTime | None = None
    no_step: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What refuses the cell, then what else there is to say."""
        return (*self.judged.findings, *self.advice)

    @property
    def may_run(self) -> bool:
        """Whether nothing refuses the cell."""
        return not self.judged.errors

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
        if self.judged.refused:
            return self.judged.refused
        if self.peak is None:
            return "by the rules; TorchTitan did not build it"
        words = f"needs {self.peak.total:.0f} GiB a GPU"
        gpu = self.cell.cluster.gpu
        return f"{self.verdict}: {words} of {gpu.memory_gib:.0f}" if gpu else words


def check_cells(
    cells: Sequence[Cell], *, build: bool = True, is_submitted: bool = False
) -> list[CellCheck]:
    """Check every cell; without `build`, what is known at once.

    A cell that the rules refuse is not built; one that only lacks something here is.
    """
    judged = [judge(cell, is_submitted=is_submitted) for cell in cells]
    # A layout that does not divide would get advice about something else.
    checks = [
        CellCheck(cell, verdict, () if _is_wrong(verdict) else _advice(ADVICE, cell))
        for cell, verdict in zip(cells, judged, strict=True)
    ]
    wanted = [one.cell for one in checks if build and not one.judged.rules]
    built = {
        cell.name: found
        for cell, found in zip(wanted, build_cells(wanted) if wanted else (), strict=True)
    }
    return [
        _with_build(one, built[one.cell.name]) if one.cell.name in built else one for one in checks
    ]


def _is_wrong(verdict: Verdict) -> bool:
    return any(finding.is_input for finding in verdict.rules)


def _advice(rules: Sequence[Rule], *known: Any) -> tuple[Finding, ...]:
    return tuple(finding for rule in rules for finding in rule(*known))


def _with_build(check: CellCheck, built: Built) -> CellCheck:
    cell = check.cell
    if built.unavailable:
        return replace(check, advice=(*check.advice, _not_tried(built.unavailable)), built=built)
    if built.failure is not None:
        judged = replace(check.judged, built=(_refusal(cell, built.failure),))
        return replace(check, judged=judged, built=built)
    check = replace(
        check,
        views=built.views,
        built=built,
        stages=tuple(predict_memory(cell, view) for view in built.views),
        work=count_work(cell, built.views),
    )
    try:
        check = replace(check, step=predict_step(cell, built.views))
    except InputError as error:
        check = replace(check, no_step=str(error))
    found = (*_shortage(check), *_warnings(built), *_advice(BUILT_ADVICE, cell, built.views))
    errors = tuple(finding for finding in found if finding.level == ERROR)
    others = tuple(finding for finding in found if finding.level != ERROR)
    judged = replace(check.judged, built=errors)
    return replace(check, judged=judged, advice=(*check.advice, *others))


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


def _shortage(checked: CellCheck) -> Iterator[Finding]:
    peak, gpu = checked.peak, checked.cell.cluster.gpu
    if peak is None or gpu is None or checked.verdict == "fits":
        return
    fits = checked.verdict == "tight"
    yield Finding(
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
