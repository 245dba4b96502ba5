"""Read TorchTitan's options from YAML files and the command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.family import Family, Model
from cookbook.base.yamlfile import Words, YamlFile
from cookbook.config.stack import Stack, load_stack
from cookbook.run.record import CellRecord


@dataclass(frozen=True)
class Setting:
    """The checked value of a TorchTitan option, and the file or flag that set it."""

    value: Any
    origin: str


Settings = Mapping[str, Setting]


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a job by dotted name; `options[name]` is the value set, else the default."""

    stack: Stack
    settings: Settings

    def __getitem__(self, name: str) -> Any:
        setting = self.settings.get(name)
        return self.stack.options[name].default if setting is None else setting.value

    def __contains__(self, name: str) -> bool:
        return name in self.settings

    @property
    def values(self) -> dict[str, Any]:
        return {name: setting.value for name, setting in self.settings.items()}

    def override(self, *layers: Settings) -> "Options":
        """Return these options, overridden by each of the settings in `layers`; later ones win."""
        over = {name: setting for layer in layers for name, setting in layer.items()}
        return Options(self.stack, {**self.settings, **over})

    def origin(self, name: str) -> str:
        """Return where option `name` was set, followed by `name`; messages start with this text."""
        place = self.settings[name].origin if name in self.settings else name
        return place if place.endswith(name) else f"{place}: {name}"

    @property
    def family(self) -> Family | None:
        """The model family that option `model.name` selects; None if there is no such family."""
        return self.stack.families.get(self["model.name"])

    @property
    def model(self) -> Model | None:
        return self.family.flavors.get(self["model.flavor"]) if self.family else None

    @property
    def model_title(self) -> str:
        name = self.family.title if self.family else self["model.name"]
        return f"{name} {self['model.flavor']}"


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Return settings with these checked values, of no known origin."""
    return {name: Setting(value, "") for name, value in values.items()}


def options_of(record: CellRecord) -> Options:
    """Return the options in `record`; any other option has TorchTitan's default."""
    return Options(load_stack(), settings_of(record.options))


DEGREES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
}


@dataclass(frozen=True)
class Layout:
    """The parallel degrees of a job; in a valid job each is at least 1."""

    world: int
    pp: int
    dp_replicate: int
    # A configured -1 means all remaining ranks; it is resolved here, to 0 if no ranks remain.
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int

    @property
    def stage_ranks(self) -> int:
        return self.world // self.pp

    @property
    def has_fsdp(self) -> bool:
        return self.dp_shard * self.cp > 1


def layout_of(options: Options, world: int) -> Layout:
    degrees = {short: options[name] for short, name in DEGREES.items()}
    if degrees["dp_shard"] == -1:
        others = degrees["dp_replicate"] * degrees["cp"] * degrees["tp"] * degrees["pp"]
        degrees["dp_shard"] = world // max(others, 1)
    return Layout(world=world, **degrees)


def read_sections(file: YamlFile) -> Settings:
    """Read the options of all top-level sections of `file`."""
    top, sections = file.content, load_stack().sections
    return read_options(file, {key: top[key] for key in top if key.partition(".")[0] in sections})


def read_options(
    file: YamlFile, mapping: Mapping[str, Any], within: tuple[str, ...] = ()
) -> Settings:
    """Read options from `mapping`, in which `a: {b: 1}` means the same as `a.b: 1`.

    `within` is the path of keys to `mapping` in `file`, for error messages.
    """
    stack, settings = load_stack(), dict[str, Setting]()

    def read(mapping: Mapping[str, Any], keys: tuple[str, ...], prefix: str) -> None:
        for key, value in mapping.items():
            name, below = f"{prefix}{key}", (*keys, key)
            place = file.place(*below)
            if isinstance(value, dict) and name not in stack.options:
                if not any(option.startswith(f"{name}.") for option in stack.options):
                    stack.setting(place, name)
                read(value, below, f"{name}.")
                continue
            option = stack.setting(place, name)
            if name in settings:
                raise InputError(place, f"{name} is given twice, first at {settings[name].origin}")
            settings[name] = Setting(option.check(place, value), place)

    read(mapping, within, "")
    return settings


