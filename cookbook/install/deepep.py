"""What DeepEP needs from the installed packages, and what its build holds.

Nothing is imported from torch or DeepEP: login nodes lack the GPU driver that they load.
"""

from __future__ import annotations

import json
import mmap
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.install.packages import find_distribution, package_folder

# DeepEP 29d31c0 uses NVSHMEM's queue layout of 3.3.9 and later.
OLDEST_NVSHMEM = (3, 3, 9)


def torch_cuda(path: Sequence[str] | None = None) -> str:
    """The CUDA version that torch is built for, e.g. "12.8"; empty for none."""
    folder = package_folder("torch", path)
    if folder is None or not (folder / "version.py").is_file():
        return ""
    text = (folder / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


@dataclass(frozen=True)
class Nvshmem:
    """The NVSHMEM wheel that torch brings: its folder and version."""

    folder: Path
    version: str

    @property
    def new_enough(self) -> bool:
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.version)[:3])
        return numbers >= OLDEST_NVSHMEM


def find_nvshmem(path: Sequence[str] | None = None) -> Nvshmem | None:
    folder = package_folder("nvidia.nvshmem", path)
    # DeepEP links the host library by the file name it finds and the device library statically.
    if folder is None or not (folder / "lib/libnvshmem_device.a").is_file():
        return None
    major = torch_cuda(path).split(".")[0]
    found = find_distribution(f"nvidia-nvshmem-cu{major}", path)
    return Nvshmem(folder, found.version) if found else None


@dataclass(frozen=True)
class DeepEp:
    """An installed DeepEP: version, the commit that pip built, and what its library holds."""

    version: str
    commit: str
    library: Path | None
    internode: bool


def find_deepep(path: Sequence[str] | None = None) -> DeepEp | None:
    """The installed DeepEP; `internode` says whether it can send between nodes.

    With NVSHMEM the library needs `libnvshmem_host.so`; without it, its inter-node functions are
    compiled to an assertion that says so.
    """
    found = find_distribution("deep_ep", path)
    if found is None:
        return None
    try:
        commit = json.loads(found.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"]
    except (ValueError, KeyError):
        commit = ""
    library = None
    for entry in sys.path if path is None else path:
        for candidate in sorted(Path(entry).glob("deep_ep_cpp*.so")):
            library = library or candidate
    internode = library is not None and (
        holds(library, b"libnvshmem_host.so")
        and not holds(library, b"NVSHMEM is disabled during compilation")
    )
    return DeepEp(found.version, str(commit), library, internode)


def holds(library: Path, text: bytes) -> bool:
    """Whether the bytes of `text` stand in `library`."""
    with library.open("rb") as file:
        if library.stat().st_size == 0:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
