"""TorchTitan's options as a job will hold them: what is set, and its defaults for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.stack import ModelSizes, Stack


@dataclass(frozen=True)
class Setting:
    """One TorchTitan option with a checked value, and where it was set."""

    value: Any
    origin: str


Settings = Mapping[str, Setting]


@dataclass(frozen=True, eq=False)
class Options:
    """What a job sets, by dotted name; `options["training.steps"]` is what it then holds."""

    stack: Stack
    settings: Settings

    def __getitem__(self, name: str) -> Any:
        setting = self.settings.get(name)
        return self.stack.options[name].default if setting is None else setting.value

    def __contains__(self, name: str) -> bool:
        """Whether `name` is set."""
        return name in self.settings

    @property
    def values(self) -> dict[str, Any]:
        """What is set, by name."""
        return {name: setting.value for name, setting in self.settings.items()}

    def override(self, *layers: Settings) -> Options:
        """These with `layers` laid over them, the later winning."""
        settings = dict(self.settings)
        for layer in layers:
            settings.update(layer)
        return Options(self.stack, settings)

    def origin(self, name: str) -> str:
        """Where `name` was set, for the head of a message; it always ends with the name."""
        place = self.settings[name].origin if name in self.settings else name
        return place if place.endswith(name) else f"{place}: {name}"

    @property
    def model(self) -> ModelSizes | None:
        """The sizes of the model that is named; None for one that the stack does not know."""
        flavors = self.stack.models.get(self["model.name"], {})
        return flavors.get(self["model.flavor"])


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
    """How the ranks of a job are divided; every degree at least 1.

    `dp_shard` is resolved: TorchTitan's -1 (the ranks that are left) is replaced by the count, and
    is 0 where the other degrees leave none.
    """

    world: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp


def layout_of(options: Options, world: int) -> Layout:
    """The layout that `options` give a job of `world` ranks."""
    degrees = {short: options[name] for short, name in DEGREES.items()}
    if degrees["dp_shard"] == -1:
        others = degrees["dp_replicate"] * degrees["cp"] * degrees["tp"] * degrees["pp"]
        degrees["dp_shard"] = world // max(others, 1)
    return Layout(world=world, **degrees)


def argv_of(stack: Stack, settings: Settings) -> list[str]:
    """The words that set `settings`, in their order."""
    return [
        word
        for name, setting in settings.items()
        for word in stack.options[name].arguments(setting.value)
    ]


def parse_argv(words: Sequence[str], place: str, stack: Stack) -> Options:
    """The options that TorchTitan arguments set, checked; of an option named twice, the last.

    Args:
        words: as they stand on a command line, `--section.key=value` or `--section.key value`.
        place: what an error names as the place of the words.
    """
    values: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            raise InputError(
                place, f"found {word!r}", "TorchTitan options start with --section.key"
            )
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        section, _, key = name.rpartition(".")
        positive = f"{section}.{key.removeprefix('no_')}"
        is_negative = name not in stack.options and positive in stack.options
        option = stack.option(place, positive if is_negative else name)
        at = f"{place}: {option.name}"
        if option.kind == "bool":
            if equals:
                no = f"--{section}.no_{key}"
                raise InputError(at, f"takes no value, found {text!r}", f"write --{name} or {no}")
            values[option.name] = not is_negative
        elif option.kind == "lists" and not equals:
            items = []
            while index < len(words) and not words[index].startswith("--"):
                items.append(words[index].split(","))
                index += 1
            values[option.name] = option.check(at, items)
        else:
            if not equals:
                if index == len(words):
                    raise InputError(at, "has no value")
                text = words[index]
                index += 1
            values[option.name] = option.parse(at, text)
    return Options(stack, _placed(values, place))


def _placed(values: Mapping[str, Any], place: str) -> Settings:
    return {name: Setting(value, f"{place}: {name}") for name, value in values.items()}