def command_line_settings(words: Sequence[str]) -> Settings:
    """Parse the SECTION.KEY=VALUE arguments of `--set`."""
    settings = {}
    for word in words:
        name, equals, text = word.partition("=")
        place = f"--set {name}"
        if not equals:
            raise InputError(place, "has no value", "write --set SECTION.KEY=VALUE")
        settings[name] = Setting(load_stack().setting(place, name).parse(place, text), place)
    return settings


def argv_of(stack: Stack, settings: Settings) -> list[str]:
    options = stack.options
    return [word for name in settings for word in options[name].arguments(settings[name].value)]


def parse_argv(words: Sequence[str], place: str, stack: Stack) -> Options:
    """Parse `--section.key=value` and `--section.key value`; the last value of an option wins."""
    settings, left = dict[str, Setting](), list(words)
    while left:
        word = left.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            remedy = "TorchTitan's begin with --section.key, sbatch's go before the script"
            if (own := re.sub("=.*", "", word)) in ("--precision", "--ep-backend"):
                remedy = f"write {own[2:].replace('-', '_').upper()}=NAME before sbatch"
            raise InputError(place, f"found {word!r}", remedy)
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        section, _, key = name.rpartition(".")
        positive = f"{section}.{key.removeprefix('no_')}"
        is_negative = name not in stack.options and positive in stack.options
        option = stack.option(place, positive if is_negative else name)
        at = f"{place}: {option.name}"
        value: Any
        if option.kind == "bool":
            if equals:
                no = f"--{section}.no_{key}"
                raise InputError(at, f"takes no value, found {text!r}", f"write --{name} or {no}")
            value = not is_negative
        elif option.kind == "lists" and not equals:
            items = []
            while left and not left[0].startswith("--"):
                items.append(left.pop(0).split(","))
            value = option.check(at, items)
        else:
            if not equals and not left:
                raise InputError(at, "has no value", f"write --{name}=VALUE")
            value = option.parse(at, text if equals else left.pop(0))
        settings[option.name] = Setting(value, at)
    return Options(stack, settings)


# Environment variables that users may not set, because bash or the scripts use them.
RESERVED = frozenset(
    {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID", "IFS", "SECONDS", "ATTEMPT"}
    | {"CELL", "CELL_DIR", "EP_BACKEND", "LOG_RANK", "NUM_NODES", "PATH", "PRECISION", "PYTHONPATH"}
    | {"PYTHONSAFEPATH", "PYTHONUNBUFFERED", "RANKS_PER_NODE", "RDZV_ENDPOINT", "RDZV_ID", "RECIPE"}
    | {"SHOWN_RANKS", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "TRAIN_ARGS", "TRAIN_NODES", "VENV"}
    | {"WANDB_RUN_NAME"}
)


def check_environment(file: YamlFile, environment: Words, sources: Words | None = None) -> None:
    """Raise InputError if a job cannot export a variable, or if a value needs shell expansion."""
    taken = [("environment", name) for name in environment]
    taken += [("environment_from", str(name)) for pair in (sources or {}).items() for name in pair]
    for key, name in taken:
        if not (name.isascii() and name.isidentifier()):
            raise InputError(file.place(key), f"{name!r} is not the name of a variable")
        if name in RESERVED or name.startswith(("SLURM_", "COOKBOOK_", "SUBMITIT_")):
            found = "is a variable of bash or of the scripts"
            raise InputError(file.place(key, name), found, "leave it out")
    for name, word in environment.items():
        if isinstance(word, str) and re.search(r"\$\{?[A-Za-z_]", word):
            found = f"found {word!r}, and values are exported as they stand: nothing is expanded"
            remedy = "write it in full, or export it in a file that the cluster's `source` names"
            raise InputError(file.place("environment", name), found, remedy)


def exported(words: Words) -> dict[str, str]:
    """Return the variables as strings to export; YAML's true becomes 1."""
    return {key: str(int(one)) if isinstance(one, bool) else one for key, one in words.items()}
