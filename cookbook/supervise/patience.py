"""Asks Slurm again where its controller is busy: a job that waited for days must not end for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from cookbook.run.slurm import NoAnswerError

T = TypeVar("T")
# Restarts of the controller, and storms of jobs, take minutes.
PATIENCE_S = 600.0
_PAUSE_S = 5.0


def ask_again(ask: Callable[[float], T]) -> T:
    """What `ask` answers, which gets the seconds that are left; it is asked for ten minutes.

    Raises:
        NoAnswerError: the last one, when the time is over.
    """
    deadline, is_said = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return ask(deadline - time.monotonic())
        except NoAnswerError as error:
            if time.monotonic() + _PAUSE_S > deadline:
                raise
            if not is_said:
                print(f"cookbook: preflight: waits for Slurm: {error}", file=sys.stderr, flush=True)
            is_said = True
            time.sleep(_PAUSE_S)
