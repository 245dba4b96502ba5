"""Validate a cell against rules and this environment, for `submit.py` and the job.

The rules cover mistakes that TorchTitan finds only when the job runs, or never. Mistakes that it
finds while it builds the model are left to that build (`check/`).
"""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.base.text_files import SUFFIXES, TextFile, check_sources
from cookbook.base.text_identity import files_in
from cookbook.base.tokenizer import TokenizerFiles
from cookbook.config.cell import WARNING, Cell, CellRule, Finding, Problems, Verdict, rule
from cookbook.config.cluster import runs_here
from cookbook.config.facts import TEXT, Facts
from cookbook.config.validate import kernels, layout, values
from cookbook.config.validate.weights import native_weights, published_weights

_FOLDER_BYTES = 32 * 2**20


def _set_up(cell: Cell) -> str:
    """Return the command that cures; a login node has no GPU that says what to build for."""
    gpu = cell.cluster.gpu
    return "run: bash setup.sh" + (f" --arch {gpu.compute_capability:.1f}" if gpu else "")


def judge(cell: Cell) -> Verdict:
    """Check a cell against the rules and this environment, without building the model."""
    rules = tuple(validation_errors(cell))
    here = () if any(one.is_input for one in rules) else tuple(missing_here(cell))
    return Verdict(rules, here)


def validation_errors(cell: Cell) -> list[Finding]:
    """Return refused options and layouts or, if there are none, the errors of all other rules."""
    if problems := [*values.refused_options(cell), *layout.layout_findings(cell.facts)]:
        return problems
    rules = (*values.RULES, *kernels.RULES, *layout.RULES)
    found = [finding for rule in rules for finding in rule(cell)]
    return sorted(found, key=lambda finding: not finding.is_input)


def wrong_value(cell: Cell, option: str) -> list[str] | None:
    """Return (reason, remedy) if the value of `option` is invalid in itself; None otherwise."""
    found = (*values.bounds(cell), *values.selected(cell))
    problems = [*layout.impossible(cell.facts), *((f.option, f.reason, f.remedy) for f in found)]
    return next((words for name, *words in problems if name == option), None)


def missing_here(cell: Cell) -> list[Finding]:
    """Return findings about packages and files that are missing here or do not suit the cell."""
    found = [finding for rule in HERE for finding in rule(cell)]
    if not found or runs_here(cell.cluster):
        return found
    where = f"this machine has no Slurm, so jobs on {cell.cluster.name} run elsewhere"
    words = f" (not an error: {where})"
    return [replace(one, level=WARNING, reason=one.reason + words) for one in found]


def may_read_texts(facts: Facts) -> bool:
    """Whether tokenizer and texts are on this machine, and their first batch costs little."""
    readers = facts.readers
    is_local = all(one.path or "hub:" not in "".join(one.files or ["hub:"]) for one in readers)
    # `datasets` converts a whole folder before it reads the first text.
    folders = [ROOT / one.path for one in readers if one.path and not one.files]
    size = sum(file.stat().st_size for folder in folders for file in files_in(folder))
    is_here = (ROOT / (facts.assets or "") / "tokenizer.json").is_file()
    return is_local and size <= _FOLDER_BYTES and is_here


# Rules about this machine. Paths are relative to the checkout, in which jobs run.
HERE: list[CellRule] = []


