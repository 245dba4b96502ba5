"""Write the tables that documents have from data: `make docs`.

    python -m bench.tables [--check]      # --check: write nothing, exit with status 1 if one is old

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench import convergence, gradient_table, memory, step_times
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT


def _gradients(name: str, table: int) -> str:
    path = ROOT / f"docs/evidence/numerics/{name}.json"
    tables = gradient_table.render(json.loads(path.read_text(encoding="utf-8")))
    return tables.split("\n\n")[table]


TABLES: dict[str, Callable[[], str]] = {
    "convergence": convergence.render,
    "memory": memory.render,
    "time": lambda: step_times.tables([*step_times.compare(step_times.read_points())]),
    "gradients": lambda: _gradients("gradients", 0),
    "faults": lambda: _gradients("gradients", 1),
    "gradients-h200": lambda: _gradients("gradients-h200", 0),
}
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> list[Path]:
    return sorted(ROOT.glob("docs/**/*.md"))


def rewrite(text: str) -> str:
    """Return a page with its tables made anew."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]().strip()}\n\n{found[3]}"

    return _TABLE.sub(replace, text)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if one is old"
    )
    check, old = parser.parse_args(words).check, []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        if (after := rewrite(before)) != before:
            old.append(path.name)
            if not check:
                write_whole(path, after)
    print(f"{'old' if check else 'written'}: {', '.join(old) or 'none'}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
