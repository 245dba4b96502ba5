"""Where a cell continues: at its newest whole checkpoint, with damaged ones moved aside.

TorchTitan takes the newest `step-N` that has `.metadata`, and every rank fails where a data file of
it is cut. It also counts damaged ones among the `keep_latest_k` that it keeps, and it would save
over them file by file, with the old `.metadata` in place all the while. So they are moved out of
its way, whole, to a folder beside its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import shown_path
from cookbook.config.cell import Cell
from cookbook.run.attempts import Cause, PassedOver, Resumption, read_attempt_end, write_resumption
from cookbook.run.checkpoints import STATES, Checkpoint, read_checkpoint, saved_steps
from cookbook.run.folder import Attempt, CellFolder

_LOAD_STEP = "checkpoint.load_step"
_EXCLUDED = "checkpoint.exclude_from_loading"


@dataclass(frozen=True)
class Found:
    """The checkpoint that a cell loads, None for none, and the newer ones that are damaged."""

    checkpoint: Checkpoint | None
    damaged: tuple[Checkpoint, ...] = ()


def find_checkpoint(folder: CellFolder, cell: Cell) -> Found:
    """The checkpoint that TorchTitan is to load; nothing is moved.

    Raises:
        InputError: training cannot continue from it.
    """
    if not cell.options["checkpoint.enable"]:
        return Found(None)
    wanted = cell.options[_LOAD_STEP]
    saved = saved_steps(checkpoint_folder(folder, cell))
    if wanted != -1:
        saved = [(step, path) for step, path in saved if step == wanted]
    damaged: list[Checkpoint] = []
    good = _last_good_step(folder)
    for step, path in saved:
        checkpoint = read_checkpoint(step, path)
        if good is not None and step > good and checkpoint.damage is None:
            damage = f"was saved after step {good}, the last one with a finite loss and gradient"
            checkpoint = replace(checkpoint, damage=damage)
        if checkpoint.damage is None:
            _refuse_what_cannot_continue(checkpoint, saved, cell)
            return Found(checkpoint, tuple(damaged))
        damaged.append(checkpoint)
    # TorchTitan reads `load_step` only where the folder is there.
    if wanted != -1 and (damaged or checkpoint_folder(folder, cell).is_dir()):
        reason = damaged[0].damage if damaged else "is not there"
        raise InputError(
            f"{_LOAD_STEP}: step-{wanted}",
            str(reason),
            f"leave {_LOAD_STEP} out, and the newest whole checkpoint is taken",
        )
    return Found(None, tuple(damaged))


def _last_good_step(folder: CellFolder) -> int | None:
    """The last step before the loss became NaN in the newest attempt; None where it did not."""
    attempts = folder.attempts()
    end = read_attempt_end(attempts[-1]) if attempts else None
    if end is None or end.cause is not Cause.NAN_LOSS:
        return None
    return end.last_good_step or 0


def checkpoint_folder(folder: CellFolder, cell: Cell) -> Path:
    """Where TorchTitan saves the cell's checkpoints."""
    return folder.path / str(cell.options["checkpoint.folder"])


def _refuse_what_cannot_continue(
    checkpoint: Checkpoint, saved: list[tuple[int, Path]], cell: Cell
) -> None:
    # TorchTitan loads the model alone from step 0, which is a seed.
    if checkpoint.step == 0:
        return
    excluded = set(cell.options[_EXCLUDED])
    missing = [state for state in STATES if state not in checkpoint.states | excluded]
    place = shown_path(checkpoint.path)
    if missing:
        raise InputError(
            place,
            f"holds the model without {', '.join(missing)} (checkpoint.last_save_model_only), so "
            "training cannot continue from it",
            _way_around(checkpoint, saved),
        )
    layout = cell.layout
    readers, ranks = checkpoint.text_readers, layout.dp_replicate * layout.dp_shard
    if readers != ranks and "dataloader" not in excluded:
        raise InputError(
            place,
            f"{readers} data-parallel ranks read the texts, and now there are {ranks}; TorchTitan "
            "cannot divide their places in the texts anew",
            f"keep {readers} data-parallel ranks (more ranks can go to TP or PP), or let the texts "
            f"start anew with {_EXCLUDED}=dataloader",
        )


def _way_around(checkpoint: Checkpoint, saved: list[tuple[int, Path]]) -> str:
    older = (read_checkpoint(step, path) for step, path in saved if step < checkpoint.step)
    full = next((one for one in older if not one.damage and one.states == set(STATES)), None)
    if full is None:
        return (
            "start a new run from its weights with "
            f"checkpoint.initial_load_path={checkpoint.path.resolve()}"
        )
    kept = checkpoint.path.parent.parent / f"model-{checkpoint.path.name}"
    return (
        f"to continue after step {full.step}, move it away: "
        f"mv {shown_path(checkpoint.path)} {shown_path(kept)}"
    )


def prepare(folder: CellFolder, attempt: Attempt, cell: Cell, found: Found) -> None:
    """Move the damaged checkpoints aside, and say in log and folder where the attempt continues."""
    saved = checkpoint_folder(folder, cell)
    passed = tuple(_move_aside(one, saved) for one in found.damaged)
    # TorchTitan has `initial_load_path` only where there is no folder.
    if passed and not any(saved.iterdir()):
        saved.rmdir()
    step = found.checkpoint.step if found.checkpoint else None
    resumption = Resumption(attempt.number, step, passed)
    if step is not None and step >= cell.steps:
        print(
            f"cookbook: all {cell.steps} steps were made before, so nothing is left to do; "
            f"for more: --training.steps={2 * cell.steps}; for a run of its own: "
            f"CELL_DIR={shown_path(folder.path.parent.with_name('another') / folder.name)}",
            file=sys.stderr,
        )
    if not resumption.lines:
        return
    write_resumption(attempt, resumption)
    with attempt.log.open("a", encoding="utf-8") as log:
        for line in resumption.lines:
            for stream in (log, sys.stderr):
                print(f"cookbook: {line}", file=stream)


def _move_aside(checkpoint: Checkpoint, saved: Path) -> PassedOver:
    # Not in the checkpoints' folder: TorchTitan takes every name with `step-N` in it for one.
    aside = saved.with_name(f"{saved.name}-damaged")
    aside.mkdir(parents=True, exist_ok=True)
    target = next(path for path in _names(aside / checkpoint.path.name) if not path.exists())
    checkpoint.path.rename(target)
    return PassedOver(checkpoint.path.name, str(checkpoint.damage), str(target))


def _names(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1
