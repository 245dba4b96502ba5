"""The files of `recipes/` by name, and two kinds of them: recipes, and the overlays over them.

A new kind of EP exchange is a row of `EXCHANGES`, a dispatcher in `titan/`, and its speed in
`predict/`; any other precision or EP backend is a YAML file.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cookbook.base.errors import InputError, named_at, unknown_name
from cookbook.base.gpus import Gpu
from cookbook.base.paths import RECIPES
from cookbook.base.yamlfile import (
    Count,
    Flag,
    Natural,
    Number,
    Numbers,
    Text,
    Texts,
    Words,
    fill,
    mapping_at,
    read_yaml,
    shown_path,
)
from cookbook.config.options import (
    Options,
    Setting,
    Settings,
    check_environment,
    read_options,
    read_sections,
)
from cookbook.config.stack import load_stack

# The folder below `recipes/` of each kind: its name in messages, and the remedy for one of its
# names in the place of another kind's.
KINDS = {
    "": ("recipe", "write: python submit.py run {}"),
    "precision": ("precision", "it is a precision: --precision {}"),
    "ep_backend": ("EP backend", "it is an EP backend: --ep-backend {}"),
    "cluster": ("cluster", "it is a cluster: --cluster {}"),
    "sweep": ("sweep", "write: python submit.py sweep {}"),
}
# Safe in a shell, in a path, and as a name of jobs and W&B runs. A cell's name holds three of them
# and becomes a folder, whose name may have 255 bytes.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_WORD_CHARACTERS = 40


def check_name(place: str, name: str) -> None:
    """Raise where cells, jobs and folders cannot be named after `name`."""
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, '.', '-' and '_', at most 60, a letter or digit first"
        raise InputError(place, f"found {name!r}, allowed: {allowed}")


def word_of(value: Any) -> str:
    """Return an option's value as a part of a cell's name: letters for files, jobs and W&B.

    Two values of an option have two words: one that does not hold all of its value ends with a
    digest of it.
    """
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
    """Return the names of the files of `kind`; editors' backup files have no such names."""
    stems = (path.stem for path in (RECIPES / kind).glob("*.yaml"))
    return sorted(filter(_NAME.fullmatch, stems))


def find_file(kind: str, name: str) -> Path:
    """Return the file for `name`, which may also be the path of a user's own YAML file."""
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
        return RECIPES / kind / f"{name}.yaml"
    error = unknown_name(title, title, name, names_in(kind))
    others = [remedy for other, (_, remedy) in KINDS.items() if name in names_in(other)]
    raise InputError(title, error.found, others[0].format(name)) if others else error


def reference(kind: str, path: Path) -> str:
    """Return the name by which `find_file` finds `path` from any folder, or the whole path."""
    path = path.resolve()
    return path.stem if path.parent == (RECIPES / kind).resolve() else str(path)


COMM_BACKEND = "parallelism.expert_parallel_comm_backend"


@dataclass(frozen=True)
class Exchange:
    """How tokens travel to the ranks of their experts."""

    name: str  # as an EP backend's `expect.dispatch` and the job's log have it
    title: str  # for messages
    sizes: tuple[int, ...] = ()  # EP degrees that it is configured for; empty for any
    ranks_per_node: int = 0  # of every node, where it leaves the node; 0 for any number
    has_etp: bool = True  # works with expert tensor parallelism
    # The cookbook's hooks bring its MoE layer, which overlaps it with the shared experts itself.
    has_own_layer: bool = False
    sends_once_per_rank: bool = False  # a token for several experts of one rank


STANDARD = Exchange("standard", "the all-to-all")
_MXFP8 = Exchange("mxfp8", "TorchAO's quantized all-to-all")
# `Buffer.get_dispatch_config` of the pinned DeepEP has a tuned configuration for these; others fail
# its assertion.
_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_DEEPEP = Exchange(
    "deepep", "DeepEP", _SIZES, 8, has_etp=False, has_own_layer=True, sends_once_per_rank=True
)
EXCHANGES = {exchange.name: exchange for exchange in (STANDARD, _MXFP8, _DEEPEP)}


def implied(options: Options) -> dict[str, str]:
    """Return `grouped_gemms`, `linear_layers` and `dispatch` as the options turn them on."""
    converters = options["model.converters"]
    grouped = {
        "quantize.grouped_mm.mx": options["quantize.grouped_mm.mx.recipe_name"],
        "quantize.grouped_mm.float8": "fp8_rowwise",
    }
    linear = {"quantize.linear.mx": "mx", "quantize.linear.float8": "float8"}
    dispatch: str = options[COMM_BACKEND]
    exchanges = ("a2a_dispatch_fwd", "a2a_combine_bwd")
    quantized = {options[f"parallelism.expert_parallel_{name}_precision"] for name in exchanges}
    if dispatch == STANDARD.name and quantized != {"default"}:
        dispatch = "mxfp8" if quantized == {"mxfp8"} else "mxfp8 in one exchange of two"
    kinds = {"grouped_gemms": grouped, "linear_layers": linear}
    found = {key: [of[name] for name in converters if name in of] for key, of in kinds.items()}
    joined = {key: " and ".join(formats) or "bf16" for key, formats in found.items()}
    return {**joined, "dispatch": dispatch}


Kind = Literal["precision", "ep_backend"]
OF_PRECISION = ("grouped_gemms", "linear_layers")
# The keys of each kind's `expect` block, and their defaults.
_EXPECTED: Mapping[Kind, Mapping[str, str]] = {
    "precision": dict.fromkeys(OF_PRECISION, "bf16"),
    "ep_backend": {"dispatch": "standard"},
}


