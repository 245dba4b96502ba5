"""The versions of the installed packages, and a refusal of those that are not known here."""

from __future__ import annotations

import logging
import platform
from importlib.metadata import PackageNotFoundError, version

# This package uses doors and names that exist, with the meaning that it expects, in these versions.
TORCHTITAN = "0.2.2"
TORCHAO = "0.16.0"

logger = logging.getLogger()


def refuse(reason: str) -> SystemExit:
    """The exception that ends this rank with `reason` as the one line to read in its log."""
    logger.error(f"cookbook refuses: {reason}")
    return SystemExit(1)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_versions() -> None:
    """Refuse a TorchTitan or TorchAO that this package was not written for."""
    for package, known in (("torchtitan", TORCHTITAN), ("torchao", TORCHAO)):
        found = installed(package)
        if found is None or found.split("+")[0] != known:
            raise refuse(
                f"{__package__} was written for {package} {known}, found {found or 'none'}; "
                f"install {package}=={known} or leave out --experimental.custom_import"
            )


def versions() -> dict[str, str | None]:
    """The versions that decide what a run computes, for its log and its result."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "torchtitan": installed("torchtitan"),
        "torchao": installed("torchao"),
        "deep_ep": installed("deep_ep"),
        "flash_attn_4": installed("flash-attn-4"),
    }
