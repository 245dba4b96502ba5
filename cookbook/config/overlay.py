"""Precisions and EP backends: options over a recipe, their needs, and what they turn on.

A new kind of EP exchange is a row of `EXCHANGES`, a dispatcher in `titan/`, and its speed in
`predict/`; any other overlay is a YAML file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import SkipValidation

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.gpus import Gpu
from cookbook.base.schema import Flag, Number, Text, Texts, Words, fill, mapping_at
from cookbook.base.yamlfile import YamlFile, read_yaml, shown_path
from cookbook.config.finding import DEEPEP
from cookbook.config.names import check_name, find_file, names_in
from cookbook.config.options import (
    Options,
    Setting,
    Settings,
    check_environment,
    read_options,
    read_sections,
    sections,
)
from cookbook.config.stack import load_stack

COMM_BACKEND = "parallelism.expert_parallel_comm_backend"
_A2A = "parallelism.expert_parallel_a2a_"


@dataclass(frozen=True)
class Exchange:
    """How tokens travel to the ranks of their experts.

    Attributes:
        name: as an EP backend's `expect.dispatch` and the job's log have it.
        title: for messages.
        sizes: EP degrees that it is configured for; empty for any.
        ranks_per_node: of every node, where it leaves the node; 0 for any number.
        has_etp: whether it works with expert tensor parallelism.
        has_own_layer: the cookbook's hooks bring the MoE layer that it needs, which overlaps it
            with the shared experts itself.
        sends_once_per_rank: a token with several experts on one rank is sent there once.
        uses_nccl: NCCL's SMs do its work.
        reference: the source of these facts.
    """

    name: str
    title: str
    sizes: tuple[int, ...] = ()
    ranks_per_node: int = 0
    has_etp: bool = True
    has_own_layer: bool = False
    sends_once_per_rank: bool = False
    uses_nccl: bool = True
    reference: str = ""


STANDARD = Exchange("standard", "the all-to-all")
_MXFP8_A2A = Exchange("mxfp8", "TorchAO's quantized all-to-all")
_DEEPEP = Exchange(
    "deepep",
    "DeepEP",
    # `Buffer.get_dispatch_config` has a tuned configuration for these; others fail its assertion.
    sizes=(2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160),
    ranks_per_node=8,
    has_etp=False,
    has_own_layer=True,
    sends_once_per_rank=True,
    uses_nccl=False,
    reference=DEEPEP,
)
EXCHANGES = {exchange.name: exchange for exchange in (STANDARD, _MXFP8_A2A, _DEEPEP)}


def implied(options: Options) -> dict[str, str]:
    """Return `grouped_gemms`, `linear_layers` and `dispatch` as the options turn them on."""
    converters = options["model.converters"]
    grouped = {
        "quantize.grouped_mm.mx": options["quantize.grouped_mm.mx.recipe_name"],
        "quantize.grouped_mm.float8": "fp8_rowwise",
    }
    linear = {"quantize.linear.mx": "mx", "quantize.linear.float8": "float8"}
    dispatch: str = options[COMM_BACKEND]
    quantized = {options[f"{_A2A}{part}_precision"] for part in ("dispatch_fwd", "combine_bwd")}
    if dispatch == STANDARD.name and quantized != {"default"}:
        dispatch = "mxfp8" if quantized == {"mxfp8"} else "mxfp8 in one exchange of two"

    def join(found: Iterable[str]) -> str:
        return " and ".join(found) or "bf16"

    return {
        "grouped_gemms": join(grouped[name] for name in converters if name in grouped),
        "linear_layers": join(linear[name] for name in converters if name in linear),
        "dispatch": dispatch,
    }


Kind = Literal["precision", "ep_backend"]
OF_PRECISION = ("grouped_gemms", "linear_layers")
# The keys of each kind's `expect` block, and their defaults.
_EXPECTED: Mapping[Kind, Mapping[str, str]] = {
    "precision": dict.fromkeys(OF_PRECISION, "bf16"),
    "ep_backend": {"dispatch": "standard"},
}
# Names whose meaning depends on the GPU, the newest generation first.
_BY_GPU = {"fp8": ("mxfp8", "float8")}


@dataclass(frozen=True)
class Needs:
    """What an overlay asks of the machine and of the rest of the cell.

    Attributes:
        settings: options that must have these values.
    """

    settings: SkipValidation[Settings]
    device: Literal["cuda"] | None = None
    compute_capability: Number = 0.0
    packages: Texts = ()
    expert_parallel: Flag = False


@dataclass(frozen=True)
class Overlay:
    """A precision (`bf16`, `mxfp8`: formats of the GEMMs) or an EP backend (`deepep`: exchanges).

    Attributes:
        expect: what must be active in training, as the options `cookbook.<key>` of the job.
        environment_from: exports a variable with the value of another, where the cluster sets that.
        emulated: laid over `settings` where the GPU lacks `needs.compute_capability`; None where
            there is no emulation.
    """

    kind: Kind
    name: str
    description: Text
    needs: Needs
    expect: SkipValidation[Settings]
    settings: SkipValidation[Settings]
    emulated: SkipValidation[Settings | None]
    path: Path
    synonyms: Texts = ()
    environment: Words = field(default_factory=Words)
    environment_from: Words = field(default_factory=Words)

    def expects(self, key: str) -> Any:
        """Return what the overlay's `expect` block says of `key`."""
        return self.expect[f"cookbook.{key}"].value


