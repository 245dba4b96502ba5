"""Puts the faults of `tests/mutants.yaml` into a copy of this checkout, one at a time.

    python -m tests.mutants [--ci] [--only TEXT] [--jobs N]     (or: make mutants)

For each it runs the tests that should see it, and prints found or NOT FOUND. Ends with status 1
where one was not found, or where the tests fail without a fault. Tools for mutation testing make
faults of their own by rules; none takes a list that people write.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import yaml

from cookbook.base.paths import ROOT

LIST = Path(__file__).with_name("mutants.yaml")
# A fault may make a loop endless; that is seen too.
SECONDS = 400
# What most tests import; the driver's environment has no torch.
IMPORTED = (
    *("pytest", "hypothesis", "yaml", "jinja2", "submitit", "tabulate", "psutil"),
    *("matplotlib.pyplot", "torch", "torchtitan.train", "torchao.prototype.moe_training"),
)
Given = TypeVar("Given")
Answer = TypeVar("Answer")
_KEYS = {"what", "file", "was", "now", "tests", "ci", "equivalent"}


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        was, now: a text that stands once in `file`, and what takes its place.
        tests: pytest's words.
        ci: whether CI runs it too; for those whose tests take a second or two.
        equivalent: why no test could see it; such a fault is only listed.
    """

    what: str
    file: str
    was: str
    now: str
    tests: str = ""
    ci: bool = False
    equivalent: str = ""

    def problem(self, root: Path = ROOT) -> str | None:
        """Why the fault cannot be put in; None where it can."""
        if not all(isinstance(text, str) for text in (self.was, self.now)):
            return "`was` and `now` must be texts: quote what YAML takes for a number"
        path = root / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        times = path.read_text(encoding="utf-8").count(self.was)
        if times != 1:
            return f"{self.was!r} stands {times} times in {self.file}, must stand once"
        if self.was == self.now:
            return "nothing is changed"
        if bool(self.tests) == bool(self.equivalent):
            return "must have either `tests` or `equivalent`"
        return None


def read_list(path: Path = LIST) -> list[Mutant]:
    """All faults of the list, in its order."""
    found = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        if unknown := set(entry) - _KEYS:
            raise ValueError(f"{path.name}: unknown keys {sorted(unknown)} at {entry.get('what')}")
        found.append(Mutant(**entry))
    return found


def copy_tree(folder: Path) -> Path:
    """The checkout without what is ignored; the environment and the assets are its own."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for name in (".venv", "assets"):
        if (ROOT / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to((ROOT / name).resolve())
    return folder


class Checkout:
    """A folder with a copy of the checkout, and a process that runs tests in it.

    Args:
        modules: what that process imports once for all runs.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self.folder = folder
        self._log = folder.with_name(f"{folder.name}.log")
        script = ROOT / "tests/forked_pytest.py"
        # Each run imports the cookbook anew, and need not compile what has not changed.
        compiling = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        self._pytest = subprocess.Popen(
            [sys.executable, str(script), str(SECONDS), str(self._log), *modules],
            cwd=folder,
            env=compiling,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run_tests(self, tests: str) -> int | None:
        """pytest's exit status for its words `tests`; None where it ran out of time."""
        words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", *shlex.split(tests)]
        assert self._pytest.stdin is not None and self._pytest.stdout is not None
        self._pytest.stdin.write(json.dumps(words) + "\n")
        self._pytest.stdin.flush()
        status: int | None = json.loads(self._pytest.stdout.readline())
        return status

    def output(self) -> str:
        """What the last run printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process; nothing is running in it."""
        self._pytest.communicate()


# Python takes a compiled module for that of its source by the time in seconds and the size of it.
_times = itertools.count(1)


def is_found(checkout: Checkout, mutant: Mutant) -> tuple[bool, str]:
    """Whether its tests see the fault, and in words how they ended."""
    path = checkout.folder / mutant.file
    original, stat = path.read_text(encoding="utf-8"), path.stat()
    own_time = stat.st_mtime_ns + next(_times) * 10**9
    path.write_text(original.replace(mutant.was, mutant.now), encoding="utf-8")
    os.utime(path, ns=(own_time, own_time))
    try:
        status = checkout.run_tests(mutant.tests)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if status is None:
        return True, "ran out of time"
    # 2 and more: nothing was collected, or an import failed, which says nothing of the tests.
    ends = {0: "NOT FOUND", 1: "found"}
    return status == 1, ends.get(status, f"pytest ended with status {status}")


def together(tests: Iterable[str]) -> list[str]:
    """pytest's words for all of `tests`: one run for each file, two where some are chosen by -k."""
    whole: set[str] = set()
    named, chosen = (defaultdict[str, list[str]](list) for _ in range(2))
    for words in sorted(set(tests)):
        places, _, expression = words.partition(" -k ")
        for place in places.split():
            file = place.partition("::")[0]
            if expression:
                chosen[file].append(f"({shlex.split(expression)[0]})")
            elif place == file:
                whole.add(file)
            else:
                named[file].append(place)
    return [
        *sorted(whole),
        *(" ".join(places) for file, places in sorted(named.items()) if file not in whole),
        *(
            f"{file} -k {shlex.quote(' or '.join(parts))}"
            for file, parts in sorted(chosen.items())
            if file not in whole
        ),
    ]


def why_not_clean(checkout: Checkout, tests: str) -> str:
    """Empty where the tests pass without a fault; else how they failed."""
    status = checkout.run_tests(tests)
    if status == 0:
        return ""
    return f"{tests}\npytest ended with status {status}:\n{checkout.output()[-3000:]}"


def _in_a_checkout(
    checkouts: SimpleQueue[Checkout], work: Callable[[Checkout, Given], Answer], given: Given
) -> Answer:
    checkout = checkouts.get()
    try:
        return work(checkout, given)
    finally:
        checkouts.put(checkout)


def main(words: Sequence[str] | None = None) -> int:
    """Try the faults; 0 where each was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="only those that CI runs")
    parser.add_argument("--only", default="", help="those whose `what` or file holds this")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(words)
    listed = read_list()
    chosen = [
        one
        for one in listed
        if options.only in f"{one.what} {one.file}"
        and not one.equivalent
        and (one.ci or not options.ci)
    ]
    if problems := [f"{one.what}: {why}" for one in listed if (why := one.problem())]:
        print("\n".join(problems))
        return 1
    if not chosen:
        parser.error(f"no fault of the list holds {options.only!r}")
    began, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        checkouts: SimpleQueue[Checkout] = SimpleQueue()
        with ExitStack() as ends:
            for number in range(options.jobs):
                checkout = Checkout(copy_tree(Path(scratch, str(number))), IMPORTED)
                ends.callback(checkout.close)
                checkouts.put(checkout)
            pool = ends.enter_context(ThreadPoolExecutor(options.jobs))
            tests = together(one.tests for one in chosen)
            clean = pool.map(partial(_in_a_checkout, checkouts, why_not_clean), tests)
            if failing := list(filter(None, clean)):
                print("these fail without a fault:", *failing, sep="\n\n")
                return 1
            found = pool.map(partial(_in_a_checkout, checkouts, is_found), chosen)
            for one, (is_seen, said) in zip(chosen, found, strict=True):
                missed += not is_seen
                print(f"{said:10} {one.file}: {one.what}", flush=True)
    equivalent = [one for one in listed if one.equivalent]
    print(
        f"{len(chosen) - missed} of {len(chosen)} faults found in "
        f"{time.monotonic() - began:.0f} s; in the whole list {len(equivalent)} are equivalent"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
