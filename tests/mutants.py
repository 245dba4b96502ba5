"""Put the faults of `tests/mutants.yaml` into copies of this checkout, one at a time.

    python -m tests.mutants [--check | --quick] [--only TEXT] [--jobs N]     (or: make mutants)

Run each fault's tests and print found or NOT FOUND. Exit with status 1 if one was not found or if
a test that found one also fails without it. `tests/random_mutants.py` generates faults instead.
"""

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from cookbook.base.paths import ROOT
from cookbook.base.yamlfile import read_yaml

LIST = Path(__file__).with_name("mutants.yaml")
# A fault can cause an endless loop; a timeout counts as found.
SECONDS = 400
# What most tests import; the driver's environment has no torch.
IMPORTED = (
    *("pytest", "hypothesis", "yaml", "jinja2", "submitit", "psutil", "pydantic"),
    *("torch", "torchtitan.train", "torchao.prototype.moe_training"),
)
# Python matches compiled modules to sources by size and modification time in seconds.
_times = itertools.count(1)


@dataclass(frozen=True)
class Mutant:
    """One fault: `was` occurs once in `file`; `tests` are arguments of pytest."""

    fault: str
    file: str
    was: str
    now: str
    tests: str

    def problem(self, root: Path = ROOT) -> str | None:
        """Return why the fault cannot be put in, else None."""
        path = root / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        times = path.read_text(encoding="utf-8").count(self.was)
        if times != 1:
            return f"{self.file}: {self.was!r} occurs {times} times, must occur once"
        if self.was == self.now or not self.tests:
            return f"{self.fault}: needs a change and tests"
        for word in self.tests.partition(" -k ")[0].split():
            name, *functions = word.partition("[")[0].split("::")
            text = (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""
            if not text or any(f"def {one}(" not in text for one in functions):
                return f"{self.fault}: there is no {word}"
        return None


def read_list(path: Path = LIST) -> list[Mutant]:
    """Return all faults in the order of the list."""
    files = read_yaml(path).content.items()
    return [Mutant(file=file, **fault) for file, faults in files for fault in faults]


def copy_tree(folder: Path) -> Path:
    """Copy the checkout without ignored files; link its environment, assets and kernels."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    installed = [str(path.relative_to(ROOT)) for path in ROOT.glob("build/flash_attention-*[0-9]")]
    for name in (".venv", "assets", *installed):
        if (ROOT / name).exists() and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to((ROOT / name).resolve())
    return folder


class Checkout:
    """A copy of the checkout and a process that runs tests in it, each run in a fork."""

    def __init__(self, folder: Path, modules: Sequence[str], seconds: float | None = None) -> None:
        self.folder = folder
        self._log = folder.with_name(f"{folder.name}.log")
        script = str(Path(__file__).with_name("forked_pytest.py"))
        environment = dict(os.environ)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._pytest = subprocess.Popen(
            [sys.executable, script, str(seconds or SECONDS), str(self._log), *modules],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run_tests(self, *tests: str) -> tuple[int | None, list[str]]:
        """Run pytest up to the first failure: its status (None: timeout), the failed tests."""
        words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "", *tests]
        assert self._pytest.stdin is not None and self._pytest.stdout is not None
        self._pytest.stdin.write(json.dumps(words) + "\n")
        self._pytest.stdin.flush()
        status, failed = json.loads(self._pytest.stdout.readline())
        return status, failed

    def output(self) -> str:
        """Return what the last run printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process."""
        self._pytest.communicate()

    def try_fault(self, file: str, content: str, *tests: str) -> tuple[str, list[str]]:
        """Run `tests` with `content` in `file`: found, NOT FOUND or an error; who found it."""
        path = self.folder / file
        original, stat = path.read_bytes(), path.stat()
        own_time = stat.st_mtime_ns + next(_times) * 10**9
        path.write_text(content, encoding="utf-8")
        os.utime(path, ns=(own_time, own_time))
        try:
            status, failed = self.run_tests(*tests)
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        # 2 and more: nothing was collected or an import failed, which proves nothing.
        words = {0: "NOT FOUND", 1: "found", None: "found by timeout"}
        return words.get(status, f"pytest ended with status {status}"), failed


@contextmanager
def checkouts(jobs: int, seconds: float | None = None) -> Iterator[SimpleQueue[Checkout]]:
    """Yield a queue of `jobs` copies of the checkout."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ExitStack() as ends:
        free: SimpleQueue[Checkout] = SimpleQueue()
        for number in range(jobs):
            checkout = Checkout(copy_tree(Path(scratch, str(number))), IMPORTED, seconds)
            ends.callback(checkout.close)
            free.put(checkout)
        yield free


def main(words: Sequence[str] | None = None) -> int:
    """Try the faults; return 0 if each was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only check that they can be put in")
    parser.add_argument(
        "--quick", action="store_true", help="one fault of each file, whose tests do not train"
    )
    parser.add_argument("--only", default="", help="faults whose description or file contains this")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(words)
    listed = read_list()
    if problems := list(filter(None, (one.problem() for one in listed))):
        print("\n".join(problems))
        return 1
    chosen = [one for one in listed if options.only in f"{one.fault} {one.file}"]
    if options.quick:
        # The last one listed of each file.
        short = (one for one in chosen if not {"titan", "slurm"} & set(one.tests.split("_")))
        chosen = [*{one.file: one for one in short}.values()]
    if not chosen:
        parser.error(f"no fault contains {options.only!r}")
    if options.check:
        return 0
    began, found, seen = time.monotonic(), 0, set()
    with checkouts(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:

        def attempt(one: Mutant) -> tuple[str, list[str]]:
            content = (ROOT / one.file).read_text(encoding="utf-8").replace(one.was, one.now)
            checkout = free.get()
            try:
                return checkout.try_fault(one.file, content, *shlex.split(one.tests))
            finally:
                free.put(checkout)

        for one, (said, by) in zip(chosen, pool.map(attempt, chosen), strict=True):
            found += said.startswith("found")
            seen |= set(by)
            print(f"{said:10} {one.file}: {one.fault}", flush=True)
        # A test that fails without the fault too has not found it.
        checkout = free.get()
        status = checkout.run_tests(*sorted(seen))[0] if seen else 0
        if status != 0:
            print("these fail without a fault:", checkout.output()[-3000:], sep="\n\n")
    print(f"{found} of {len(chosen)} faults found in {time.monotonic() - began:.0f} s")
    return int(found < len(chosen) or status != 0)


if __name__ == "__main__":
    raise SystemExit(main())
