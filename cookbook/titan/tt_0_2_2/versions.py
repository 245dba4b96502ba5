"""Read the installed packages' versions and refuse those this package was not written for."""

import logging
import platform
from importlib.metadata import PackageNotFoundError, version

# This package relies on internals of exactly these versions.
KNOWN = {"torchtitan": "0.2.2", "torchao": "0.16.0"}

logger = logging.getLogger()


def refuse(reason: str) -> SystemExit:
    """Log `reason` as an error, and return an exception that exits this rank when raised."""
    logger.error(f"cookbook refuses: {reason}")
    return SystemExit(1)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_versions() -> None:
    """Refuse any version of TorchTitan or TorchAO other than those in `KNOWN`."""
    for package, known in KNOWN.items():
        if (found := installed(package)) is None or found.split("+")[0] != known:
            raise refuse(
                f"{__package__} was written for {package} {known}, found {found or 'none'}; "
                f"install {package}=={known} or leave out --experimental.custom_import"
            )


def versions() -> dict[str, str | None]:
    """Return the versions that affect a run's numbers, for its log and its result."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: installed(name) for name in ("torchtitan", "torchao", "deep_ep")},
        "flash_attn_4": installed("flash-attn-4"),
    }
