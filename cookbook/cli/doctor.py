"""The verb `doctor`: apart from the others, since it must work where no package is installed."""

from __future__ import annotations

import argparse

from cookbook.doctor.__main__ import main


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine against the stack and the cluster profile, or prove its kernels."""
    words = ["--json"] if arguments.json else []
    if arguments.cluster:
        words += ["--cluster", arguments.cluster]
    if arguments.numerics:
        words.append("--numerics")
    if arguments.output:
        words += ["--output", arguments.output]
    return main(words)
