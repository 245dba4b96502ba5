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

from cookbook.base.paths import ROOT
from cookbook.base.yamlfile import read_yaml

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
    # A key that stands twice is refused.
    for entry in read_yaml(path).content["faults"]:
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
    # FlashAttention-4, where tests have installed it, is 0.5 GB.
    installed = [str(path.relative_to(ROOT)) for path in ROOT.glob("build/flash_attention-*[0-9]")]
    for name in (".venv", "assets", *installed):
        if (ROOT / name).exists() and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to((ROOT / name).resolve())
    return folder


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended.

    Attributes:
        status: its exit status; None where it ran out of time.
        failed: the names of the tests that failed, such as `tests/test_a.py::test_b[c]`.
    """

    status: int | None
    failed: list[str]


@dataclass(frozen=True)
class Tried:
    """What came of a fault.

    Attributes:
        is_found: whether its tests saw it.
        said: in words how they ended.
        by: pytest's words for the tests that saw it; without the fault they must pass.
        seconds: how long it took.
    """

    is_found: bool
    said: str
    by: tuple[str, ...]
    seconds: float


class Checkout:
    """A folder with a copy of the checkout, and a process that runs tests in it.

    Args:
        modules: what that process imports once for all runs.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self.folder = folder
        self._log = folder.with_name(f"{folder.name}.log")
        script = Path(__file__).with_name("forked_pytest.py")
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

    def run_tests(self, *tests: str) -> Ended:
        """Run pytest with its words `tests`, up to the first test that fails."""
        words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        assert self._pytest.stdin is not None and self._pytest.stdout is not None
        self._pytest.stdin.write(json.dumps(words) + "\n")
        self._pytest.stdin.flush()
        return Ended(*json.loads(self._pytest.stdout.readline()))

    def output(self) -> str:
        """What the last run printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process; nothing is running in it."""
        self._pytest.communicate()


# Python takes a compiled module for that of its source by the time in seconds and the size of it.
_times = itertools.count(1)


def try_fault(checkout: Checkout, mutant: Mutant) -> Tried:
    """Whether its tests see the fault."""
    began = time.monotonic()
    path = checkout.folder / mutant.file
    original, stat = path.read_text(encoding="utf-8"), path.stat()
    own_time = stat.st_mtime_ns + next(_times) * 10**9
    path.write_text(original.replace(mutant.was, mutant.now), encoding="utf-8")
    os.utime(path, ns=(own_time, own_time))
    words = shlex.split(mutant.tests)
    try:
        ended = checkout.run_tests(*words)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seconds = time.monotonic() - began
    if ended.status is None:
        return Tried(True, "ran out of time", tuple(words), seconds)
    # 2 and more: nothing was collected, or an import failed, which says nothing of the tests.
    ends = {0: "NOT FOUND", 1: "found"}
    said = ends.get(ended.status, f"pytest ended with status {ended.status}")
    by = tuple(ended.failed) if ended.status == 1 else ()
    return Tried(ended.status == 1, said, by, seconds)


def together(seen: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """pytest's words for all the tests that saw a fault: one run for the named ones of a file."""
    named: defaultdict[str, set[str]] = defaultdict(set)
    others = set()
    for words in seen:
        if all("::" in word for word in words):
            for word in words:
                named[word.partition("::")[0]].add(word)
        else:
            others.add(words)
    return [*(tuple(sorted(names)) for _, names in sorted(named.items())), *sorted(others)]


def why_not_clean(checkout: Checkout, tests: Sequence[str]) -> str:
    """Empty where the tests pass without a fault; else how they failed."""
    status = checkout.run_tests(*tests).status
    if status == 0:
        return ""
    said = f"pytest ended with status {status}:\n{checkout.output()[-3000:]}"
    return f"{shlex.join(tests)}\n{said}"


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
    # Tests wait, for processes and times: two jobs leave two cores idle now and then.
    parser.add_argument("--jobs", type=int, default=3)
    options = parser.parse_args(words)
    listed = read_list()
    chosen = [
        one
        for one in listed
        if options.only in f"{one.what} {one.file}"
        and not one.equivalent
        and (one.ci or not options.ci)
    ]
    if problems := [f"{one.what}: {why}" for one in listed if (why := one.problem(ROOT))]:
        print("\n".join(problems))
        return 1
    if not chosen:
        parser.error(f"no fault of the list holds {options.only!r}")
    began, missed, jobs = time.monotonic(), 0, min(options.jobs, len(chosen))
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        checkouts: SimpleQueue[Checkout] = SimpleQueue()
        with ExitStack() as ends:
            for number in range(jobs):
                checkout = Checkout(copy_tree(Path(scratch, str(number))), IMPORTED)
                ends.callback(checkout.close)
                checkouts.put(checkout)
            pool = ends.enter_context(ThreadPoolExecutor(jobs))
            tried = pool.map(partial(_in_a_checkout, checkouts, try_fault), chosen)
            saw = []
            for one, came in zip(chosen, tried, strict=True):
                missed += not came.is_found
                saw.append(came.by)
                print(f"{came.said:10} {came.seconds:5.1f} s  {one.file}: {one.what}", flush=True)
            # A test that fails without the fault too has not seen it.
            clean = pool.map(
                partial(_in_a_checkout, checkouts, why_not_clean), together(filter(None, saw))
            )
            if failing := list(filter(None, clean)):
                print("these fail without a fault:", *failing, sep="\n\n")
                return 1
    equivalent = [one for one in listed if one.equivalent]
    print(
        f"{len(chosen) - missed} of {len(chosen)} faults found in "
        f"{time.monotonic() - began:.0f} s; in the whole list {len(equivalent)} are equivalent"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
