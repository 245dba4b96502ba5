"""Run pytest repeatedly in forks of one process that has imported large modules such as torch.

    python tests/forked_pytest.py SECONDS LOG MODULE ...    # in the folder of a checkout

Each line of standard input is a JSON list of pytest's arguments; each answer is a JSON list of the
exit status, null after SECONDS, and the names of failed tests. LOG has the output of the last run.
This project is not imported here: each run imports its current files.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock


def main(seconds: float, log: Path, modules: list[str]) -> None:
    """Answer each line of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Imports may print.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    for name in modules:
        # The driver's environment has no torch.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    # As with `python -m pytest`, in place of this file's folder.
    sys.path[0] = str(Path.cwd())
    resource_tracker.ensure_running()
    # pytest collects garbage ten times at its end: 0.7 s with torch's objects.
    gc.freeze()
    for line in sys.stdin:
        names = os.memfd_create("failed")
        child = os.fork()
        if not child:
            os.dup2(nothing, 0)
            printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(printed, descriptor)
            _run(json.loads(line), names)
        status = _wait(child, seconds)
        failed = os.pread(names, os.fstat(names).st_size, 0).decode()
        os.close(names)
        answers.write(json.dumps([status, failed.splitlines()]) + "\n")


class _Failed:
    def __init__(self, file: int) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Implement pytest's hook."""
        if report.failed:
            os.write(self._file, f"{report.nodeid}\n".encode())


def _fork_ranks_from_here() -> None:
    """Fork multiprocessing's fork server, which starts ranks, in place of importing torch anew."""

    def fork(program: object, words: object, descriptors: list[int]) -> int:
        child = os.fork()
        if not child:
            listener, alive = descriptors
            forkserver.main(listener, alive, [])
            os._exit(0)
        return child

    with mock.patch("multiprocessing.util.spawnv_passfds", fork):
        forkserver.ensure_running()


def _run(words: list[str], names: int) -> None:
    os.setsid()
    status = 3
    try:
        import pytest

        _fork_ranks_from_here()
        status = int(pytest.main(words, plugins=[_Failed(names)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    # With its descendants.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
