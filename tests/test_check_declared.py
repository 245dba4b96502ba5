"""Check compares what the model of each pipeline stage has with what the precision declares."""

from __future__ import annotations

import pytest

from cookbook.check.declared import undeclared
from tests.check_cells import cell_of

LINEAR = {"grouped_gemms": "mxfp8", "linear_layers": "mx"}
# A stage of dense layers that the filter leaves alone, and one without a layer to quantize.
NEITHER = {"grouped_gemms": None, "linear_layers": "bf16"}
ELSE = {"grouped_gemms": "fp8_rowwise", "linear_layers": "mx"}


@pytest.mark.parametrize(
    ("stages", "differ"),
    [
        ([LINEAR], []),
        ([LINEAR, NEITHER], []),
        ([NEITHER, LINEAR], []),
        ([NEITHER, NEITHER], ["grouped_gemms mxfp8", "linear_layers mx"]),
        ([LINEAR, ELSE], ["grouped_gemms mxfp8"]),
    ],
)
def test_one_stage_without_such_layers_has_no_say(
    stages: list[dict[str, str | None]], differ: list[str]
) -> None:
    cell = cell_of("deepseek_v3_16b", precision="mxfp8_linear")
    found = list(undeclared(cell, [{"active": stage} for stage in stages]))
    assert [one.level for one in found] == ["error"] * len(differ)
    for one, words in zip(found, differ, strict=True):
        assert f"precision mxfp8_linear declares {words}, and in the model" in one.reason
