"""Validate a cell against rules and this environment, for `submit.py` and the job.

The rules cover mistakes that TorchTitan finds only when the job runs, or never. Mistakes that it
finds while it builds the model are left to that build (`check/`).
"""

import importlib.util
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.base.text_files import check_sources
from cookbook.base.tokenizer import TokenizerFiles
from cookbook.config.cell import ATTENTION, WARNING, Cell, Finding, Problems, Rule, Verdict, rule
from cookbook.config.cluster import runs_here
from cookbook.config.validate import kernels, layout, values

_SET_UP, _FOLDER = "run: bash setup.sh", "set it to a folder that this machine sees"
# For each option that names a path: a file that must be in that folder (if any), and the remedy.
_PATHS = {
    "model.hf_assets_path": ("tokenizer.json", f"{_SET_UP}, or set it to a tokenizer's folder"),
    "training.dataset_path": ("", _FOLDER),
    "validation.dataset_path": ("", _FOLDER),
    "checkpoint.initial_load_path": ("", "set it to a checkpoint that this machine sees"),
    "job.config_file": ("", "set it to a file that this machine sees"),
}


def judge(cell: Cell, *, is_submitted: bool = False) -> Verdict:
    """Check a cell against the rules and this environment, without building the model."""
    rules = tuple(validation_errors(cell))
    here = () if any(one.is_input for one in rules) else tuple(missing_here(cell, is_submitted))
    return Verdict(rules, here)


def validation_errors(cell: Cell) -> list[Finding]:
    """Return the errors in the parallel layout or, if there are none, those of all other rules."""
    if problems := layout.layout_findings(cell.options, cell.world):
        return problems
    rules = (*values.RULES, *kernels.RULES, *layout.RULES)
    found = [finding for rule in rules for finding in rule(cell)]
    return sorted(found, key=lambda finding: not finding.is_input)


def wrong_value(cell: Cell, option: str) -> list[str] | None:
    """Return (reason, remedy) if the value of `option` is invalid in itself; None otherwise."""
    found = (*values.bounds(cell), *values.selected(cell))
    problems = [*layout.impossible(cell.options), *((f.option, f.reason, f.remedy) for f in found)]
    return next((words for name, *words in problems if name == option), None)


def missing_here(cell: Cell, is_submitted: bool = False) -> list[Finding]:
    """Return findings about packages and files that are missing here or do not suit the cell."""
    found = [finding for rule in HERE for finding in rule(cell)]
    if not found or is_submitted or runs_here(cell.cluster):
        return found
    words = f" (not an error: jobs on cluster {cell.cluster.name} run elsewhere)"
    return [replace(one, level=WARNING, reason=one.reason + words) for one in found]


# Rules about this machine. Paths are relative to the checkout, in which jobs run.
HERE: list[Rule] = []


@rule(HERE)
def files(cell: Cell) -> Problems:
    options = cell.options
    for name, (file, remedy) in _PATHS.items():
        value, section = options[name], name.partition(".")[0]
        is_off = section in ("checkpoint", "validation") and not options[f"{section}.enable"]
        if not value or is_off or (section == "checkpoint" and cell.resumes):
            continue
        path, shown = ROOT / value / file, Path(value) / file
        if not path.exists():
            unexpanded = "write the whole path: nothing is expanded"
            yield name, f"{shown} is not there", unexpanded if value[0] in "~$" else remedy
        elif name.endswith("dataset_path") and not path.is_dir():
            yield name, f"{shown} is a file, allowed: a folder", remedy
    for section, name in values.readers(cell).items():
        if options[f"{section}.dataset"] == values.TEXT and options[name]:
            workers = max(options[f"{section}.dataloader.num_workers"], 1)
            readers = cell.layout.dp_replicate * cell.layout.dp_shard * workers
            try:
                check_sources(options[name], options["data.text_key"], ROOT, readers)
            except InputError as error:
                place = "" if error.place == "data.files" else f"{error.place}: "
                yield name, f"{place}{error.found}", error.remedy


@rule(HERE)
def environment(cell: Cell) -> Problems:
    """Require that the virtual environment in VENV has a Python, because jobs run it."""
    if (venv := os.environ.get("VENV")) and not Path(venv, "bin/python").exists():
        yield "VENV", f"no Python at {venv}", "name a virtual environment, or unset VENV"


