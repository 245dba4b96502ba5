"""A precision or an EP backend: options over a recipe, what they need and what they turn on."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import SkipValidation

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.gpus import Gpu
from cookbook.base.schema import Flag, Number, Text, Texts, Words, fill, mapping_at
from cookbook.base.yamlfile import YamlFile, read_yaml, shown_path
from cookbook.config.exchange import COMM_BACKEND, STANDARD
from cookbook.config.names import check_name, find_file, names_in
from cookbook.config.options import Options, Setting, Settings
from cookbook.config.shared_keys import (
    check_environment,
    check_variables,
    read_options,
    read_sections,
    sections,
)
from cookbook.config.stack import load_stack

# By what an overlay may say of it.
OF_PRECISION = ("grouped_gemms", "linear_layers")
OF_EP_BACKEND = ("dispatch",)
_A2A = "parallelism.expert_parallel_a2a_"


def implied(options: Options) -> dict[str, str]:
    """`grouped_gemms`, `linear_layers` and `dispatch` as the options would have them."""
    converters = options["model.converters"]
    grouped = {
        "quantize.grouped_mm.mx": options["quantize.grouped_mm.mx.recipe_name"],
        "quantize.grouped_mm.float8": "fp8_rowwise",
    }
    linear = {"quantize.linear.mx": "mx", "quantize.linear.float8": "float8"}
    return {
        "grouped_gemms": _join(grouped[name] for name in converters if name in grouped),
        "linear_layers": _join(linear[name] for name in converters if name in linear),
        "dispatch": _dispatch(options),
    }


def _join(found: Iterable[str]) -> str:
    return " and ".join(found) or "bf16"


def _dispatch(options: Options) -> str:
    backend: str = options[COMM_BACKEND]
    if backend != STANDARD.name:
        return backend
    quantized = [
        options[f"{_A2A}{part}"] for part in ("dispatch_fwd_precision", "combine_bwd_precision")
    ]
    if quantized == ["mxfp8", "mxfp8"]:
        return "mxfp8"
    return "standard" if quantized == ["default", "default"] else "mxfp8 in one exchange of two"


Kind = Literal["precision", "ep_backend"]

# What each kind declares in its `expect` block, and what holds where it declares nothing.
_EXPECTED: Mapping[Kind, Mapping[str, str]] = {
    "precision": dict.fromkeys(OF_PRECISION, "bf16"),
    "ep_backend": dict.fromkeys(OF_EP_BACKEND, "standard"),
}
# What a name means by the GPU, the newest generation first.
_BY_GPU = {"fp8": ("mxfp8", "float8")}
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    """A precision or an EP backend.

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
        """What the overlay's `expect` block says of `key`."""
        return self.expect[f"cookbook.{key}"].value


@dataclass(frozen=True)
class Precision(Overlay):
    """`bf16`, `mxfp8`, ...: the number formats of the experts' and the linear layers' GEMMs."""


@dataclass(frozen=True)
class EPBackend(Overlay):
    """`standard`, `deepep`, ...: how tokens travel to the ranks of their experts."""


def load_precision(name: str, gpu: Gpu | None = None) -> Precision:
    """Read the precision called `name`, by a synonym, or at the path `name`.

    Args:
        gpu: decides what a name means that each generation of GPUs has for itself.
    """
    if name in _BY_GPU:
        have = gpu.compute_capability if gpu else 0.0
        for choice in _BY_GPU[name]:
            precision = load_precision(choice)
            if precision.needs.compute_capability <= have:
                return precision
        choices = " or ".join(_BY_GPU[name])
        raise InputError("precision", f"{name!r} depends on the GPU", f"name {choices}")
    overlay = load_overlay("precision", name)
    assert isinstance(overlay, Precision)
    return overlay


def load_ep_backend(name: str) -> EPBackend:
    """Read the EP backend called `name`, by a synonym, or at the path `name`."""
    overlay = load_overlay("ep_backend", name)
    assert isinstance(overlay, EPBackend)
    return overlay


@functools.cache
def load_overlay(kind: Kind, name: str) -> Overlay:
    """Read the overlay of `kind` called `name`, by a synonym, or at the path `name`."""
    if not name.endswith((".yaml", ".yml")) and name not in names_in(kind):
        name = _synonyms(kind).get(name, [name])[0]
    path = find_file(kind, name)
    file = read_yaml(path)
    overlay: Overlay = fill(
        Precision if kind == "precision" else EPBackend,
        file,
        beside=("needs", "expect", "emulated", *sections()),
        kind=kind,
        name=path.stem,
        needs=_read_needs(file),
        expect=_read_expect(file, kind),
        settings=read_sections(file),
        emulated=_read_emulated(file),
        path=path,
    )
    check_environment(file, "environment", overlay.environment)
    check_variables(file, "environment_from", overlay.environment_from)
    check_variables(file, "environment_from", overlay.environment_from.values())
    _check_synonyms(file, overlay)
    return overlay


def _read_needs(file: YamlFile) -> Needs:
    if not mapping_at(file, "needs"):
        return Needs(settings={})
    needs = fill(
        Needs,
        file,
        ("needs",),
        beside=("options",),
        settings=read_options(file, mapping_at(file, "needs", "options"), ("needs", "options")),
    )
    for package in needs.packages:
        if not _MODULE.fullmatch(package):
            raise InputError(
                file.place("needs", "packages"),
                f"found {package!r}, allowed: the name that Python imports",
                "versions are pinned in requirements.txt",
            )
    return needs


def _read_expect(file: YamlFile, kind: Kind) -> Settings:
    declared = mapping_at(file, "expect")
    for key in declared:
        if key not in _EXPECTED[kind]:
            raise unknown_name(file.place("expect", key), "key", key, _EXPECTED[kind])
    stack, expect = load_stack(), {}
    for key, default in _EXPECTED[kind].items():
        place = file.place("expect", key)
        option = stack.option(place, f"cookbook.{key}")
        expect[option.name] = Setting(option.check(place, declared.get(key, default)), place)
    return expect


def _read_emulated(file: YamlFile) -> Settings | None:
    if file.content.get("emulated") is None:
        return None
    return read_options(file, mapping_at(file, "emulated"), ("emulated",))


@functools.cache
def _synonyms(kind: Kind) -> Mapping[str, list[str]]:
    """The overlays that have each synonym; a file that cannot be read has none."""
    found: dict[str, list[str]] = {}
    for name in names_in(kind):
        try:
            synonyms = read_yaml(find_file(kind, name)).content.get("synonyms")
        except InputError:
            continue
        for synonym in synonyms if isinstance(synonyms, list) else ():
            found.setdefault(str(synonym), []).append(name)
    return found


def _check_synonyms(file: YamlFile, overlay: Overlay) -> None:
    place = file.place("synonyms")
    for synonym in overlay.synonyms:
        check_name(place, synonym)
        real = [synonym] if synonym in names_in(overlay.kind) else []
        for other in (*real, *_synonyms(overlay.kind).get(synonym, ())):
            if other != overlay.name:
                path = shown_path(find_file(overlay.kind, other))
                raise InputError(
                    place, f"found {synonym!r}, which {path} has already", "remove one of the two"
                )
