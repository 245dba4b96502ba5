"""Prints the table of the installed TorchTitan's options and models.

    python -m cookbook.titan.tt_0_2_2.option_table > cookbook/config/tables/2026.02.json

The driver reads the table instead of importing torch, so that `submit.py` answers at once; a test
holds the table against the installed TorchTitan.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from cookbook.base.family import Family
from cookbook.titan.tt_0_2_2.families import FAMILIES, REFUSED
from cookbook.titan.tt_0_2_2.job_config import JobConfig as CookbookJobConfig
from cookbook.titan.tt_0_2_2.text_data import DATASET


def option_table() -> dict[str, Any]:
    """Return each option's default by dotted name, or where that does not tell its kind, an entry.

    An entry has `kind` or `choices`, `optional`, and `default` where it is not None.
    """
    merged = ConfigManager._merge_configs(JobConfig, CookbookJobConfig)
    return dict(_entries(merged, ""))


def _entries(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            yield from _entries(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _entry(field)


def _entry(field: dataclasses.Field[Any]) -> Any:
    is_union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
    kinds = list(typing.get_args(field.type)) if is_union else [field.type]
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    names = {kind.__name__ for kind in kinds if isinstance(kind, type) and kind is not list}
    name = next((name for name in ("bool", "float", "int", "str") if name in names), "lists")
    entry: dict[str, Any] = {"kind": "list" if list[str] in kinds else name}
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            entry = {"choices": list(typing.get_args(kind))}
    if type(None) not in kinds:
        return (
            default if entry == {"kind": type(default).__name__} else {**entry, "default": default}
        )
    return {**entry, "optional": True, **({} if default is None else {"default": default})}


def family_table(family: Family) -> dict[str, Any]:
    """Return a family's entry, in which sizes that all flavors share stand once."""
    entry = dataclasses.asdict(family)
    flavors = entry["flavors"].values()
    first, *others = flavors
    shared = {key: size for key, size in first.items() if all(one[key] == size for one in others)}
    for sizes in flavors:
        for key in shared:
            del sizes[key]
    return {**entry, "shared": shared}


def main() -> None:
    """Print the table."""
    table = {
        "options": option_table(),
        "families": [family_table(parts.family) for parts in FAMILIES.values()],
        "refused_families": REFUSED,
        "datasets": [*DATASETS, DATASET],
    }
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
