"""Rules for weights that come in and go out, own texts, validation and checkpoints' places."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.family import Model
from cookbook.base.paths import ROOT
from cookbook.base.text_files import check_sources
from cookbook.config.cell import ERROR, Cell, Finding, Problems, Rule, rule
from cookbook.config.stack import TORCHTITAN

RULES: list[Rule] = []
TEXT = "text"
_CHECKPOINT = f"{TORCHTITAN}/components/checkpoint.py"
_VALIDATE = f"{TORCHTITAN}/components/validate.py"
# Rank 0 writes them as one file, under the timeout of a collective.
_LARGEST_HF_SAVE_GB = 60


@rule(RULES, reference=_VALIDATE, is_input=True)
def validation(cell: Cell) -> Problems:
    """A validation is some batches of training's shape, the same ones each time."""
    options = cell.options
    if not options["validation.enable"]:
        return
    if options["validation.steps"] < 1:
        reason = f"found {options['validation.steps']}, allowed: 1 and up batches a validation"
        yield "validation.steps", reason, "try 10"
    if options["validation.freq"] < 1:
        yield "validation.freq", f"found {options['validation.freq']}, allowed: 1 and up", "try 100"
    for name in ("seq_len", "local_batch_size"):
        asked, training = f"validation.{name}", options[f"training.{name}"]
        if asked in options.settings and options[asked] != training:
            reason = f"found {options[asked]}, and validation runs with training's {training}"
            yield asked, reason, "leave it out"


@rule(RULES, is_input=True)
def texts(cell: Cell) -> Problems:
    """`data.files` and `training.dataset=text` go together, and so for validation."""
    options = cell.options
    for section, files in (("training", "data.files"), ("validation", "data.validation_files")):
        if section == "validation" and not options["validation.enable"]:
            continue
        is_text = options[f"{section}.dataset"] == TEXT
        if is_text and not options[files]:
            remedy = f"set {files} to globs or folders of .jsonl, .json.gz or .parquet files"
            yield files, f"is empty, and {section}.dataset is text", remedy
        if options[files] and not is_text:
            found = options[f"{section}.dataset"]
            yield files, f"is set, and {section}.dataset is {found}", f"set {section}.dataset: text"


@rule(RULES, reference=f"{TORCHTITAN}/models/moe/moe.py", is_input=True)
def routing(cell: Cell) -> Problems:
    """TorchTitan's switch deals experts in turn."""
    option, forced = "debug.moe_routing", "debug.moe_force_load_balance"
    found = cell.options[option]
    if cell.options[forced] and option in cell.options.settings and found != "round_robin":
        yield option, f"found {found}, and {forced} means round_robin", f"set {forced}: false"


@rule(RULES, reference=_CHECKPOINT, is_input=True)
def addresses(cell: Cell) -> Problems:
    """TorchTitan reads a URL as a relative path, and finds no checkpoint there."""
    for name in ("checkpoint.folder", "checkpoint.initial_load_path"):
        value = cell.options[name]
        if value and "://" in value:
            remedy = "mount the store and name a path on it"
            yield name, f"found {value}, allowed: a path of a file system", remedy
    folder = cell.options["checkpoint.folder"]
    if ".." in Path(folder).parts:
        reason = f"found {folder}, which leaves the cell's folder, where it starts"
        yield "checkpoint.folder", reason, "name an absolute path; each cell gets a folder in it"


@rule(RULES, reference=_CHECKPOINT, is_input=True)
def formats(cell: Cell) -> Problems:
    """Options for published weights that contradict one another."""
    options, section = cell.options, "checkpoint"
    if not options[f"{section}.enable"]:
        for name in ("initial_load_in_hf", "initial_load_path", "last_save_in_hf"):
            if options[f"{section}.{name}"]:
                remedy = f"set {section}.enable: true"
                yield f"{section}.{name}", "has no effect without checkpoints", remedy
        return
    in_hf = options[f"{section}.initial_load_in_hf"]
    if options[f"{section}.initial_load_in_hf_quantized"] and not in_hf:
        option = f"{section}.initial_load_in_hf_quantized"
        yield option, "is for published weights", f"set {section}.initial_load_in_hf: true"
    if in_hf and not options[f"{section}.initial_load_model_only"]:
        option = f"{section}.initial_load_model_only"
        yield option, "is false, and published weights hold the model alone", "set it to true"
    if options[f"{section}.last_save_in_hf"]:
        size = 4 * _expert_parameters(cell.options.model) / 1e9
        if size > _LARGEST_HF_SAVE_GB:
            reason = f"rank 0 would write {size:,.0f} GB as one file, until a collective times out"
            remedy = "leave it out, and run: python submit.py export RUN/CELL --to FOLDER"
            yield f"{section}.last_save_in_hf", reason, remedy


def _expert_parameters(model: Model | None) -> float:
    """Parameters of the routed experts, which are nearly all of a large model."""
    if model is None:
        return 0
    layers = model.n_layers - model.n_dense_layers
    return 3.0 * layers * model.num_experts * model.dim * model.expert_hidden


