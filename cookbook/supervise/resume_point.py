"""Choose the checkpoint a cell resumes from: the newest complete one; move damaged ones aside.

TorchTitan loads the newest `step-N` that has `.metadata`, and every rank fails if one of its data
files is truncated. So a damaged checkpoint is moved to another folder as a whole.
"""

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.files import json_text, write_whole
from cookbook.base.paths import ROOT
from cookbook.base.text_files import find_sources
from cookbook.base.text_identity import Identity, check_same, files_in, identify, identify_sources
from cookbook.base.yamlfile import shown_path
from cookbook.config.asked import asks_same
from cookbook.config.dialect.names import FILES, OVERRIDES, POSITION, options_that
from cookbook.config.facts import TEXT, Facts, facts_of
from cookbook.config.options import Options, options_of
from cookbook.observe.metrics import has_saved
from cookbook.run import status
from cookbook.run.folder import PARTS, Attempt, CellFolder, Checkpoint, read_checkpoint, saved_steps
from cookbook.run.own_job import log
from cookbook.run.record import CellRecord, attempt_records, earlier_record, read_record

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_WEIGHTS = ("*.safetensors", "*.distcp", ".metadata")


@dataclass(frozen=True)
class Found:
    """The checkpoint that a cell loads (None if there is none), and the newer, unfit ones."""

    checkpoint: Checkpoint | None
    damaged: tuple[Checkpoint, ...] = ()
    excluded: Sequence[str] = ()  # the parts of `checkpoint` that are not loaded


def find_checkpoint(folder: CellFolder, record: CellRecord) -> Found:
    """Return the checkpoint to load, and the newer checkpoints that must be skipped."""
    facts, options = facts_of(record), options_of(record)
    wanted, place = facts.load_step, folder.checkpoints(record.options)
    if not facts.checkpoints:
        return Found(None)
    saved, damaged = saved_steps(place), list[Checkpoint]()
    if wanted != -1:
        later = f"is later than {Facts.load_step}={wanted}"
        damaged = [Checkpoint(path, step, later) for step, path in saved if step > wanted]
        saved = [one for one in saved if one[0] == wanted]
    good, why = last_good_step(folder, saved)
    for step, path in saved:
        checkpoint = read_checkpoint(step, path)
        if good is not None and step > good and checkpoint.damage is None:
            checkpoint = replace(checkpoint, damage=why)
        if checkpoint.damage is None:
            newest = earlier_record(folder) or record
            saver, number, texts = saver_of(folder, step, newest)
            # `exclude_from_loading` is meant for the first load only. If an attempt with the same
            # options saved this checkpoint, that load is over: load all of the checkpoint.
            is_same = saver is not None and asks_same(saver, record, (Facts.is_wandb_on,))
            excluded = [] if is_same else facts.load_excluded
            before = options_of(saver or newest)
            _check_model(options, before)
            _check_states(checkpoint, saved, excluded)
            if step and "train_state" in excluded:
                found = f"leaves out train_state, so steps would count from 1 beside {path.name}"
                remedy = f"start a new run with {Facts.initial_load_path}={path.resolve()}"
                raise InputError(Facts.load_excluded, found, remedy)
            if step and "dataloader" not in excluded:
                _check_texts(checkpoint, options, before, record.world, texts)
            remedy = "move its folder away, and an older checkpoint is taken"
            _check_weights(folder, Facts.checkpoint_folder, path, remedy, path.name, number)
            return Found(checkpoint, tuple(damaged), excluded)
        damaged.append(checkpoint)
    if wanted != -1:
        remedy = f"leave {Facts.load_step} out, and the newest whole checkpoint is taken"
        found = str(damaged[-1].damage if saved else "is not there")
        raise InputError(f"{Facts.load_step}: step-{wanted}", found, remedy)
    unfit = {one.path for one in damaged}
    own = sorted(path.name for path in place.glob("*") if path not in unfit)
    if own and (facts.initial_load_path or facts.initial_load_in_hf):
        found = f"holds {own[0]}, for which TorchTitan would ignore {Facts.initial_load_path}"
        raise InputError(shown_path(place), found, "move it out of this folder")
    if not damaged:
        _refuse_lost(folder, place, facts.async_mode != "disabled")
    if weights := _weights(facts):
        _check_weights(folder, Facts.initial_load_path, weights, "start a new run")
    return Found(None, tuple(damaged), facts.load_excluded)


def _refuse_lost(folder: CellFolder, place: Path, is_async: bool) -> None:
    """Refuse to begin anew where this cell has saved a checkpoint, and none is in sight."""
    attempts = folder.attempts()
    resumed = {one.attempt: one for one in status.read_resumptions(attempts)}
    for attempt in reversed(attempts):
        start = resumed.get(attempt.number)
        if has_saved(attempt, is_async) or (start and start.step is not None):
            found = f"holds no checkpoint, and attempt {attempt.number} had or saved one"
            another = shown_path(folder.path.parent.with_name("another") / folder.name)
            remedy = (
                f"mount its disk, move it back, or leave {Facts.checkpoint_folder} as it was; to "
                f"start at step 1, a run of its own: CELL_DIR={another}"
            )
            raise InputError(shown_path(place), found, remedy)
        if start:  # it began anew, as none was whole
            return


