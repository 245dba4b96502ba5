"""Read TorchTitan's options from YAML files and the command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.family import Family, Model
from cookbook.base.yamlfile import Words, YamlFile
from cookbook.config.dialect.names import OVERRIDES, Names
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
        over = {n: setting for layer in layers for n, setting in layer.items() if n}
        return Options(self.stack, {**self.settings, **over})

    def origin(self, name: str) -> str:
        """Return where option `name` was set, followed by `name`; messages start with this text."""
        place = self.settings[name].origin if name in self.settings else name
        return place if place.endswith(name) else f"{place}: {name}"

    @property
    def family(self) -> Family | None:
        """The model family that the options select; None if there is no such family."""
        return self.stack.families.get(self[Names.model_name])

    @property
    def overrides(self) -> dict[str, int]:
        """The sizes that replace the flavor's, by TorchTitan's names (`moe_args.top_k`)."""
        found = {name: self[name] for name in self.settings if name.startswith(OVERRIDES)}
        return {k.removeprefix(OVERRIDES): size for k, size in found.items() if size is not None}

    @property
    def model(self) -> Model | None:
        flavor = self.family and self.family.flavors.get(self[Names.flavor])
        return self.family.overridden(flavor, self.overrides) if self.family and flavor else None

    @property
    def model_title(self) -> str:
        name = self.family.title if self.family else self[Names.model_name]
        return f"{name} {self[Names.flavor]}" + " with overrides" * bool(self.overrides)


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Return settings with these checked values, of no known origin."""
    return {name: Setting(value, "") for name, value in values.items()}


def options_of(record: CellRecord) -> Options:
    """Return the options in `record`; any other option has TorchTitan's default."""
    return Options(load_stack(), settings_of(record.options))


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
