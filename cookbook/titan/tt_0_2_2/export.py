"""Export a native checkpoint as safetensors files that transformers can open.

    python -m cookbook.titan.tt_0_2_2.export '{"checkpoint": ..., "to": ..., ...}'

It runs on a CPU node without a process group. It writes files of about 5 GB one at a time, and
reads each back before it starts the next. Memory use therefore does not grow with the model, and
an interrupted export resumes at the first missing file.
"""

import json
import shutil
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass, field
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
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from cookbook.base.errors import InputError, JobError, run_command
from cookbook.base.files import write_whole
from cookbook.titan.tt_0_2_2.families import FAMILIES

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Request:
    checkpoint: str  # the folder `step-N` to read
    to: str  # the folder to write
    model: str
    flavor: str
    seq_len: int  # training's sequence length, which decides whether RoPE is scaled
    dtype: str = "bfloat16"  # of all tensors except the routing bias, which stays float32
    tokenizer: str = ""  # the folder to copy the tokenizer from, if any
    file_bytes: int = 5 * 10**9
    overrides: dict[str, int] = field(default_factory=dict)  # as in `model.overrides`

    @property
    def args(self) -> Any:
        """A copy of the model's arguments."""
        args = deepcopy(FAMILIES[self.model].flavors[self.flavor])
        args.override(self.overrides)
        return args


class Part(NamedTuple):
    """The tensors that one checkpoint tensor contributes to one output file.

    A tensor that stacks all experts of a layer contributes one tensor for each expert.
    """

    fqn: str  # name of the checkpoint tensor
    names: tuple[str, ...]  # names of the exported tensors
    first: int  # index of the first expert to export; 0 if the tensor has no experts
    shape: tuple[int, ...]  # shape of each exported tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return len(self.names) * torch.Size(self.shape).numel() * self.dtype.itemsize


def export(request: Request) -> int:
    """Write the export's files that do not exist yet; return the size of all its tensors in bytes.

    Raises:
        InputError: the folder holds another export, or a tensor of the checkpoint is missing or has
            the wrong shape.
        JobError: the disk is too full, or a file reads back different from what was written.
    """
    reader = FileSystemReader(request.checkpoint)
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        reason = f"is not a whole checkpoint ({type(error).__name__}: {error})"
        remedy = "name a folder step-N with .metadata"
        raise InputError(request.checkpoint, reason, remedy) from None
    files = plan_files(request, metadata)
    to = Path(request.to)
    _claim(to, request, metadata)
    total = sum(part.bytes for parts in files for part in parts)
    named = {f"model-{n:05}-of-{len(files):05}.safetensors": one for n, one in enumerate(files, 1)}
    missing = {name: parts for name, parts in named.items() if not (to / name).exists()}
    needed = sum(part.bytes for parts in missing.values() for part in parts)
    if (free := shutil.disk_usage(to).free) < needed:
        raise JobError(f"{to}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free")
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    for name, parts in missing.items():
        tensors: dict[str, torch.Tensor] = {}
        for part in parts:
            tensors |= read_part(reader, metadata, part)
        write_file(to / name, tensors)
        print(f"wrote {name}", flush=True)
    _name_unused_biases(request, reader, metadata, {part.fqn for one in files for part in one})
    weights = {name: file for file, parts in named.items() for part in parts for name in part.names}
    config = FAMILIES[request.model].config_json(request.args, request.seq_len, request.dtype)
    for file in _TOKENIZER:
        if request.tokenizer and (source := Path(request.tokenizer) / file).exists():
            shutil.copyfile(source, to / file)
    if (to / "tokenizer.json").exists():
        tokenizer = HuggingFaceTokenizer(str(to))
        config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_whole(to / "config.json", json.dumps(config, indent=2) + "\n")
    # Write the index last: it marks the export as complete.
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    write_whole(to / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return total


def _name_unused_biases(
    request: Request, reader: FileSystemReader, metadata: Metadata, written: set[str]
) -> None:
    published = request.args.sizes().publishes_bias
    unused = [
        Part(fqn, (fqn,), 0, tuple(saved.size), torch.float32)
        for fqn, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata) and fqn.endswith("expert_bias")
        if not (published and fqn in written)
    ]
    if unused:
        biases = [read_part(reader, metadata, part)[part.fqn] for part in unused]
        largest = max(float(bias.abs().max()) for bias in biases)
        fate = "wrote, for use here only," if unused[0].fqn in written else "left out"
        print(
            f"{fate} {len(unused)} routing biases of at most {largest:.2g}: the format has no "
            "place for them, and transformers routes by the scores alone"
        )


