"""Generate random faults in cookbook/ and count how many the driver's tests find.

    python -m tests.random_mutants [--number 60] [--seed 1] [--since COMMIT] [FILE ...]

Measure once which test functions run each line (coverage.py), then change one operator, constant,
condition or statement at a time and run at most 30 of the functions that run that line. Files run
by ranks and in other processes are left out: their lines have no measured tests.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cookbook.base.paths import ROOT
from tests.mutants import checkouts

MOST_TESTS = 30
SECONDS = 120
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def _change(node: ast.AST) -> str | None:
    """Put a fault into `node`; None if there is none for its kind."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPS:
        was, node.op = node.op, _SWAPS[type(node.op)]()  # type: ignore[assignment]
        return f"{type(was).__name__} -> {type(node.op).__name__}"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        was_op, node.ops[0] = node.ops[0], _SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
        return f"{type(was_op).__name__} -> {type(node.ops[0]).__name__}"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        node.value = not value if isinstance(value, bool) else value + 1
        return f"{value} -> {node.value!r}"
    if isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return "condition negated"
    if isinstance(node, ast.Return) and node.value is not None:
        if isinstance(node.value, ast.Constant) and node.value.value is None:
            return None
        node.value = ast.Constant(None)
        return "return None"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
        return "call removed"
    return None


def _parse(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def measure(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Return the test functions that run each line of each file, as arguments of pytest."""
    rc = folder / "coveragerc"
    rc.write_text(
        "[run]\ndynamic_context = test_function\nsource = cookbook\n"
        f"data_file = {folder / 'data'}\n[json]\nshow_contexts = true\n"
    )
    coverage = [sys.executable, "-m", "coverage"]
    words = ["-q", "-p", "no:cacheprovider", "-m", "not slurm and not titan and not browser"]
    words += ["--ignore-glob=*/test_titan_*", "--ignore-glob=*/test_slurm_*"]
    run = [*coverage, "run", f"--rcfile={rc}", "-m", "pytest", *words]
    # A failing test does not hinder: it is left out where it would have to find a fault.
    subprocess.run(run, cwd=ROOT, stdout=sys.stderr)
    out = folder / "lines.json"
    command = [*coverage, "json", f"--rcfile={rc}", "-q", "-o", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    files = json.loads(out.read_text())["files"]
    return {
        name: {
            int(line): sorted({_test(context) for context in contexts if context})
            for line, contexts in content["contexts"].items()
        }
        for name, content in files.items()
    }


def _test(context: str) -> str:
    """`tests.test_a.test_b` -> `tests/test_a.py::test_b`."""
    module, _, name = context.rpartition(".")
    return f"{module.replace('.', '/')}.py::{name}"


def _changed_since(commit: str) -> list[str]:
    command = ["git", "diff", "--name-only", "--diff-filter=d", commit, "--", "cookbook/"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split() if name.endswith(".py")]


def main(words: Sequence[str] | None = None) -> int:
    """Try the faults and print the rate; 0 if at least `--least` percent are found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="only in these files")
    parser.add_argument("--since", metavar="COMMIT", help="only in files changed since COMMIT")
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=65.0, help="percent that must be found")
    options = parser.parse_args(words)
    jobs = os.cpu_count() or 1
    with checkouts(jobs, SECONDS) as free:
        checkout = free.get()
        lines = measure(checkout.folder.parent)
        free.put(checkout)
        chosen = set(options.files or (_changed_since(options.since) if options.since else lines))
        places = []
        for name in sorted(chosen & set(lines)):
            for index, node in enumerate(list(ast.walk(_parse(name)))):
                line = getattr(node, "lineno", 0)
                if lines[name].get(line) and _change(node) is not None:
                    places.append((name, index, line))
        print(len(places), "possible faults")
        drawn = random.Random(options.seed).sample(places, min(options.number, len(places)))

        def attempt(place: tuple[str, int, int]) -> tuple[str, str]:
            name, index, line = place
            tree = _parse(name)
            said = _change(list(ast.walk(tree))[index])
            tests = lines[name][line]
            if len(tests) > MOST_TESTS:
                tests = random.Random(f"{options.seed}{place}").sample(tests, MOST_TESTS)
            checkout = free.get()
            try:
                ended, _ = checkout.try_fault(name, ast.unparse(tree) + "\n", *tests)
            finally:
                free.put(checkout)
            return ended, f"{name}:{line}: {said}"

        with ThreadPoolExecutor(jobs) as pool:
            ends = []
            for ended, place in pool.map(attempt, drawn):
                ends.append(ended)
                print(f"{ended:10} {place}", flush=True)
    # An import that fails would be seen by anybody.
    found = sum(ended != "NOT FOUND" for ended in ends)
    rate = 100 * found / max(1, len(ends))
    print(f"{found} of {len(ends)} faults found: {rate:.0f}%")
    return int(rate < options.least)


if __name__ == "__main__":
    raise SystemExit(main())
