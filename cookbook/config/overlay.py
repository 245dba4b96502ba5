"""A precision or an EP backend: options over a recipe, what they need and what they turn on."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.schema import Words, fill, mapping_at
from cookbook.base.yamlfile import YamlFile, read_yaml, shown_path
from cookbook.config.active import OF_EP_BACKEND, OF_PRECISION
from cookbook.config.environment import check_environment, check_variables
from cookbook.config.names import check_name, find_file, names_in
from cookbook.config.options import Setting, Settings
from cookbook.config.sections import read_options, read_sections, sections
from cookbook.config.stack import load_stack

Kind = Literal["precision", "ep_backend"]

# What each kind declares in its `active` block, and what holds where it declares nothing.
_ACTIVE: Mapping[Kind, Mapping[str, str]] = {
    "precision": dict.fromkeys(OF_PRECISION, "bf16"),
    "ep_backend": dict.fromkeys(OF_EP_BACKEND, "standard"),
}
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Needs:
    """What an overlay asks of the machine and of the rest of the cell.

    Attributes:
        settings: options that must have these values.
        grouped_gemms: what the precision must declare, where not every one will do.
    """

    settings: Settings
    device: Literal["cuda"] | None = None
    compute_capability: float = 0.0
    packages: tuple[str, ...] = ()
    expert_parallel: bool = False
    grouped_gemms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overlay:
    """A precision or an EP backend.

    Attributes:
        active: what must be active in training, as the options `cookbook.<key>` of the job.
        environment_from: exports a variable with the value of another, where the cluster sets that.
        emulated: laid over `settings` where the GPU lacks `needs.compute_capability`; None where
            there is no emulation.
    """

    kind: Kind
    name: str
    description: str
    needs: Needs
    active: Settings
    settings: Settings
    emulated: Settings | None
    path: Path
    synonyms: tuple[str, ...] = ()
    environment: Words = field(default_factory=Words)
    environment_from: Words = field(default_factory=Words)

    def declares(self, key: str) -> Any:
        """What the overlay's `active` block says of `key`."""
        return self.active[f"cookbook.{key}"].value


@functools.cache
def load_overlay(kind: Kind, name: str) -> Overlay:
    """Read the overlay of `kind` called `name`, by a synonym, or at the path `name`."""
    if not name.endswith((".yaml", ".yml")) and name not in names_in(kind):
        name = _synonyms(kind).get(name, [name])[0]
    path = find_file(kind, name)
    file = read_yaml(path)
    overlay = fill(
        Overlay,
        file,
        beside=("needs", "active", "emulated", *sections()),
        kind=kind,
        name=path.stem,
        needs=_read_needs(file),
        active=_read_active(file, kind),
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


def _read_active(file: YamlFile, kind: Kind) -> Settings:
    declared = mapping_at(file, "active")
    for key in declared:
        if key not in _ACTIVE[kind]:
            raise unknown_name(file.place("active", key), "key", key, _ACTIVE[kind])
    stack, active = load_stack(), {}
    for key, default in _ACTIVE[kind].items():
        place = file.place("active", key)
        option = stack.option(place, f"cookbook.{key}")
        active[option.name] = Setting(option.check(place, declared.get(key, default)), place)
    return active


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
