"""Export a native checkpoint as safetensors files that transformers opens.

    python -m cookbook.titan.tt_0_2_2.export REQUEST.json

It runs on a CPU node without a process group. Each file of about 5 GB is read from the checkpoint,
written, and read back before the next one is begun, so memory does not grow with the model, and an
export that was interrupted continues with the first file that is missing.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cookbook.base.errors import InputError, JobError, run_command
from cookbook.base.files import write_whole
from cookbook.titan.tt_0_2_2.families import FAMILIES

INDEX = "model.safetensors.index.json"
REQUEST = "export.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Request:
    """The order for one export."""

    checkpoint: str  # a folder `step-N`
    to: str
    model: str
    flavor: str
    seq_len: int  # training's, which decides whether positions are scaled
    dtype: str = "bfloat16"  # the routing bias stays float32
    tokenizer: str = ""  # the folder to copy it from; empty for none
    file_bytes: int = 5 * 10**9


class Part(NamedTuple):
    """Neighbouring tensors of the result, of one shape: a range of the checkpoint's `fqn`."""

    fqn: str
    names: tuple[str, ...]
    first: int  # where several, which are experts, begin along the first dimension
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return len(self.names) * torch.Size(self.shape).numel() * self.dtype.itemsize


def export(request: Request) -> int:
    """Write the files that are missing; return the bytes of all tensors.

    Raises:
        InputError: the folder holds another export, or the checkpoint lacks a tensor or has one of
            another shape.
        JobError: the disk is too small, or a file reads back otherwise than it was written.
    """
    to = Path(request.to)
    _claim(to, request)
    reader = FileSystemReader(request.checkpoint)
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        reason = f"is no whole checkpoint ({type(error).__name__}: {error})"
        remedy = "name a folder step-N with .metadata"
        raise InputError(request.checkpoint, reason, remedy) from None
    files = plan_files(request, metadata)
    total = sum(part.bytes for parts in files for part in parts)
    named = {f"model-{n:05}-of-{len(files):05}.safetensors": one for n, one in enumerate(files, 1)}
    missing = {name: parts for name, parts in named.items() if not (to / name).exists()}
    needed = sum(part.bytes for parts in missing.values() for part in parts)
    free = shutil.disk_usage(to).free
    if free < needed:
        raise JobError(f"{to}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free")
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    for name, parts in missing.items():
        write_file(to / name, read_parts(reader, metadata, parts))
        print(f"wrote {name}", flush=True)
    _name_left_out(reader, metadata, {part.fqn for parts in files for part in parts})
    weights = {name: file for file, parts in named.items() for part in parts for name in part.names}
    config = FAMILIES[request.model].config_json(request.flavor, request.seq_len, request.dtype)
    write_whole(to / "config.json", json.dumps(config, indent=2) + "\n")
    for file in _TOKENIZER:
        if request.tokenizer and (source := Path(request.tokenizer) / file).exists():
            shutil.copyfile(source, to / file)
    # Last: a folder with an index is a whole export.
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    write_whole(to / INDEX, json.dumps(index, indent=2) + "\n")
    return total


def _name_left_out(reader: FileSystemReader, metadata: Metadata, written: set[str]) -> None:
    """Report the routing biases that the family's published format cannot hold."""
    left_out = [
        Part(fqn, (fqn,), 0, tuple(saved.size), torch.float32)
        for fqn, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata) and fqn.endswith("expert_bias")
        if fqn not in written
    ]
    if left_out:
        biases = read_parts(reader, metadata, left_out).values()
        largest = max(float(bias.abs().max()) for bias in biases)
        print(
            f"left out {len(left_out)} routing biases of at most {largest:.2g}: the format has no "
            "place for them, and the exported model routes by its scores alone"
        )


def _claim(to: Path, request: Request) -> None:
    """Make the folder this export's; one of another export or with other files is refused."""
    to.mkdir(parents=True, exist_ok=True)
    mark, content = to / REQUEST, asdict(request)
    if mark.exists():
        if json.loads(mark.read_text()) != content:
            reason = "holds an export of another checkpoint or dtype"
            raise InputError(str(to), reason, "name another folder, or remove it")
    elif any(to.iterdir()):
        raise InputError(str(to), "is not empty", "name a new folder")
    else:
        write_whole(mark, json.dumps(content, indent=2) + "\n")


