"""What docs/memory.md says of the model's errors, beside its table, which its bench prints."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable

from cookbook.base.paths import ROOT
from cookbook.predict import memory

PAGE = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
ROW = re.compile(r"^\| (.+?) +\| +([\d.]+) \| +([\d.]+) \| +([+-]\d+)% \|", re.M)
# Measured when the model was finished; what stands in the table beside them was known before.
PREDICTED_FIRST = {
    "16B full DeepEP, batch 4": "+1",
    "16B full, batch 8": "-1",
    "16B full expandable, batch 4": "+1",
    "16B selective op expandable, batch 4": "-3",
    "8 layers eager, batch 2": "-4",
    "8 layers PP 2 interleaved, batch 8": "-11",
    "8 layers none DeepEP, batch 2": "-5",
    "debug none, batch 16": "-6",
    "debug full TP 2, batch 16": "-8",
}


def test_what_the_document_says_of_its_errors_is_in_its_table() -> None:
    rows = ROW.findall(PAGE)
    errors = {name: error for name, _, _, error in rows if "(earlier)" not in name}
    first = [errors.pop(name) for name in PREDICTED_FIRST]
    assert first == list(PREDICTED_FIRST.values())
    four = [errors.pop(name) for name in list(errors) if name.startswith("4 layers")]
    assert (len(four), len(errors)) == (6, 13)

    def said(group: Iterable[str]) -> tuple[str, str]:
        sizes = [abs(int(one)) for one in group]
        return f"{statistics.fmean(sizes):.1f}%", f"{max(sizes)}%"

    means = "err by {} on average, {} at most".format(*said(first))
    assert means in TEXT
    assert "predicted first, by {} and {}".format(*said(four)) in TEXT
    assert "the other thirteen by {} and {}".format(*said(errors.values())) in TEXT
    every = [int(error) for _, _, _, error in rows]
    assert f"at most {max(every)}% too high and {-min(every)}% too low" in TEXT


def test_a_cell_that_fits_would_fit_if_the_model_erred_as_it_did() -> None:
    rows = ROW.findall(PAGE)
    # Above a GiB, where rounding to a tenth is a few percent at most.
    worst = {True: 0.0, False: 0.0}
    for name, predicted, measured, error in rows:
        if float(measured) > 1:
            factor = min(float(measured) / float(predicted), 1 / (1 + (int(error) - 0.5) / 100))
            worst[" PP " in name] = max(worst[" PP " in name], factor)
    assert memory.FITS_PIPELINE * worst[True] < 1
    assert memory.FITS * worst[False] < 1
    assert f"one pipeline took {worst[True] - 1:.0%} more than predicted" in TEXT
    assert f"`fits` up to {memory.FITS:.0%} of the GPU" in TEXT
    assert f"with a pipeline up to {memory.FITS_PIPELINE:.0%}" in TEXT
