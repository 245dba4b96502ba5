"""docs/self_check.md says what was found on GPUs, no more."""

from __future__ import annotations

import json

import pytest

from cookbook.base.paths import ROOT
from tests import self_check_faults

pytestmark = pytest.mark.titan

FOUND = ROOT / "docs/numerics/self-check-faults-h200.json"


def test_the_page_counts_the_faults_that_were_found_on_gpus() -> None:
    content = json.loads(FOUND.read_text(encoding="utf-8"))
    found, missed = content["found"], content["missed"]
    assert not missed
    page = (ROOT / "docs/self_check.md").read_text(encoding="utf-8")
    assert f"All {len(found)} faults were found on two H200" in page
    # They are faults that CI puts in, by their names of today.
    assert set(found) <= {fault.name for fault in self_check_faults.FAULTS}
    assert all(found.values())
