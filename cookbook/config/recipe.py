"""Find files in `recipes/` by name; read recipes and the overlays that modify them.

To add a precision or an EP backend, write a YAML file. If an EP backend dispatches tokens in a new
way, also describe that way: see CONTRIBUTING.md.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cookbook.base.errors import InputError, named_at, unknown_name
from cookbook.base.gpus import Gpu
from cookbook.base.paths import RECIPES, own_recipes
from cookbook.base.yamlfile import (
    Count,
    Flag,
    Natural,
    Number,
    Numbers,
    Text,
    Texts,
    Words,
    YamlFile,
    fill,
    mapping_at,
    read_yaml,
    shown_path,
)
from cookbook.config.dialect.names import EXPECTED
from cookbook.config.options import (
    Setting,
    Settings,
    check_environment,
    read_options,
    read_sections,
)
from cookbook.config.stack import load_stack

# For each folder of `recipes/`, a pair: the name of this kind of file in error messages, and the
# advice to a user who passes such a file where another kind is expected.
KINDS = {
    "": ("recipe", "write: python submit.py run {}"),
    "precision": ("precision", "it is a precision: --precision {}"),
    "ep_backend": ("EP backend", "it is an EP backend: --ep-backend {}"),
    "cluster": ("cluster", "it is a cluster: --cluster {}"),
    "sweep": ("sweep", "write: python submit.py sweep {}"),
}
# Allowed names are safe in shells, paths, job names and W&B.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_WORD_CHARACTERS = 40


def check_name(place: str, name: str) -> None:
    """Raise InputError if `name` cannot be part of the names of cells, jobs and folders."""
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, '.', '-' and '_', at most 60, a letter or digit first"
        raise InputError(place, f"found {name!r}, allowed: {allowed}")


def word_of(value: Any) -> str:
    """Return `value` as a word for a cell's name; different values give different words."""
    items = value if isinstance(value, list) else [value]
    text = "+".join(map(str, items))
    word = re.sub(r"[^A-Za-z0-9_.+]", "_", text)
    is_changed = isinstance(value, str | list) and word != text
    is_unclear = isinstance(value, list) and word.count("+") != max(0, len(items) - 1)
    if not (is_changed or is_unclear or len(word) > _WORD_CHARACTERS):
        return word
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
    return f"{word[:_WORD_CHARACTERS]}_{digest}"


def names_in(kind: str) -> list[str]:
    """Return the names of the files of `kind`, without editors' backup files."""
    folders = {RECIPES / kind, own_recipes() / kind}
    stems = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    return sorted(filter(_NAME.fullmatch, stems))


def find_file(kind: str, name: str) -> Path:
    """Return the path of a file by `kind` and `name`; `name` may also be a path."""
    title = KINDS[kind][0]
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            wrong = " is a folder, not a" if path.is_dir() else ": no such"
            remedy = f"did you mean {path.stem!r}?" if path.stem in names_in(kind) else ""
            raise InputError(title, f"{name}{wrong} {title} file", remedy)
        check_name(f"{name}: the file's name", path.stem)
        return path
    if name in names_in(kind):
        own = own_recipes() / kind / f"{name}.yaml"
        return own if own.is_file() else RECIPES / kind / f"{name}.yaml"
    error = unknown_name(title, title, name, names_in(kind))
    others = [remedy for other, (_, remedy) in KINDS.items() if name in names_in(other)]
    raise InputError(title, error.found, others[0].format(name)) if others else error


def reference(kind: str, path: Path) -> str:
    """Return the name or absolute path by which `find_file` finds `path` from any directory."""
    path = path.resolve()
    is_known = path == (RECIPES / kind / f"{path.stem}.yaml").resolve()
    return path.stem if is_known else str(path)


Kind = Literal["precision", "ep_backend"]
OF_PRECISION = ("grouped_gemms", "linear_layers")
# The keys of the `expect` block in each kind of overlay, and their defaults.
_EXPECTED: Mapping[Kind, Mapping[str, str]] = {
    "precision": dict.fromkeys(OF_PRECISION, "bf16"),
    "ep_backend": {"dispatch": "standard"},
}


@dataclass(frozen=True)
class Needs:
    """An overlay's requirements: hardware, packages, and the values that options must have."""

    settings: Settings
    device: Literal["cuda"] | None = None
    compute_capability: Number = 0.0
    packages: Texts = ()
    expert_parallel: Flag = False


@dataclass(frozen=True)
class Overlay:
    """A precision or an EP backend: options that override a recipe's."""

    kind: Kind
    name: str
    description: Text
    needs: Needs
    expect: Settings  # what must be active in training, e.g. `cookbook.dispatch: deepep`
    settings: Settings
    # Extra options where software emulates missing hardware; None if that is not supported.
    emulated: Settings | None
    path: Path
    environment: Words = field(default_factory=Words)
    # `A: B` sets environment variable A to the value of variable B, unless A is set already.
    environment_from: Words = field(default_factory=Words)

    def expects(self, key: str) -> Any:
        return self.expect[EXPECTED[key]].value


# Precisions by the names that the published scripts gave them.
SYNONYMS = {"mxfp8_default": "mxfp8", "mxfp8_wgrad_with_hp": "mxfp8_wgrad_hp"}


