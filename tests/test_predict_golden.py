"""No predicted term changes unless somebody means it, in any kind of cell; no torch is asked."""

import json
from typing import Any

import pytest

from tests.predictions import PREDICTIONS, predictions

KEPT: dict[str, Any] = json.loads(PREDICTIONS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return predictions()


def test_every_cell_is_kept(now: dict[str, Any]) -> None:
    assert [*now] == [*KEPT], "renew it: make golden"


@pytest.mark.parametrize("name", KEPT)
def test_a_cells_terms_are_as_kept(name: str, now: dict[str, Any]) -> None:
    found, kept = now[name], KEPT[name]
    assert found.keys() == kept.keys()
    for key, value in kept.items():
        is_text = isinstance(value, str)
        assert found[key] == (value if is_text else pytest.approx(value, rel=1e-5)), key