@dataclass(frozen=True)
class Needs:
    """What an overlay asks of the machine and of other options, which must have these values."""

    settings: Settings
    device: Literal["cuda"] | None = None
    compute_capability: Number = 0.0
    packages: Texts = ()
    expert_parallel: Flag = False


@dataclass(frozen=True)
class Overlay:
    """A precision (`bf16`, `mxfp8`: formats of the GEMMs) or an EP backend (`deepep`: exchanges).

    Where the GPU lacks `needs.compute_capability`, `emulated`, if there is one, is laid over
    `settings`.
    """

    kind: Kind
    name: str
    description: Text
    needs: Needs
    expect: Settings  # must be active in training: `cookbook.<key>` of the job
    settings: Settings
    emulated: Settings | None
    path: Path
    synonyms: Texts = ()
    environment: Words = field(default_factory=Words)
    environment_from: Words = field(default_factory=Words)  # the values of other variables

    def expects(self, key: str) -> Any:
        return self.expect[f"cookbook.{key}"].value


def load_precision(name: str, gpu: Gpu | None = None) -> Overlay:
    """Read the precision of a name, synonym or path; `fp8` means the format that `gpu` has."""
    if name != "fp8":
        return load_overlay("precision", name)
    # The newest generation first.
    for precision in (load_overlay("precision", "mxfp8"), load_overlay("precision", "float8")):
        if gpu and precision.needs.compute_capability <= gpu.compute_capability:
            return precision
    raise InputError("precision", "'fp8' depends on the GPU", "name mxfp8 or float8")


def load_ep_backend(name: str) -> Overlay:
    return load_overlay("ep_backend", name)


@functools.cache
def load_overlay(kind: Kind, name: str) -> Overlay:
    """Read the overlay of `kind` called `name`, by a synonym, or at the path `name`."""
    if not name.endswith((".yaml", ".yml")) and name not in names_in(kind):
        name = _synonyms(kind).get(name, [name])[0]
    path = find_file(kind, name)
    file = read_yaml(path)
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
        option = load_stack().option(place, f"cookbook.{key}")
        expect[option.name] = Setting(option.check(place, value), place)
    own: dict[str, Any] = {"kind": kind, "name": path.stem, "path": path, "needs": needs}
    own |= {"expect": expect, "settings": read_sections(file)}
    own["emulated"] = None if file.content.get("emulated") is None else emulated
    beside = ("needs", "expect", "emulated", *load_stack().sections)
    overlay = fill(Overlay, file, beside=beside, **own)
    check_environment(file, overlay.environment, overlay.environment_from)
    place = file.place("synonyms")
    for synonym in overlay.synonyms:
        check_name(place, synonym)
        real = [synonym] if synonym in names_in(kind) else []
        for other in {*real, *_synonyms(kind).get(synonym, ())} - {overlay.name}:
            found = f"found {synonym!r}, which {shown_path(find_file(kind, other))} has already"
            raise InputError(place, found, "remove one of the two")
    return overlay


@functools.cache
def _synonyms(kind: Kind) -> Mapping[str, list[str]]:
    """Return the overlays that have each synonym; a file that cannot be read has none."""
    found: dict[str, list[str]] = {}
    for name in names_in(kind):
        with contextlib.suppress(InputError):
            synonyms = read_yaml(find_file(kind, name)).content.get("synonyms")
            for synonym in synonyms if isinstance(synonyms, list) else ():
                found.setdefault(str(synonym), []).append(name)
    return found


@dataclass(frozen=True)
class Published:
    """Published throughput by pair (`bf16+deepep`), and its source."""

    source: Text
    tokens_per_second_per_gpu: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A model, its layout on the cluster and its training options."""

    name: str  # of the file
    description: Text
    nodes: Count
    settings: Settings
    path: Path
    short_name: Text = field(metadata={"key": "name"})  # begins the names of cells and jobs
    stand_in: Text | None = None  # the recipe that `--cluster local` trains in its place
    precision: Text = "bf16"  # of a cell that names none; so is `ep_backend`
    ep_backend: Text = "standard"
    spare_nodes: Natural = 0  # beyond those that train, to take the place of bad ones
    too_few_nodes: Literal["wait", "stop"] = "wait"  # without enough healthy nodes
    max_restarts: Natural | None = None  # after failures; None: as the cluster's profile says
    published: Published | None = None

    @property
    def published_numbers(self) -> Mapping[str, float]:
        return self.published.tokens_per_second_per_gpu if self.published else {}

    @property
    def pair(self) -> tuple[Overlay, Overlay]:
        with named_at(f"{shown_path(self.path)}: precision"):
            precision = load_precision(self.precision)
        with named_at(f"{shown_path(self.path)}: ep_backend"):
            return precision, load_ep_backend(self.ep_backend)


@functools.cache
def load_recipe(name: str) -> Recipe:
    """Read the recipe called `name`, or at the path `name`."""
    path = find_file("", name)
    file = read_yaml(path)
    if "recipes" in file.content:
        remedy = f"write: python submit.py sweep {name}"
        raise InputError(file.place("recipes"), "is a key of a sweep", remedy)
    sections, settings = load_stack().sections, read_sections(file)
    recipe = fill(Recipe, file, beside=sections, name=path.stem, settings=settings, path=path)
    check_name(file.place("name"), recipe.short_name)
    pairs = [f"{p}+{e}" for p in names_in("precision") for e in names_in("ep_backend")]
    for pair in recipe.published_numbers:
        if pair not in pairs:
            place = file.place("published", "tokens_per_second_per_gpu", pair)
            raise unknown_name(place, "pair", pair, pairs)
    if recipe.stand_in is not None:
        with named_at(file.place("stand_in")):
            find_file("", recipe.stand_in)
    return recipe
