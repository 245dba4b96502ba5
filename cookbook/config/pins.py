"""The packages that `requirements.txt` pins, and the name of the stack that they make."""

import re
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.paths import REQUIREMENTS

_LINE = re.compile(
    r"([A-Za-z0-9_.-]+)\s*(?:==\s*([^\s;#]+)|@\s*(\S+@([0-9a-f]{7,40})))"
    r"\s*(?:;\s*extra\s*==\s*[\"'](\w+)[\"'])?"
)


@dataclass(frozen=True)
class Pin:
    """A pinned package; `value` is its version, or its commit if `source` is a repository."""

    name: str
    value: str
    source: str = ""
    extra: str = ""

    @property
    def requirement(self) -> str:
        """The package and its pin, in the form that `pip install` accepts."""
        return f"{self.name} @ {self.source}" if self.source else f"{self.name}=={self.value}"


def read_pins(path: Path = REQUIREMENTS) -> list[Pin]:
    found = map(_LINE.match, path.read_text(encoding="utf-8").splitlines())
    rows = (match.groups("") for match in found if match)
    return [Pin(name, version or sha, url, extra) for name, version, url, sha, extra in rows]


def stack_name(path: Path = REQUIREMENTS) -> str:
    """Return the name of the stack from the first line of `path` (`# stack 2026.02`)."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# stack").strip()
