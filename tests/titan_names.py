"""Names of loaded modules, to see which of them something has replaced."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_ROOTS = ("torchtitan", "torchao")
_TORCH = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor._random",
    "torch.nn.modules.module",
)
_MISSING = object()


def names() -> dict[str, Any]:
    """Every name of TorchTitan, TorchAO and PyTorch's main modules, by its dotted path.

    Attributes of a module's own classes and entries of its dictionaries count as names too.
    """
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name.split(".")[0] in _ROOTS or name in _TORCH):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                kind = type(value)  # not isinstance, for which deprecated objects warn
                if issubclass(kind, type) and value.__module__ == name:
                    found |= {f"{name}.{key}.{part}": v for part, v in vars(value).items()}
                elif issubclass(kind, dict) and not key.startswith("__"):
                    found |= {f"{name}.{key}[{part}]": v for part, v in value.items()}
    return found


def replaced(before: dict[str, Any]) -> set[str]:
    """The names of `before` that are gone or mean something else now."""
    now = names()
    return {name for name, value in before.items() if now.get(name, _MISSING) is not value}