def plan_files(request: Request, metadata: Metadata) -> list[list[Part]]:
    """Return the parts of each file, in the order of the model."""
    parts = FAMILIES[request.model]
    args = parts.flavors()[request.flavor]
    # TorchTitan sets this one from a job's options.
    args.moe_impl = "standard"
    with torch.device("meta"):
        tensors = parts.model(args).state_dict()
    adapter_of: Any = parts.released().state_dict_adapter
    adapter = adapter_of(args, None)
    files: list[list[Part]] = [[]]
    room = request.file_bytes
    for fqn, tensor in tensors.items():
        saved = metadata.state_dict_metadata.get(fqn)
        found = list(saved.size) if isinstance(saved, TensorStorageMetadata) else "nothing"
        if found != list(tensor.shape):
            reason = f"{fqn}: found {found}, {request.flavor} has {list(tensor.shape)}"
            remedy = "name a whole checkpoint of this flavor"
            raise InputError(request.checkpoint, reason, remedy)
        names = tuple(adapter.to_hf({fqn: tensor}))
        shape = tuple(tensor.shape[1:] if len(names) > 1 else tensor.shape)
        dtype = getattr(torch, "float32" if fqn.endswith("expert_bias") else request.dtype)
        each = torch.Size(shape).numel() * dtype.itemsize
        first = 0
        while first < len(names):
            fit = max(min(room // each, len(names) - first), 0 if files[-1] else 1)
            if fit:
                files[-1].append(Part(fqn, names[first : first + fit], first, shape, dtype))
                first, room = first + fit, room - fit * each
            if first < len(names):
                files.append([])
                room = request.file_bytes
    return files


def read_parts(
    reader: FileSystemReader, metadata: Metadata, parts: Sequence[Part]
) -> dict[str, torch.Tensor]:
    """Return the tensors of `parts` by name, in their dtype."""
    targets: dict[tuple[str, int], torch.Tensor] = {}
    items: list[ReadItem] = []
    for part in parts:
        # The checkpoint stacks experts, be it one alone.
        is_stacked = ".experts." in part.fqn
        shape = torch.Size([len(part.names), *part.shape] if is_stacked else part.shape)
        offsets = torch.Size([part.first, *[0] * (len(shape) - 1)] if shape else [])
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=shape)
        saved: Any = metadata.state_dict_metadata[part.fqn]
        items += create_read_items_for_chunk_list(part.fqn, saved, [chunk])
        targets[part.fqn, part.first] = torch.empty(shape, dtype=part.dtype)

    def resolve_tensor(item: ReadItem) -> torch.Tensor:
        offset = item.dest_index.offset
        tensor = targets[item.dest_index.fqn, offset[0] if offset else 0]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    # What a storage reader asks of a planner. It copies into the tensor: nothing is to commit.
    planner: Any = SimpleNamespace(resolve_tensor=resolve_tensor, commit_tensor=lambda *_: None)
    try:
        reader.read_data(LoadPlan(items), planner).wait()
    except Exception as error:
        files = {str(reader.storage_data[item.storage_index].relative_path) for item in items}
        raise JobError(
            f"{', '.join(sorted(files))} of the checkpoint cannot be read "
            f"({type(error).__name__}: {error}); export an earlier step"
        ) from None
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        tensors = targets[part.fqn, part.first].view(-1, *part.shape)
        found |= zip(part.names, tensors, strict=True)
    return found


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one file whole, and read it back."""
    part = path.with_name(f".{path.name}.part")
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, part, {"format": "pt"})
    except Exception as error:
        part.unlink(missing_ok=True)
        raise JobError(f"{path}: cannot be written: {error}; run the same command again") from None
    with safe_open(part, "pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name), tensor):
                raise JobError(f"{path}: {name} reads back otherwise than it was written")
    part.rename(path)


def main(file: str) -> int:
    """Run the request in the JSON file."""
    request = Request(**json.loads(Path(file).read_text()))
    print(f"exported {export(request) / 1e9:.2f} GB to {request.to}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("cookbook.export", lambda: main(sys.argv[1])))
