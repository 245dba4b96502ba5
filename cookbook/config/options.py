"""TorchTitan's options as a job will hold them: what is set, and its defaults for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.config.stack import ModelSizes, Stack


@dataclass(frozen=True)
class Setting:
    """One TorchTitan option with a checked value, and the place that set it."""

    value: Any
    place: str


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

    def over(self, *layers: Settings) -> Options:
        """These with `layers` laid over them, the later winning."""
        settings = dict(self.settings)
        for layer in layers:
            settings.update(layer)
        return Options(self.stack, settings)

    def place(self, name: str) -> str:
        """Where `name` was set, for the head of a message; it always ends with the name."""
        place = self.settings[name].place if name in self.settings else name
        return place if place.endswith(name) else f"{place}: {name}"

    @property
    def model(self) -> ModelSizes | None:
        """The sizes of the model that is named; None for one that the stack does not know."""
        flavors = self.stack.models.get(self["model.name"], {})
        return flavors.get(self["model.flavor"])
