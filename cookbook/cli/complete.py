"""Complete words of a command line in the shell, by argcomplete."""

import argparse
from collections.abc import Iterable
from functools import partial

import argcomplete

from cookbook.config.recipe import KINDS, names_in
from cookbook.config.stack import load_stack
from cookbook.run.run import run_names

# The kinds of files whose names an argument takes.
_KINDS = {"recipe": ["", "sweep"], "source": [*KINDS], "target": [""]}
_KINDS |= {kind: [kind] for kind in ("sweep", "precision", "ep_backend", "cluster")}
_RUNS = ("run", "cell", "resume", "reference", "other")


def complete(parser: argparse.ArgumentParser) -> None:
    """Print what the word at the cursor may become, and exit; do nothing outside a completion."""
    verbs = next(one for one in parser._actions if isinstance(one.choices, dict))
    for verb in dict(verbs.choices or {}).values():
        for action in verb._actions:
            if action.choices is None and action.dest in (*_KINDS, *_RUNS, "set"):
                vars(action)["completer"] = partial(_choices, action.dest)
    argcomplete.autocomplete(parser)


def _choices(name: str, **_: object) -> Iterable[str]:
    if name in _KINDS:
        return [found for kind in _KINDS[name] for found in names_in(kind)]
    return run_names() if name in _RUNS else [f"{option}=" for option in load_stack().options]