def saver_of(
    folder: CellFolder, step: int, newest: CellRecord
) -> tuple[CellRecord | None, int, Identity | None]:
    """Return the attempt that saved `step`, the last to start before it: record, number, texts."""
    attempts, records = folder.attempts(), attempt_records(folder, newest)
    starts = {one.attempt: one.step or 0 for one in status.read_resumptions(attempts)}
    for one in reversed(attempts):
        if one.metrics.exists() and starts.get(one.number, 0) < step:
            known = json.loads(one.texts.read_bytes()) if one.texts.exists() else None
            return records[one.number], one.number, known
    return None, 0, None


def last_good_step(folder: CellFolder, saved: list[tuple[int, Path]]) -> tuple[int | None, str]:
    """Return the last step before a NaN and why later checkpoints are unfit; None without NaN."""
    newest = folder.attempts()[-1:]
    end = next(iter(status.read_history(newest)), None)
    if end is None or end.cause is not status.Cause.NAN_LOSS:
        return None, ""
    if (good := end.last_good_step) is not None:
        return good, f"was saved after step {good}, the last one with a finite loss and gradient"
    # The checkpoint that this attempt loaded may contain the NaN, so go back to an older one. If
    # there is none, load the same one again: that is better than losing the whole run.
    resumed = next(status.read_resumptions(newest), None)
    loaded = (resumed and resumed.step) or 0
    older = (s for s, one in saved if 0 < s < loaded and read_checkpoint(s, one).damage is None)
    why = f"attempt {end.attempt} had no finite loss and gradient after step {loaded}"
    return next(older, loaded), why


def _check_model(options: Options, before: Options) -> None:
    # PyTorch would load what the two models have in common, and say nothing.
    sizes = sorted({*options.overrides, *before.overrides})
    for option in (Facts.model_name, Facts.flavor, *(f"{OVERRIDES}{size}" for size in sizes)):
        if options[option] != (saved := before[option]):
            shown = "the flavor as it is" if saved is None else saved
            found = f"found {options[option]}, and the checkpoint is of {shown}"
            remedy = "leave it out" if option in options else f"set it to {saved}"
            raise InputError(option, found, f"{remedy}, or start a new run")


def _check_states(
    checkpoint: Checkpoint, saved: list[tuple[int, Path]], excluded: Sequence[str]
) -> None:
    missing = [s for s in PARTS if s not in checkpoint.states.union(excluded)]
    # From a seed checkpoint (step 0), TorchTitan loads only the model.
    if not checkpoint.is_exported and (checkpoint.step == 0 or not missing):
        return
    path = checkpoint.path
    older = (read_checkpoint(step, one) for step, one in saved if step < checkpoint.step)
    full = next((one for one in older if not one.damage and one.states == set(PARTS)), None)
    holds = f"the model without {', '.join(missing)} (checkpoint.last_save_model_only)"
    weights = f"checkpoint.initial_load_path={path.resolve()}"
    if checkpoint.is_exported:
        holds = "safetensors files (checkpoint.last_save_in_hf)"
        weights += " checkpoint.initial_load_in_hf=true"
    if full is None:
        remedy = f"start a new run from its weights with {weights}"
    else:
        kept = path.parent.parent / f"model-{path.name}"
        command = f"mv {shown_path(path)} {shown_path(kept)}"
        remedy = f"to continue after step {full.step}, move it away: {command}"
    found = f"holds {holds}, so training cannot continue from it"
    raise InputError(shown_path(path), found, remedy)


def _check_texts(
    checkpoint: Checkpoint, options: Options, before: Options, world: int, texts: Identity | None
) -> None:
    anew = f"read the texts from the start with {Facts.load_excluded}=dataloader"
    layout, readers = Facts(options, world).layout, checkpoint.text_readers
    ranks = layout.dp_replicate * layout.dp_shard
    if readers != ranks:
        raise InputError(
            shown_path(checkpoint.path),
            f"{readers} data-parallel ranks read the texts, and now there are {ranks}; "
            "TorchTitan cannot reshard the data loader's state",
            f"keep {readers} data-parallel ranks (more ranks can go to TP or PP), or {anew}",
        )
    # Where it is recorded what was in the files, they may have moved.
    is_known = texts is not None and Facts.assets in texts
    for option in chain(options_that(POSITION), () if is_known else options_that(FILES)):
        if options[option] != before[option]:
            found = "differs from the checkpoint's, so the run would lose its position in the texts"
            raise InputError(option, found, f"leave it out, or {anew}")
    if texts and (now := _identify(Facts(options, world))):
        check_same(now, texts, anew)


def _weights(facts: Facts) -> Path | None:
    """Return the folder of the weights that a new run starts from."""
    is_on = facts.checkpoints and (facts.initial_load_path or facts.initial_load_in_hf)
    return ROOT / (facts.initial_load_path or facts.assets or "") if is_on else None


def _content(folder: Path, use: str = "") -> list[list[str]]:
    files = (file for pattern in _WEIGHTS for file in sorted(folder.glob(pattern)))
    return identify(filter(Path.is_file, files), use)