@rule(HERE)
def files(cell: Cell) -> Problems:
    facts, a_folder = cell.facts, "set it to a folder that this machine sees"
    validation = facts.validation_path if facts.validates else None
    loaded = facts.initial_load_path if facts.checkpoints and not cell.resumes else None
    tokenizer = f"{_set_up(cell)}, or set it to a tokenizer's folder"
    for option, value, remedy in (
        (Facts.assets, facts.assets, tokenizer),
        (Facts.dataset_path, facts.dataset_path, a_folder),
        (Facts.validation_path, validation, a_folder),
        (Facts.initial_load_path, loaded, "set it to a checkpoint that this machine sees"),
    ):
        file = "tokenizer.json" if option == Facts.assets else ""
        if not value:
            if file:
                yield option, "names no folder", remedy
            continue
        path, shown = ROOT / value / file, Path(value) / file
        if not path.exists():
            unexpanded = "write the whole path: nothing is expanded"
            yield option, f"{shown} is not there", unexpanded if value[0] in "~$" else remedy
        elif remedy == a_folder and not path.is_dir():
            yield option, f"{shown} is a file, allowed: a folder", remedy
    saved = Path(facts.checkpoint_folder)
    above = next((one for one in (saved, *saved.parents) if one.exists()), Path("/"))
    # Where nothing but the root is there, the disk may be one that only nodes mount.
    is_judged = facts.checkpoints and saved.is_absolute() and above != Path("/")
    if is_judged and not (above.is_dir() and os.access(above, os.W_OK)):
        why = "cannot be written to" if above.is_dir() else "is no folder"
        yield Facts.checkpoint_folder, f"{above} {why}", "name a folder that may be written"
    for reader in facts.readers:
        is_own, folder = reader.dataset == TEXT, ROOT / (reader.path or "")
        patterns, key = (reader.files, facts.text_key) if is_own else ([], "text")
        if reader.dataset == "c4_test" and reader.path and folder.is_dir():
            inside = [file.name for file in folder.iterdir()]
            known = [TextFile(Path(name), key) for name in inside if name.endswith(SUFFIXES)]
            # `datasets` reads more kinds of files, and folders, which are not judged; of a .txt
            # file each line is a document.
            if not inside or (known and not any(file.is_plain for file in known)):
                patterns = [reader.path]
        if patterns:
            count = facts.layout.replicas * max(reader.workers, 1)
            option = reader.options[1 if is_own else 2]
            try:
                check_sources(patterns, key, ROOT, count)
            except InputError as error:
                place = "" if error.place == Facts.text_files else f"{error.place}: "
                yield option, f"{place}{error.found}", error.remedy


@rule(HERE)
def environment(cell: Cell) -> Problems:
    """Require that the virtual environment in VENV has a Python, because jobs run it."""
    if (venv := os.environ.get("VENV")) and not Path(venv, "bin/python").exists():
        yield "VENV", f"no Python at {venv}", "name a virtual environment, or unset VENV"


@rule(HERE)
def vocabulary(cell: Cell) -> Problems:
    """Refuse a tokenizer with tokens outside the model's, or that marks no end of a document."""
    path, model, option = cell.facts.assets, cell.options.model, Facts.assets
    folder = ROOT / (path or "")
    if model is None or not (folder / "tokenizer.json").is_file():
        return
    try:
        found = TokenizerFiles.read(folder)
        largest, bos, eos = found.largest, found.named("bos"), found.named("eos")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        reason = f"{path} cannot be read ({type(error).__name__}: {error})"
        yield option, reason, "download the tokenizer again"
        return
    if largest >= model.vocab:
        title, last = cell.options.model_title, model.vocab - 1
        reason = f"{path} has tokens up to {largest}, {title} takes tokens up to {last}"
        yield option, reason, "use the model's own tokenizer, or a larger flavor"
    file, unmarked = "tokenizer_config.json", "so that nothing would mark the end of a document"
    if found.config is None:
        yield option, f"{path} has no {file}, {unmarked}", "add the one of the same tokenizer"
    elif not (eos and isinstance(eos, str)):
        yield option, f"{path}/{file} names no eos_token, {unmarked}", "name one there"
    elif eos == bos:
        reason = f"BOS and EOS are both {eos!r}, and TorchTitan would put it before documents only"
        yield option, f"{path}/{file}: {reason}", "remove bos_token from that file"
    for state in ("truncation", "padding"):
        if found.content.get(state):
            reason = f"{path}/tokenizer.json stores {state}, which would change every document"
            yield option, reason, f'write "{state}": null there'


@rule(HERE)
def weights(cell: Cell) -> Problems:
    facts = cell.facts
    if cell.resumes or not facts.checkpoints:
        return
    if facts.initial_load_in_hf:
        yield from published_weights(cell)
    elif facts.initial_load_path:
        yield from native_weights(cell)


@rule(HERE)
def packages(cell: Cell) -> Problems:
    """Required packages must be installed, unless the job's container has its own packages."""
    if cell.cluster.container is not None:
        return
    needed = {*cell.precision.needs.packages, *cell.ep_backend.needs.packages}
    if missing := sorted(name for name in needed if importlib.util.find_spec(name) is None):
        yield "", f"not installed: {', '.join(missing)}", _set_up(cell)
    # Look for the folder: find_spec("flash_attn.cute") would import FlashAttention-2, its parent.
    outer = importlib.util.find_spec("flash_attn") if cell.facts.uses_flash_attention else None
    folders = (outer and outer.submodule_search_locations) or ()
    is_here = any(Path(folder, "cute").is_dir() for folder in folders)
    if cell.facts.uses_flash_attention and not (is_here or cell.attends_by_reference):
        reason = "FlashAttention-4 (flash-attn-4) is not installed"
        yield Facts.attention, reason, f"{_set_up(cell)}, or set {Facts.attention}=flavor"