def _claim(to: Path, request: Request, metadata: Metadata) -> None:
    to.mkdir(parents=True, exist_ok=True)
    # After a roll-back, another checkpoint has the same path. Each save has an id of its own.
    save_id = metadata.storage_meta and metadata.storage_meta.save_id
    mark, content = to / "export.json", {**asdict(request), "save_id": save_id}
    if mark.exists():
        if json.loads(mark.read_text()) != content:
            reason = "holds an export of another checkpoint or dtype"
            raise InputError(str(to), reason, "name another folder, or remove it")
    elif any(to.iterdir()):
        raise InputError(str(to), "is not empty", "name a new folder")
    else:
        write_whole(mark, json.dumps(content, indent=2) + "\n")


def plan_files(request: Request, metadata: Metadata) -> list[list[Part]]:
    """Divide the exported tensors into files, in state-dict order; return each file's Parts."""
    parts = FAMILIES[request.model]
    args = request.args
    # In training, TorchTitan sets `moe_impl` from the job's options; an export has no job.
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
            raise InputError(request.checkpoint, reason, "name a whole checkpoint of this flavor")
        names = tuple(adapter.to_hf({fqn: tensor}))
        shape = tuple(tensor.shape[1:] if len(names) > 1 else tensor.shape)
        dtype = getattr(torch, "float32" if fqn.endswith("expert_bias") else request.dtype)
        each = torch.Size(shape).numel() * dtype.itemsize
        first = 0
        while first < len(names):
            if room < each and files[-1]:
                files.append([])
                room = request.file_bytes
            last = min(first + max(room // each, 1), len(names))
            files[-1].append(Part(fqn, names[first:last], first, shape, dtype))
            room -= (last - first) * each
            first = last
    return files


def read_part(reader: FileSystemReader, metadata: Metadata, part: Part) -> dict[str, torch.Tensor]:
    """Return the tensors of `part`, converted to `part.dtype` and keyed by exported name."""
    # In the checkpoint, dimension 0 of an expert weight is the expert.
    shape = torch.Size([len(part.names), *part.shape] if ".experts." in part.fqn else part.shape)
    offsets = torch.Size([part.first, *[0] * (len(shape) - 1)] if shape else [])
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=shape)
    saved: Any = metadata.state_dict_metadata[part.fqn]
    items = create_read_items_for_chunk_list(part.fqn, saved, [chunk])
    found = torch.empty(shape, dtype=part.dtype)

    def resolve_tensor(item: ReadItem) -> torch.Tensor:
        tensor = found
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    # A storage reader calls only these two methods of a planner. It copies data directly into the
    # tensor that `resolve_tensor` returns, so `commit_tensor` has nothing to do.
    planner: Any = SimpleNamespace(resolve_tensor=resolve_tensor, commit_tensor=lambda *_: None)
    try:
        reader.read_data(LoadPlan(items), planner).wait()
    except Exception as error:
        files = {str(reader.storage_data[item.storage_index].relative_path) for item in items}
        # A running job deletes its oldest checkpoints, so earlier steps went before this one.
        newer = "copy a newer step or raise checkpoint.keep_latest_k, and use a new folder"
        remedy = newer if isinstance(error, FileNotFoundError) else "export an earlier step"
        raise JobError(
            f"{', '.join(sorted(files))} of the checkpoint cannot be read "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from None
    return dict(zip(part.names, found.view(-1, *part.shape), strict=True))


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a temporary file, compare it with `tensors`, and only then rename it to `path`."""
    part = path.with_name(f".{path.name}.part")
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, part, {"format": "pt"})
    except Exception as error:
        part.unlink(missing_ok=True)
        raise JobError(f"{path}: cannot be written: {error}; run the same command again") from None
    with safe_open(part, "pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name), tensor):
                raise JobError(f"{path}: {name} reads back different from what was written")
    part.chmod(0o644)  # safetensors lets only the owner read it
    part.rename(path)


def main(text: str) -> int:
    request = Request(**json.loads(text))
    print(f"exported {export(request) / 1e9:.2f} GB to {request.to}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("cookbook.export", lambda: main(sys.argv[1])))
