#!/usr/bin/env python3
"""Runs `cookbook.cli.main` under the cookbook's own Python.

Pythons that are too old for the cookbook also read this file, so it has no newer syntax.
"""
# PYTHON_ARGCOMPLETE_OK

import sys

OLDEST_PYTHON = (3, 11)
# Marks the second start. Unlike a variable, `-X` does not reach the programs that are started from
# here, and a wrapper around Python cannot lose it.
AGAIN = "started_again"


def start() -> int:
    """Start again under the Python of VENV where this is another one, else run the command."""
    import os
    import shlex
    from pathlib import Path

    root = Path(__file__).resolve().parent
    chosen = os.environ.get("VENV")
    venv = Path(chosen or root / ".venv")
    python = venv / "bin/python"
    set_up = f"run: bash {shlex.quote(str(root / 'setup.sh'))}"
    # `python submit.py` works without activating what setup.sh made.
    # A link that is there, wherever it leads: its target may be in another user's private home.
    has_python = os.path.lexists(str(python))
    if not chosen and (venv / ".cookbook/unfinished").exists():
        # A set-up that failed; this Python may have all that is needed.
        has_python = False
    if has_python and Path(sys.prefix).resolve() != venv.resolve():
        if AGAIN in sys._xoptions:
            found = f"does not run in this environment, but in {sys.prefix}"
        else:
            command = [str(python), "-X", AGAIN, str(root / "submit.py"), *sys.argv[1:]]
            try:
                os.execv(command[0], command)
            except OSError as error:
                found = f"does not start: {error.strerror}"
        remedy = "name a virtual environment, or unset VENV" if chosen else set_up
        return refuse(f"{'VENV=' if chosen else ''}{venv}: its bin/python {found}; {remedy}")
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:2]))
        return refuse(f"{sys.executable}: is Python {version}, 3.11 or later is needed; {set_up}")
    sys.path.insert(0, str(root))
    from cookbook.cli.main import main

    return main(sys.argv[1:])


def refuse(message: str) -> int:
    print(f"submit.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        status = start()
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
