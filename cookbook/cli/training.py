"""Run the verbs `export` (write a cell's weights) and `data` (count the tokens in text files)."""

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.base.text_files import find_sources, windows, write_lengths
from cookbook.base.tokenizer import Lengths
from cookbook.base.yamlfile import shown_path
from cookbook.cli.follow import named_cell
from cookbook.config.facts import Facts
from cookbook.config.options import options_of
from cookbook.run.folder import read_checkpoint, saved_steps
from cookbook.run.record import read_record
from cookbook.supervise.resume_point import last_good_step, saver_of

# A data set of the hub may have billions of documents.
_SAMPLE = 10_000


def export_weights(arguments: argparse.Namespace) -> int:
    """Write a cell's newest checkpoint from before a NaN, or that of `--step`, as safetensors."""
    run, cell = named_cell(arguments.cell)
    record = read_record(cell.record)
    saved = saved_steps(cell.checkpoints(record.options))
    whole = {one.step: one for each in saved if (one := read_checkpoint(*each)).damage is None}
    good, why = last_good_step(cell, saved)
    fit = [step for step in whole if good is None or step <= good]
    place = f"{run.name}/{cell.name}"
    if not whole:
        remedy = f"train with {Facts.checkpoints}: true; the last step is always saved"
        raise InputError(place, "has no whole checkpoint", remedy)
    for unfit in sorted(whole.keys() - fit):
        if arguments.step in (None, unfit):
            print(f"{place}: step-{unfit}: {why}", file=sys.stderr)
    if not fit and arguments.step is None:
        remedy = f"export one all the same with --step {min(whole)}"
        raise InputError(place, "has no checkpoint from before its NaN loss", remedy)
    step = arguments.step if arguments.step is not None else max(fit)
    if step not in whole:
        allowed = ", ".join(map(str, sorted(whole)))
        raise InputError("--step", f"found {step}, allowed: {allowed}")
    chosen = whole[step]
    if chosen.is_exported:
        native = next((f"; for another: --step {n}" for n in whole if not whole[n].is_exported), "")
        found = f"already holds safetensors files ({Facts.last_save_in_hf})"
        raise InputError(shown_path(chosen.path), found, f"use them there{native}")
    # A later attempt may have another tokenizer.
    options = options_of(saver_of(cell, step, record)[0] or record)
    if options.model and options.family and (why := options.family.unpublished(options.model)):
        raise InputError(place, f"has no published format: {why}")
    if find_spec("torch") is None:
        raise InputError(place, "cannot be exported without torch", "run: bash setup.sh")
    request = {
        "checkpoint": str(chosen.path.resolve()),
        "to": str(Path(arguments.to).resolve()),
        "model": options[Facts.model_name],
        "flavor": options[Facts.flavor],
        "overrides": options.overrides,
        "seq_len": options[Facts.seq_len],
        "dtype": arguments.dtype,
        "tokenizer": str(ROOT / (options[Facts.assets] or "")),
    }
    command = [sys.executable, "-m", f"{options.stack.hooks}.export", json.dumps(request)]
    return subprocess.run(command, cwd=ROOT).returncode


def count_texts(arguments: argparse.Namespace) -> int:
    import numpy

    if arguments.seq_len < 1:
        raise InputError("--seq-len", f"found {arguments.seq_len}, allowed: 1 and up")
    folder = Path(arguments.tokenizer)
    folder = folder.parent if folder.name == "tokenizer.json" else folder
    lengths_of = Lengths(folder).of
    sources, streamed = find_sources(arguments.files, arguments.text_key), ""
    lengths: list[int] = []
    # For each document, its source's weight divided by the number of tokens in that source.
    weights: list[float] = []
    for source in sources:
        first = len(lengths)
        rows = chain.from_iterable(part() for part in source.parts())
        for window in windows(islice(rows, _SAMPLE) if source.hub else rows):
            lengths += lengths_of([document.text() for document in window])
        if source.hub:
            streamed = f" (of {source.pattern} no more than {_SAMPLE:,})"
        if first == len(lengths):
            raise InputError(source.pattern, "has no documents", "remove it")
        weights += [source.weight / sum(lengths[first:])] * (len(lengths) - first)
    counts, order = numpy.array(lengths), numpy.argsort(lengths)
    middle = numpy.searchsorted(numpy.cumsum(numpy.array(weights)[order]), sum(weights) / 2)
    mean, median = numpy.average(counts, weights=weights), counts[order][middle]
    long = numpy.average(counts > arguments.seq_len, weights=counts * weights)
    write_lengths(sources, folder / "tokenizer.json", float(mean), float(median))
    mixed = " (as the weights mix them)" if len(sources) > 1 else ""
    print(
        f"documents  {len(counts):,}{streamed}\n"
        f"tokens     {counts.sum():,}\n"
        f"length     mean {mean:,.0f}, median {median:,}{mixed}, longest {counts.max():,} tokens\n"
        f"           {long:.0%} of the tokens are in documents longer than {arguments.seq_len:,}\n"
        "check and plan use these lengths where a recipe with these files attends by document\n"
    )
    return 0