def load_precision(name: str) -> Overlay:
    return load_overlay("precision", SYNONYMS.get(name, name))


def load_ep_backend(name: str) -> Overlay:
    return load_overlay("ep_backend", name)


@functools.cache
def load_overlay(kind: Kind, name: str) -> Overlay:
    """Read an overlay of `kind` by name or path."""
    path = find_file(kind, name)
    return read_overlay(kind, read_yaml(path), path)


def read_overlay(kind: Kind, file: YamlFile, path: Path) -> Overlay:
    """Read the overlay that stands in `file`, a copy of `path`."""
    emulated = read_options(file, mapping_at(file, "emulated"), ("emulated",))
    needed = read_options(file, mapping_at(file, "needs", "options"), ("needs", "options"))
    needs = fill(Needs, file, ("needs",), beside=("options",), settings=needed)
    if wrong := [package for package in needs.packages if not package.isidentifier()]:
        found = f"found {wrong[0]!r}, allowed: the name that Python imports"
        remedy = "versions are pinned in requirements.txt"
        raise InputError(file.place("needs", "packages"), found, remedy)
    expect, known = {}, _EXPECTED[kind]
    for key, value in {**known, **mapping_at(file, "expect")}.items():
        place = file.place("expect", key)
        if key not in known:
            raise unknown_name(place, "key", key, known)
        option = load_stack().option(place, EXPECTED[key])
        expect[option.name] = Setting(option.check(place, value), place)
    own: dict[str, Any] = {"kind": kind, "name": path.stem, "path": path, "needs": needs}
    own |= {"expect": expect, "settings": read_sections(file)}
    own["emulated"] = None if file.content.get("emulated") is None else emulated
    beside = ("needs", "expect", "emulated", *load_stack().sections)
    overlay = fill(Overlay, file, beside=beside, **own)
    check_environment(file, overlay.environment, overlay.environment_from)
    return overlay


@dataclass(frozen=True)
class Published:
    """A recipe's published throughput, and the source of the numbers."""

    source: Text
    gpu: Text | None = None  # as cluster profiles name it; unset, here and below: any
    gpus: Count | None = None
    tokens_per_second_per_gpu: Numbers = field(default_factory=dict)  # keys like `bf16+deepep`


@dataclass(frozen=True)
class Recipe:
    """A model, its layout on the cluster and its training options."""

    name: str  # file name without its suffix
    description: Text
    nodes: Count
    settings: Settings
    path: Path
    short_name: Text = field(metadata={"key": "name"})  # prefix of the names of cells and jobs
    stand_in: Text | None = None  # the recipe that `--cluster local` trains instead
    precision: Text = "bf16"  # default if neither sweep nor command line names one
    ep_backend: Text = "standard"  # default if neither sweep nor command line names one
    spare_nodes: Natural = 0  # extra nodes to request, as replacements for bad ones
    too_few_nodes: Literal["wait", "stop"] = "wait"  # what to do if too few nodes are healthy
    max_restarts: Natural | None = None  # limit on restarts after failures; None for the cluster's
    published: Published | None = None

    @property
    def published_numbers(self) -> Mapping[str, float]:
        return self.published.tokens_per_second_per_gpu if self.published else {}

    def published_on(self, gpu: Gpu | None, gpus: int) -> Mapping[str, float]:
        """Return the published numbers if they are of as many GPUs of this kind."""
        own, kind = self.published or Published(""), gpu.name if gpu else ""
        is_same = own.gpu in (None, kind) and own.gpus in (None, gpus)
        return self.published_numbers if is_same else {}

    @property
    def pair(self) -> tuple[Overlay, Overlay]:
        with named_at(f"{shown_path(self.path)}: precision"):
            precision = load_precision(self.precision)
        with named_at(f"{shown_path(self.path)}: ep_backend"):
            return precision, load_ep_backend(self.ep_backend)


def read_recipe(file: YamlFile, path: Path) -> Recipe:
    """Read the recipe that stands in `file`, a copy of `path`."""
    sections, settings = load_stack().sections, read_sections(file)
    recipe = fill(Recipe, file, beside=sections, name=path.stem, settings=settings, path=path)
    check_name(file.place("name"), recipe.short_name)
    return recipe


@functools.cache
def load_recipe(name: str) -> Recipe:
    path = find_file("", name)
    file = read_yaml(path)
    if "recipes" in file.content:
        remedy = f"write: python submit.py sweep {name}"
        raise InputError(file.place("recipes"), "is a key of a sweep", remedy)
    recipe = read_recipe(file, path)
    pairs = [f"{p}+{e}" for p in names_in("precision") for e in names_in("ep_backend")]
    for pair in recipe.published_numbers:
        if pair not in pairs:
            place = file.place("published", "tokens_per_second_per_gpu", pair)
            raise unknown_name(place, "pair", pair, pairs)
    if recipe.stand_in is not None:
        with named_at(file.place("stand_in")):
            # A path is one from the recipe, wherever a job looks it up.
            name = recipe.stand_in
            is_path = name.endswith((".yaml", ".yml"))
            beside = path.parent / name
            stand_in = find_file("", str(beside) if is_path and beside.is_file() else name)
            recipe = replace(recipe, stand_in=reference("", stand_in))
    return recipe
