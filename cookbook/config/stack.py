"""A stack: pinned packages, and the options and models of the pinned TorchTitan.

It is read from `requirements.txt` and `tables/<name>.json`, which is generated from the installed
TorchTitan (see `job_config.py` of the stack's package in `titan/`).
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, described, nearest, quotes_remedy, unknown_name
from cookbook.base.family import Family, Model
from cookbook.base.paths import REQUIREMENTS

# URLs of source code at the stack's versions; for FlashAttention, of the main branch.
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan"
TORCHAO = "https://github.com/pytorch/ao/blob/v0.16.0/torchao"
FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute"
PIPELINING = (
    "https://github.com/pytorch/pytorch/blob/v2.10.0/torch/distributed/pipelining/schedules.py"
)
_LINE = re.compile(
    r"([A-Za-z0-9_.-]+)\s*(?:==\s*([^\s;#]+)|@\s*(\S+@([0-9a-f]{7,40})))"
    r"\s*(?:;\s*extra\s*==\s*[\"'](\w+)[\"'])?"
)


@dataclass(frozen=True)
class Pin:
    """A pinned package; `value` is its version, or its commit if `source` is a repository."""

    name: str
    value: str
    source: str = ""
    extra: str = ""

    @property
    def requirement(self) -> str:
        """The package and its pin, in the form that `pip install` accepts."""
        return f"{self.name} @ {self.source}" if self.source else f"{self.name}=={self.value}"


def read_pins(path: Path = REQUIREMENTS) -> list[Pin]:
    found = map(_LINE.match, path.read_text(encoding="utf-8").splitlines())
    rows = (match.groups("") for match in found if match)
    return [Pin(name, version or sha, url, extra) for name, version, url, sha, extra in rows]


def stack_name(path: Path = REQUIREMENTS) -> str:
    """Return the name of the stack from the first line of `path` (`# stack 2026.02`)."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# stack").strip()


@dataclass(frozen=True)
class Option:
    """One TorchTitan option, e.g. `training.steps`, as the stack's JobConfig declares it."""

    name: str
    kind: str
    default: Any
    optional: bool = False
    choices: tuple[str, ...] = ()

    def check(self, place: str, value: Any) -> Any:
        """Return `value`, converted to TorchTitan's type; raise InputError if it is not allowed."""
        if self.optional and value in (None, "None"):
            return None
        if self.kind == "choice":
            if value not in self.choices:
                raise unknown_name(place, "value", str(value), self.choices)
            return value
        if self.kind == "list" and isinstance(value, str):
            value = value.split(",") if value else []
        if self.kind == "float" and _holds("int", value):
            value = float(value)
        if not _holds(self.kind, value):
            found = f"found {described(value)}, allowed: {_ALLOWED[self.kind]}"
            raise InputError(place, found, quotes_remedy(value, _ALLOWED[self.kind]))
        if self.kind == "list" and not value and self.default:
            raise InputError(place, "found an empty list, which cannot be passed as an argument")
        for items in {"list": [value], "lists": value}.get(self.kind, ()):
            if any("," in item or item == "" for item in items):
                found = f"found {items!r}: items may hold no comma and not be empty"
                raise InputError(place, found, "split the item")
            if self.kind == "lists" and (not items or items[0].startswith("-")):
                found = f"found {items!r}: a list may not be empty or begin with '-'"
                raise InputError(place, found)
        return value

    def parse(self, place: str, text: str) -> Any:
        if self.optional and text in ("None", "null"):
            return None
        value: Any = text
        readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "lists": json.loads}
        if self.kind == "bool":
            value = {"true": True, "false": False}.get(text.lower(), text)
        # int() and float() accept non-ASCII digits; TorchTitan and Slurm do not.
        elif self.kind in readers and (text.isascii() or self.kind == "lists"):
            with contextlib.suppress(ValueError):
                value = readers[self.kind](text)
        return self.check(place, value)

    def as_text(self, value: Any) -> str:
        """Return a checked `value` as a text that `parse` reads."""
        if isinstance(value, list):
            return json.dumps(value) if self.kind == "lists" else ",".join(value)
        return str(value)

    def arguments(self, value: Any) -> list[str]:
        """Return the argv words that set this option to a checked `value`."""
        section, _, key = self.name.rpartition(".")
        if self.kind == "bool":
            return [f"--{section}.{key}" if value else f"--{section}.no_{key}"]
        if self.kind == "lists" and value is not None:
            return [f"--{self.name}", *(",".join(items) for items in value)]
        if self.kind == "list" and not value:
            return []
        return [f"--{self.name}={self.as_text(value)}"]


_ALLOWED = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
_ALLOWED |= {"list": "a list of texts", "lists": "a list of lists of texts"}


def _holds(kind: str, value: Any) -> bool:
    if kind in ("list", "lists"):
        inner = "str" if kind == "list" else "list"
        return isinstance(value, list) and all(_holds(inner, item) for item in value)
    return type(value).__name__ == kind and (kind != "float" or math.isfinite(value))


