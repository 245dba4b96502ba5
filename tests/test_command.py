"""How commands end: their status, and streams that are closed, full, gone or ASCII."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.start import start

SUBMIT = [sys.executable, "submit.py"]


def through_shell(redirection: str, command: list[str]) -> list[str]:
    return ["bash", "-c", f'"$@" {redirection}', "bash", *command]


@pytest.mark.parametrize("words", [["list"], ["--help"], ["doctor", "--cluster", "local"]])
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_output_is_no_error(tmp_path: Path, words: list[str], closed: str) -> None:
    done = start(through_shell(closed, [*SUBMIT, *words]), tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    # Where the training packages are missing, the doctor finds that problem.
    assert done.returncode == 0 or (words[0] == "doctor" and done.returncode == 1)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("return 7", 7, ""),
        ("raise InputError('a.yaml', 'is wrong')", 2, "test: a.yaml: is wrong\n"),
        ("raise JobError('it failed')", 1, "test: it failed\n"),
        ("open('/no/such/file')", 1, "test: /no/such/file: No such file or directory\n"),
        ("raise OSError(28, 'No space left on device')", 1, "test: No space left on device\n"),
        ("raise BrokenPipeError(32, 'Broken pipe')", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("sys.exit('words')", 1, "words\n"),
    ],
)
def test_each_end_has_its_status(tmp_path: Path, work: str, status: int, said: str) -> None:
    program = (
        "import sys\n"
        "from cookbook.base.errors import InputError, JobError, run_command\n"
        f"def work():\n    print('before')\n    {work}\n"
        "sys.exit(run_command('test', work))\n"
    )
    done = start([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (status, "before\n", said)


def test_a_fault_keeps_its_traceback(tmp_path: Path) -> None:
    program = "from cookbook.base.errors import run_command; run_command('test', lambda: 1 // 0)"
    done = start([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "ZeroDivisionError" in done.stderr