def _check_weights(
    folder: CellFolder, option: str, path: Path, remedy: str, use: str = "", first: int = 0
) -> None:
    """Refuse files in `path` that are not those which an attempt from `first` on recorded."""
    for attempt in reversed([one for one in folder.attempts() if one.number >= first]):
        known = json.loads(attempt.texts.read_bytes()) if attempt.texts.exists() else {}
        if own := [entry for entry in known.get(option, ()) if entry[1] == use]:
            check_same({option: _content(path, use)}, {option: own}, remedy)
            return


def note_saved(folder: CellFolder, attempt: Attempt) -> None:
    """Record what is in the attempt's whole checkpoints, for the resume that will load one.

    The one that it loaded is among them: who saved it may have been killed before recording it.
    """
    with contextlib.suppress(InputError, OSError, ValueError):
        start = next(status.read_resumptions([attempt]), None)
        saved = saved_steps(folder.checkpoints(read_record(folder.record).options))
        own = [path for step, path in saved if step >= ((start and start.step) or 0)]
        known = json.loads(attempt.texts.read_bytes()) if attempt.texts.exists() else {}
        # Not added to: the end of an attempt may be noted twice.
        whole = [path for path in own if not read_checkpoint(0, path).damage]
        known[Facts.checkpoint_folder] = [
            entry for path in whole for entry in _content(path, path.name)
        ]
        write_whole(attempt.texts, json_text(known))


def _identify(facts: Facts) -> Identity | None:
    """Return what is in the training texts and the tokenizer; None if they cannot be read now.

    The rules refuse such texts where a job starts. A hub that does not answer in the middle of a
    job ends no attempt.
    """
    named = [ROOT / (facts.assets or "") / name for name in _TOKENIZER]
    with contextlib.suppress(InputError, OSError):
        found = {Facts.assets: identify(file for file in named if file.is_file())}
        if facts.dataset == TEXT:
            sources = find_sources(facts.text_files, facts.text_key, ROOT)
            found[Facts.text_files] = identify_sources(sources)
        elif facts.dataset_path:
            found[Facts.dataset_path] = identify(files_in(ROOT / facts.dataset_path))
        return found
    return None


def prepare(folder: CellFolder, attempt: Attempt, record: CellRecord) -> dict[str, Any]:
    """Move damaged checkpoints aside, and those later than a requested step; record the resume.

    Return the options that tell TorchTitan what to load; they win over those of the record.
    """
    found, facts = find_checkpoint(folder, record), facts_of(record)
    # The folder may be a link to another disk: move checkpoints there, not to this one.
    saved, steps = folder.checkpoints(record.options).resolve(), facts.steps
    attempt.path.mkdir(parents=True, exist_ok=True)
    # Move damaged checkpoints out of this folder. If one were only renamed, to `step-N-damaged`,
    # TorchTitan could still find `step-N` in its name, and try to load the folder `step-N`.
    aside, passed = saved.with_name(f"{saved.name}-damaged"), []
    for one in found.damaged:
        aside.mkdir(parents=True, exist_ok=True)
        name, target, number = one.path.name, aside / one.path.name, 1
        while target.exists():
            number += 1
            target = aside / f"{name}-{number}"
        one.path.rename(target)
        passed.append(status.PassedOver(name, str(one.damage), str(target)))
    if facts.load_step != -1:
        # Roll back in this attempt only: later attempts load the newest checkpoint again.
        record.options[Facts.load_step] = -1
        record.write(folder.record)
    if facts.checkpoints and not facts.load_only:
        # The first save is hours away.
        try:
            saved.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=saved).close()
        except OSError as error:
            if error.errno in status.DISK_FULL:
                raise
            why = f"{saved} cannot be written to: {error.strerror}"
            raise InputError(Facts.checkpoint_folder, why, "name another") from None
    # TorchTitan reads `initial_load_path` only if the checkpoint folder does not exist.
    if saved.is_dir() and not any(saved.iterdir()):
        saved.rmdir()
    step = found.checkpoint.step if found.checkpoint else None
    resumption = status.Resumption(attempt.number, step, tuple(passed))
    if step is not None and step >= steps:
        another = shown_path(folder.path.parent.with_name("another") / folder.name)
        log(
            f"all {steps} steps are done, so nothing is left to train; for more: "
            f"--training.steps={2 * steps}; for a run of its own: CELL_DIR={another}"
        )
    # A full disk is the attempt's own matter.
    with contextlib.suppress(OSError):
        known = {**(_identify(facts) or {})}
        if found.checkpoint:
            path = found.checkpoint.path
            known[Facts.checkpoint_folder] = _content(path, path.name)
        elif weights := _weights(facts):
            known[Facts.initial_load_path] = _content(weights)
        write_whole(attempt.texts, json_text(known))
    if resumption.lines:
        status.write_json(attempt.resumption, resumption)
        for line in resumption.lines:
            log(line, attempt)
    return {
        Facts.load_step: -1 if step is None else step,
        Facts.load_excluded: list(found.excluded),
        Facts.checkpoint_folder: str(saved),
    }
