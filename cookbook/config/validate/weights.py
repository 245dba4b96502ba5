"""Compare the weights that a new run starts from with the model that it trains, without torch."""

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cookbook.base.family import Family, Model
from cookbook.base.paths import ROOT
from cookbook.config.cell import Cell, Problems
from cookbook.config.facts import Facts
from cookbook.run.folder import read_checkpoint, saved_steps

_AGAIN = "download the checkpoint again"


def published_weights(cell: Cell) -> Problems:
    """Yield why safetensors files are incomplete, or are not of the model."""
    facts, family = cell.facts, cell.options.family
    option = Facts.initial_load_path if facts.initial_load_path else Facts.assets
    shown = facts.initial_load_path or facts.assets or ""
    folder = ROOT / shown
    index, files = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    if not files:
        if folder.is_dir():
            remedy = f"download the weights there, or set {Facts.initial_load_path}"
            yield option, f"{shown} has no *.safetensors files", remedy
        return
    try:
        names = {}
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / file for file in sorted({*names.values()})]
        if missing := [file.name for file in files if not file.is_file()]:
            reason = f"{shown} lacks {len(missing)} of its files, {missing[0]} first"
            yield option, reason, "download the whole checkpoint"
            return
        shapes = {file.name: read_shapes(file) for file in files}
        names = names or {name: file for file, own in shapes.items() for name in own}
        if lost := next((name for name, file in names.items() if name not in shapes[file]), None):
            yield option, f"{shown}: {names[lost]} has no {lost}, which its index names", _AGAIN
            return
        quantized = any(name.endswith("weight_scale_inv") for name in names)
        is_said = Facts.initial_load_quantized
        what = f"{shown} is quantized in blocks of FP8"
        if quantized and family and not family.reads_quantized:
            reason = f"{what}, and TorchTitan dequantizes no weights of {family.title}"
            yield option, reason, "name a checkpoint in BF16"
        elif quantized and not facts.initial_load_quantized:
            yield is_said, f"{what}, whose raw values would be trained on", "set it to true"
        if not quantized and facts.initial_load_quantized:
            yield is_said, f"{shown} is not quantized", "set it to false"
        found = {name: shapes[file][name] for name, file in names.items()}
        for reason, remedy in _unlike_model(cell, found):
            yield option, f"{shown}{reason}", remedy
    except (ValueError, KeyError, AttributeError, TypeError, OSError, struct.error) as error:
        yield option, f"{shown} cannot be read ({type(error).__name__}: {error})", _AGAIN


def _unlike_model(cell: Cell, found: dict[str, list[int]]) -> Iterator[tuple[str, str]]:
    family, model, title = cell.options.family, cell.options.model, cell.options.model_title
    if not family or not model:
        return
    layers = {int(n[1]) for name in found if (n := re.match(r"model\.layers\.(\d+)", name))}
    flavor = f"set {Facts.flavor} to the checkpoint's"
    if len(layers) not in (model.n_layers, model.n_layers + family.extra_layers):
        yield f" has {len(layers)} layers, {title} has {model.n_layers}", flavor
        return
    for name, dims in ((name.format(**vars(model)), d) for name, d in family.weights.items()):
        if "dense_hidden" in dims and model.n_dense_layers == 0:
            continue
        if name not in found:
            yield f" has no {name}, which {title} needs", "name weights of this model"
            return
        sizes = zip(dims, found[name], strict=True)
        expected = [getattr(model, dim) if dim else size for dim, size in sizes]
        if found[name] != expected:
            yield f": {name} is {found[name]}, {title} has {expected}", flavor
            return
    for name in _gaps([*found], family, model):
        yield f" has no {name}, which other layers have", _AGAIN
        return


def _gaps(names: list[str], family: Family, model: Model) -> Iterator[str]:
    """Yield the weights that a layer, or an expert, lacks beside the others of its kind."""
    places = defaultdict[str, set[tuple[int, int]]](set)
    for name in names:
        numbers = re.fullmatch(r"model\.layers\.(\d+)\.(.*?)(?:experts\.(\d+)\.(.*))?", name)
        if numbers and int(numbers[1]) < model.n_layers:
            kind = f"{numbers[2]}experts.{{}}.{numbers[4]}" if numbers[3] else numbers[2]
            places[kind].add((int(numbers[1]), int(numbers[3] or 0)))
    dense = range(model.n_dense_layers)
    for kind, own in places.items():
        layers = {layer for layer, _ in own}
        first = 0 if layers & {*dense} else model.n_dense_layers
        wanted = dense if layers <= {*dense} else range(first, model.n_layers)
        experts = range(model.num_experts if "{}" in kind else 1)
        lost = {(layer, expert) for layer in wanted for expert in experts} - own
        for layer, expert in sorted(lost)[:1]:
            yield f"model.layers.{layer}.{kind.format(expert)}"


def native_weights(cell: Cell) -> Problems:
    """Yield why `initial_load_path` is no whole checkpoint of TorchTitan's, or not of the model."""
    option, shown, model = Facts.initial_load_path, cell.facts.initial_load_path, cell.options.model
    path = ROOT / str(shown)
    if not path.is_dir():
        return
    found = read_checkpoint(0, path)
    if found.damage or found.is_exported:
        steps = [str(Path(str(shown)) / one.name) for _, one in saved_steps(path)[:1]]
        remedy = f"set it to {steps[0]}" if steps else "set it to a checkpoint's step-N folder"
        if any(path.glob("*.safetensors")):
            remedy = f"set {Facts.initial_load_in_hf}: true"
        yield option, f"{shown}: {found.damage or 'holds safetensors files'}", remedy
        return
    if model is None or not found.shapes:
        return
    layers = {int(n[1]) for name in found.shapes if (n := re.match(r"layers\.(\d+)\.", name))}
    embedding = found.shapes.get("tok_embeddings.weight")
    own, wanted = (len(layers), embedding), (model.n_layers, [model.vocab, model.dim])
    if own != wanted:
        reason = f"{shown} has {own[0]} layers and an embedding of {own[1]}, "
        reason += f"{cell.options.model_title} has {wanted[0]} and {wanted[1]}"
        yield option, reason, f"set {Facts.flavor} to the checkpoint's"
    missing = {"optimizer", "lr_scheduler", "dataloader", "train_state"} - found.states
    missing -= {*cell.facts.load_excluded}
    if missing and not cell.facts.initial_load_model_only:
        reason = f"is false, and {shown} lacks {', '.join(sorted(missing))}"
        yield Facts.initial_load_model_only, reason, "set it to true"


def read_shapes(file: Path) -> dict[str, list[int]]:
    """Return a safetensors file's tensor shapes; raise ValueError or struct.error if damaged."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100 * 2**20:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(length))
    tensors = {name: one for name, one in header.items() if name != "__metadata__"}
    needed = 8 + length + max((one["data_offsets"][1] for one in tensors.values()), default=0)
    if (size := file.stat().st_size) != needed:
        raise ValueError(f"{file.name} has {size:,} of {needed:,} bytes")
    return {name: one["shape"] for name, one in tensors.items()}
