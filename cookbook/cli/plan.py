"""Run the verb `plan`: predict the fastest layouts of a recipe that fit in memory."""

import argparse
from typing import Any

from rich.console import Console
from rich.progress import track

from cookbook.base.errors import InputError
from cookbook.base.tables import fitted
from cookbook.cli.inspect import cell_request
from cookbook.config.recipe import load_recipe
from cookbook.config.resolve import merge_config
from cookbook.config.sweep import requested_pair
from cookbook.config.validate import validation_errors
from cookbook.plan import render
from cookbook.plan.search import evaluate, rejected_values, search, space_of
from cookbook.predict.hardware import documents_of, parse_documents, weights_of
from cookbook.predict.rank import model_of


def plan(arguments: argparse.Namespace) -> int:
    """Search for layouts, and print the best ones; return 1 if none fits."""
    if arguments.best < 0:
        raise InputError("--best", f"found {arguments.best}, allowed: 0 and up")
    request, recipe = cell_request(arguments), load_recipe(arguments.recipe)
    # Do not validate the recipe's own layout, which may not fit this cluster.
    parts = (recipe, *requested_pair(recipe, request), request.cluster, request.nodes)
    base = merge_config(*parts, overrides=request.overrides)
    # Fail before the search if the model is not supported or there is no GPU.
    model_of(base)
    weights = weights_of(base)
    named = parse_documents("--documents", arguments.documents) if arguments.documents else None
    documents = documents_of(base, named)
    if named and documents is None:
        reason = f"{base.options.model_title} attends to whole sequences, across documents"
        raise InputError("--documents", reason, "leave it out")
    overlays = {"precision": arguments.precision, "ep_backend": arguments.ep_backend}
    space = space_of(base, arguments.vary, request.overrides, overlays)
    cells = list(space.cells())
    refused = rejected_values(space, cells)
    if not cells:
        first = refused[0] if refused else "vary more"
        raise InputError("--vary", "leaves no layout that the rules allow", first)
    own = None if validation_errors(base) else evaluate(base, documents, weights)
    stderr = Console(stderr=True)
    shown: dict[str, Any] = {"console": stderr, "disable": not stderr.is_terminal}
    tried = track(cells, "Ctrl-C keeps these", transient=True, **shown)
    found = search(tried, documents, weights)
    ranked = found.ranked()
    if arguments.json:
        print(render.render_json(found, base, own, arguments.best, refused), end="")
    else:
        text = render.render_text(found, base, own, arguments.best, documents, len(cells), refused)
        print(fitted(text), end="")
    return 0 if ranked else 1