@rule(HERE)
def vocabulary(cell: Cell) -> Problems:
    """Refuse a tokenizer with tokens outside the model's, or that marks no end of a document."""
    path, model = cell.options["model.hf_assets_path"], cell.options.model
    folder, option = ROOT / (path or ""), "model.hf_assets_path"
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
    options = cell.options
    is_read = options["checkpoint.enable"] and options["checkpoint.initial_load_in_hf"]
    if cell.resumes or not is_read:
        return
    has_own = options["checkpoint.initial_load_path"]
    option = "checkpoint.initial_load_path" if has_own else "model.hf_assets_path"
    shown, folder = options[option], ROOT / options[option]
    index, files = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    if not files:
        if folder.is_dir():
            remedy = "download the weights there, or set checkpoint.initial_load_path"
            yield option, f"{shown} has no *.safetensors files", remedy
        return
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            found = {*names.values()}
            if missing := sorted(file for file in found if not (folder / file).is_file()):
                reason = f"{shown} lacks {len(missing)} of its files, {missing[0]} first"
                yield option, reason, "download the whole checkpoint"
                return
        else:
            names = {name: file.name for file in files for name in read_shapes(file)}
        quantized = any(name.endswith("weight_scale_inv") for name in names)
        is_said, family = "checkpoint.initial_load_in_hf_quantized", options.family
        what = f"{shown} is quantized in blocks of FP8"
        if quantized and family and not family.reads_quantized:
            reason = f"{what}, and TorchTitan dequantizes no weights of {family.title}"
            yield option, reason, "name a checkpoint in BF16"
        elif quantized and not options[is_said]:
            yield is_said, f"{what}, whose raw values would be trained on", "set it to true"
        if not quantized and options[is_said]:
            yield is_said, f"{shown} is not quantized", "set it to false"
        for reason, remedy in _unlike_model(cell, folder, names):
            yield option, f"{shown}{reason}", remedy
    except (ValueError, KeyError, OSError, struct.error) as error:
        reason = f"{shown} cannot be read ({type(error).__name__}: {error})"
        yield option, reason, "download the checkpoint again"


def _unlike_model(cell: Cell, folder: Path, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    family, model, title = cell.options.family, cell.options.model, cell.options.model_title
    if not family or not model:
        return
    layers = {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)", name))}
    flavor = "set model.flavor to the checkpoint's"
    if len(layers) not in (model.n_layers, model.n_layers + family.extra_layers):
        yield f" has {len(layers)} layers, {title} has {model.n_layers}", flavor
        return
    for name, dims in family.weights.items():
        if name not in names:
            yield f" has no {name}, which {title} needs", "name weights of this model"
            return
        shape = read_shapes(folder / names[name])[name]
        sizes = zip(dims, shape, strict=True)
        expected = [getattr(model, dim) if dim else size for dim, size in sizes]
        if shape != expected:
            yield f": {name} is {shape}, {title} has {expected}", flavor
            return


@rule(HERE)
def packages(cell: Cell) -> Problems:
    """Required packages must be installed, unless the job's container has its own packages."""
    if cell.cluster.container is not None:
        return
    needed = {*cell.precision.needs.packages, *cell.ep_backend.needs.packages}
    if missing := sorted(name for name in needed if importlib.util.find_spec(name) is None):
        # A login node has no GPU by which setup.sh would know what to build for.
        arch = f" --arch {cell.cluster.gpu.compute_capability:.1f}" if cell.cluster.gpu else ""
        yield "", f"not installed: {', '.join(missing)}", f"{_SET_UP}{arch}"
    # Look for the folder: find_spec("flash_attn.cute") would import FlashAttention-2, its parent.
    outer = importlib.util.find_spec("flash_attn") if cell.uses_flash_attention else None
    folders = (outer and outer.submodule_search_locations) or ()
    is_here = any(Path(folder, "cute").is_dir() for folder in folders)
    if cell.uses_flash_attention and not (is_here or cell.attends_by_reference):
        reason = "FlashAttention-4 (flash-attn-4) is not installed"
        yield ATTENTION, reason, f"{_SET_UP}, or set {ATTENTION}=flavor"


def read_shapes(file: Path) -> dict[str, list[int]]:
    """Return a safetensors file's tensor shapes; raise ValueError or struct.error if invalid."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100 * 2**20:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(length))
    return {name: one["shape"] for name, one in header.items() if name != "__metadata__"}