# Options that only the scripts may set, and what a user can do instead.
_SET_BY_SCRIPTS = {
    "job.dump_folder": "set CELL_DIR or COOKBOOK_RUNS in the environment",
    "metrics.save_tb_folder": "it is in the attempt's folder",
    "comm.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_memory_snapshot_folder": "it is in the attempt's folder",
    "job.custom_config_module": "add options to the stack's job_config.py in cookbook/titan",
    "experimental.custom_import": "add it to the stack's package in cookbook/titan",
    "cookbook.precision": "use --precision, or PRECISION before sbatch",
    "cookbook.ep_backend": "use --ep-backend, or EP_BACKEND before sbatch",
    "cookbook.grouped_gemms": "set grouped_gemms in the precision's `expect` block",
    "cookbook.linear_layers": "set linear_layers in the precision's `expect` block",
    "cookbook.dispatch": "set dispatch in the EP backend's `expect` block",
    "cookbook.emulated": "it follows from precision and cluster",
}
# What other projects call an option.
_ALIASES = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("max_steps", "num_steps", "train_iters"), "training.steps"),
    **dict.fromkeys(("batch_size", "micro_batch_size"), "training.local_batch_size"),
    **dict.fromkeys(("seq_length", "max_length", "context"), "training.seq_len"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_grad_norm"), "training.max_norm"),
    **dict.fromkeys(("dp", "fsdp"), "parallelism.data_parallel_shard_degree"),
    **dict.fromkeys(("save_interval", "save_steps"), "checkpoint.interval"),
}
# Keys of recipes and sweeps that are not TorchTitan options, and how to set them.
_OWN_KEYS = {
    "precision": "use --precision, or `precision` at the top of a recipe or sweep",
    "ep_backend": "use --ep-backend, or `ep_backend` at the top of a recipe or sweep",
    "nodes": "use --nodes, or `nodes` at the top of a recipe",
}


@dataclass(frozen=True, eq=False)
class Stack:
    """A pinned set of packages, with the options and model families of its TorchTitan."""

    name: str
    pins: Mapping[str, str]
    options: Mapping[str, Option]
    sections: frozenset[str]  # first words of option names: `training`, `parallelism`, ...
    families: Mapping[str, Family]
    refused_families: Mapping[str, str]
    datasets: Sequence[str]

    @property
    def hooks(self) -> str:
        """The package that TorchTitan imports in every training process."""
        return f"cookbook.titan.tt_{self.pins['torchtitan'].replace('.', '_')}"

    def option(self, place: str, name: str) -> Option:
        """Return the option called `name`; raise InputError with the nearest names if unknown."""
        if name not in self.options:
            known = [full for full in self.options if full not in _SET_BY_SCRIPTS]
            last = {full: full.rpartition(".")[2] for full in known}
            key = name.rpartition(".")[2].lower()
            # Users take an option for one of another section, or write another project's name.
            close = [full for full in last if key == last[full] or full == _ALIASES.get(key)]
            # They abbreviate degrees: for `tp`, suggest `tensor_parallel_degree`.
            initials = {full: "".join(w[:1] for w in last[full].split("_")) for full in last}
            close = close or [full for full in initials if initials[full] == f"{key}d"]
            close = close or nearest(name, last, 3)
            close = close or [full for full in last if last[full] in nearest(key, last.values())]
            found = f"TorchTitan {self.pins['torchtitan']} has no option {name!r}"
            remedy = f"nearest: {', '.join(close)}" if close else ""
            raise InputError(place, found, remedy or "see docs/reference/options.md")
        return self.options[name]

    def setting(self, place: str, name: str) -> Option:
        """Return the option called `name`; raise InputError if users may not set it."""
        if name in _OWN_KEYS:
            raise InputError(place, "is not an option of TorchTitan", _OWN_KEYS[name])
        if name in _SET_BY_SCRIPTS:
            raise InputError(place, f"{name} is set by the scripts", _SET_BY_SCRIPTS[name])
        return self.option(place, name)


@functools.cache
def load_stack(name: str | None = None) -> Stack:
    """Read the stack called `name`, by default the one that requirements.txt names."""
    name = name or stack_name()
    tables = {path.stem: path for path in (Path(__file__).parent / "tables").glob("*.json")}
    if name not in tables:
        raise unknown_name("requirements.txt", "stack", name, tables)
    table = json.loads(tables[name].read_text(encoding="utf-8"))
    choices, optional = table["choices"], table["optional"]
    options = {}
    for one, default in table["options"].items():
        kind = optional.get(one, "choice" if one in choices else type(default).__name__)
        options[one] = Option(one, kind, default, one in optional, tuple(choices.get(one, ())))
    families = {}
    for entry in table["families"]:
        flavors = {name: Model(**sizes) for name, sizes in entry["flavors"].items()}
        families[entry["name"]] = Family(**{**entry, "flavors": flavors})
    pins = {pin.name: pin.value for pin in read_pins()}
    sections = frozenset(option.partition(".")[0] for option in options)
    refused, datasets = table["refused_families"], table["datasets"]
    return Stack(name, pins, options, sections, families, refused, datasets)
