"""A model's arguments as plain numbers, nested ones by dotted name."""

from __future__ import annotations

from typing import Any


def flat_numbers(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The numbers, words and switches in `fields`; `moe_args.top_k` is a nested one."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(flat_numbers(value, f"{prefix}{name}."))
        elif isinstance(value, int | float | str | bool) or value is None:
            flat[f"{prefix}{name}"] = value
    return flat