def training_files(cell: Cell) -> Iterator[Finding]:
    """Faults of the files that the job would read, as this machine sees them."""
    options = cell.options
    for section, name in (("training", "data.files"), ("validation", "data.validation_files")):
        if options[f"{section}.dataset"] == TEXT and options[name]:
            if section == "validation" and not options["validation.enable"]:
                continue
            try:
                check_sources(options[name], options["data.text_key"], ROOT)
            except InputError as error:
                place = "" if error.place == "data.files" else f"{error.place}: "
                yield Finding(ERROR, "files", name, f"{place}{error.found}", error.remedy)
    yield from _vocabulary(cell)
    if options["checkpoint.enable"] and options["checkpoint.initial_load_in_hf"]:
        yield from _published_weights(cell)


def _vocabulary(cell: Cell) -> Iterator[Finding]:
    """A token that the model lacks ends a job on the GPU with an index error."""
    path, model = cell.options["model.hf_assets_path"], cell.options.model
    tokenizer = ROOT / (path or "") / "tokenizer.json"
    if model is None or not tokenizer.is_file():
        return
    try:
        content = json.loads(tokenizer.read_text(encoding="utf-8"))
        tokens = content.get("model", {}).get("vocab", {})
        largest = max(
            len(tokens) - 1, *(token["id"] for token in content.get("added_tokens", ())), 0
        )
    except (ValueError, AttributeError, KeyError, TypeError):
        # The tokenizer's own reader says more.
        return
    if largest >= model.vocab:
        title, last = cell.options.model_title, model.vocab - 1
        reason = f"{path} has tokens up to {largest}, {title} takes tokens up to {last}"
        remedy = "use the model's own tokenizer, or a larger flavor"
        yield Finding(ERROR, "vocabulary", "model.hf_assets_path", reason, remedy)


def _published_weights(cell: Cell) -> Iterator[Finding]:
    """A missing checkpoint, one that is quantized unlike the options, or one of other shapes."""
    options = cell.options
    option = "checkpoint.initial_load_path"
    shown = options[option] or options["model.hf_assets_path"]
    if not options[option]:
        option = "model.hf_assets_path"
    folder = ROOT / shown
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if folder.is_dir():
            remedy = "download the weights there, or set checkpoint.initial_load_path"
            yield Finding(ERROR, "weights", option, f"{shown} has no *.safetensors files", remedy)
        return
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            missing = sorted({file for file in names.values() if not (folder / file).is_file()})
            if missing:
                reason = f"{shown} lacks {len(missing)} of its files, {missing[0]} first"
                yield Finding(ERROR, "weights", option, reason, "download the whole checkpoint")
                return
        else:
            names = {name: file.name for file in files for name in read_shapes(file)}
        yield from _quantization(cell, names, shown)
        yield from _shapes(cell, folder, names, shown, option)
    except (ValueError, KeyError, OSError, struct.error) as error:
        reason = f"{shown} cannot be read ({type(error).__name__}: {error})"
        yield Finding(ERROR, "weights", option, reason, "download the checkpoint again")


def _quantization(cell: Cell, names: dict[str, str], shown: str) -> Iterator[Finding]:
    option = "checkpoint.initial_load_in_hf_quantized"
    quantized = any(name.endswith("weight_scale_inv") for name in names)
    if quantized and not cell.options[option]:
        reason = f"{shown} is quantized in blocks of FP8, whose raw values would be trained on"
        yield Finding(ERROR, "weights", option, reason, "set it to true")
    if not quantized and cell.options[option]:
        yield Finding(ERROR, "weights", option, f"{shown} is not quantized", "set it to false")


def _shapes(
    cell: Cell, folder: Path, names: dict[str, str], shown: str, option: str
) -> Iterator[Finding]:
    family, model, title = cell.options.family, cell.options.model, cell.options.model_title
    if family is None or model is None:
        return
    layers = {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)", name))}
    if len(layers) not in (model.n_layers, model.n_layers + family.extra_layers):
        reason = f"{shown} has {len(layers)} layers, {title} has {model.n_layers}"
        yield Finding(ERROR, "weights", option, reason, "set model.flavor to the checkpoint's")
        return
    for name, dims in family.weights.items():
        if name not in names:
            reason = f"{shown} has no {name}, which {title} needs"
            yield Finding(ERROR, "weights", option, reason, "name weights of this model")
            return
        shape = read_shapes(folder / names[name])[name]
        expected = [
            getattr(model, dim) if dim else size for dim, size in zip(dims, shape, strict=True)
        ]
        if shape != expected:
            reason = f"{shown}: {name} is {shape}, {title} has {expected}"
            yield Finding(ERROR, "weights", option, reason, "set model.flavor to the checkpoint's")
            return


def read_shapes(file: Path) -> dict[str, list[int]]:
    """Return the shapes of a safetensors file's tensors, from its header.

    Raises:
        ValueError: it is no such file.
    """
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100 * 2**20:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(stream.read(length))
    return {name: one["shape"] for name, one in header.items() if name != "__metadata__"}