def load_precision(name: str, gpu: Gpu | None = None) -> Overlay:
    """Read the precision called `name`, by a synonym, or at the path `name`.

    Args:
        gpu: decides the meaning of a name that each generation of GPUs has for itself.
    """
    if name not in _BY_GPU:
        return load_overlay("precision", name)
    for choice in _BY_GPU[name] if gpu else ():
        precision = load_overlay("precision", choice)
        if gpu and precision.needs.compute_capability <= gpu.compute_capability:
            return precision
    choices = " or ".join(_BY_GPU[name])
    raise InputError("precision", f"{name!r} depends on the GPU", f"name {choices}")


def load_ep_backend(name: str) -> Overlay:
    """Read the EP backend called `name`, by a synonym, or at the path `name`."""
    return load_overlay("ep_backend", name)


@functools.cache
def load_overlay(kind: Kind, name: str) -> Overlay:
    """Read the overlay of `kind` called `name`, by a synonym, or at the path `name`."""
    if not name.endswith((".yaml", ".yml")) and name not in names_in(kind):
        name = _synonyms(kind).get(name, [name])[0]
    path = find_file(kind, name)
    file = read_yaml(path)
    is_emulated = file.content.get("emulated") is not None
    emulated = mapping_at(file, "emulated")
    needed = read_options(file, mapping_at(file, "needs", "options"), ("needs", "options"))
    needs = fill(Needs, file, ("needs",), beside=("options",), settings=needed)
    for package in needs.packages:
        if not package.isidentifier():
            found = f"found {package!r}, allowed: the name that Python imports"
            remedy = "versions are pinned in requirements.txt"
            raise InputError(file.place("needs", "packages"), found, remedy)
    overlay = fill(
        Overlay,
        file,
        beside=("needs", "expect", "emulated", *sections()),
        kind=kind,
        name=path.stem,
        needs=needs,
        expect=_read_expect(file, kind),
        settings=read_sections(file),
        emulated=read_options(file, emulated, ("emulated",)) if is_emulated else None,
        path=path,
    )
    check_environment(file, overlay.environment, overlay.environment_from)
    for synonym in overlay.synonyms:
        check_name(file.place("synonyms"), synonym)
        real = [synonym] if synonym in names_in(kind) else []
        for other in {*real, *_synonyms(kind).get(synonym, ())} - {overlay.name}:
            found = f"found {synonym!r}, which {shown_path(find_file(kind, other))} has already"
            raise InputError(file.place("synonyms"), found, "remove one of the two")
    return overlay


def _read_expect(file: YamlFile, kind: Kind) -> Settings:
    declared = mapping_at(file, "expect")
    for key in declared:
        if key not in _EXPECTED[kind]:
            raise unknown_name(file.place("expect", key), "key", key, _EXPECTED[kind])
    expect = {}
    for key, default in _EXPECTED[kind].items():
        place = file.place("expect", key)
        option = load_stack().option(place, f"cookbook.{key}")
        expect[option.name] = Setting(option.check(place, declared.get(key, default)), place)
    return expect


@functools.cache
def _synonyms(kind: Kind) -> Mapping[str, list[str]]:
    """Return the overlays that have each synonym; a file that cannot be read has none."""
    found: dict[str, list[str]] = {}
    for name in names_in(kind):
        try:
            synonyms = read_yaml(find_file(kind, name)).content.get("synonyms")
        except InputError:
            continue
        for synonym in synonyms if isinstance(synonyms, list) else ():
            found.setdefault(str(synonym), []).append(name)
    return found
