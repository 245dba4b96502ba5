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
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from cookbook.titan.common.arguments import flat_numbers
from cookbook.titan.tt_0_2_2.job_config import JobConfig as CookbookJobConfig
from cookbook.titan.tt_0_2_2.model_args import flavors
from cookbook.titan.tt_0_2_2.text_data import DATASET


def option_table() -> dict[str, dict[str, Any]]:
    """One entry an option, by its dotted name: kind, default, choices, whether None is allowed."""
    merged = ConfigManager._merge_configs(JobConfig, CookbookJobConfig)
    return dict(_entries(merged, ""))


def _entries(section: Any, prefix: str) -> typing.Iterator[tuple[str, dict[str, Any]]]:
    for field in dataclasses.fields(section):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            yield from _entries(field.type, f"{name}.")
        else:
            yield name, _entry(field)


def _entry(field: dataclasses.Field[Any]) -> dict[str, Any]:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    kinds = _members(field.type)
    entry: dict[str, Any] = {"default": default}
    if type(None) in kinds:
        entry["optional"] = True
        kinds = [kind for kind in kinds if kind is not type(None)]
    literals = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
    if literals:
        return {"kind": "choice", "choices": list(typing.get_args(literals[0])), **entry}
    if list[str] in kinds:
        return {"kind": "list", **entry}
    names = {kind.__name__ for kind in kinds if isinstance(kind, type) and kind is not list}
    for kind in ("bool", "float", "int", "str"):
        if kind in names:
            return {"kind": kind, **entry}
    return {"kind": "lists", **entry}


def _members(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return list(typing.get_args(kind))
    return [kind]


def model_table() -> dict[str, dict[str, int]]:
    """What layouts must divide and kernels must take, by flavor of deepseek_v3."""
    return {
        flavor: {
            "n_layers": args.n_layers,
            "n_heads": args.n_heads,
            "vocab_size": args.vocab_size,
            "num_experts": args.moe_args.num_experts,
            "top_k": args.moe_args.top_k,
            "qk_head_dim": args.qk_nope_head_dim + args.qk_rope_head_dim,
            "v_head_dim": args.v_head_dim,
        }
        for flavor, args in flavors().items()
    }


def argument_table() -> dict[str, dict[str, Any]]:
    """All arguments of the flavors, which memory and time are counted from."""
    return {flavor: flat_numbers(dataclasses.asdict(args)) for flavor, args in flavors().items()}


def main() -> None:
    """Print the table."""
    table = {
        "options": option_table(),
        "models": {"deepseek_v3": model_table()},
        "model_args": {"deepseek_v3": argument_table()},
        "datasets": [*DATASETS, DATASET],
    }
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
