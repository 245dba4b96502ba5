"""The version or commit that a requirements file pins for each package.

Standard library only: the doctor reads the pins also where nothing is installed yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.paths import REQUIREMENTS

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]+)\s*"
    r"(?:==\s*(?P<version>[^\s;#]+)|@\s*(?P<source>\S+@(?P<commit>[0-9a-f]{7,40})))"
    r"\s*(?:;\s*extra\s*==\s*[\"'](?P<extra>\w+)[\"'])?"
)


@dataclass(frozen=True)
class Pin:
    """One pinned package; `value` is its version, or its commit where `source` is a repository."""

    name: str
    value: str
    source: str = ""
    extra: str = ""

    @property
    def requirement(self) -> str:
        """The line that pip takes, without the marker that keeps it out of a plain install."""
        return f"{self.name} @ {self.source}" if self.source else f"{self.name}=={self.value}"


def read_pins(path: Path = REQUIREMENTS) -> list[Pin]:
    """The pins of `path` in their order."""
    return [
        Pin(
            name=match["name"],
            value=match["version"] or match["commit"],
            source=match["source"] or "",
            extra=match["extra"] or "",
        )
        for line in path.read_text(encoding="utf-8").splitlines()
        if (match := _LINE.match(line))
    ]


def stack_name(path: Path = REQUIREMENTS) -> str:
    """The stack that `path` pins, from its first line (`# stack 2026.02`)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[0].removeprefix("# stack").strip() if lines else ""
