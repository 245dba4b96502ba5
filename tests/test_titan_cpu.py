"""What a rehearsal without GPUs needs of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.titan

# Large blocks, of which all but every tenth are freed: what stays is a tenth of them.
_HOLES = """
import resource, torch
from cookbook.titan.tt_0_2_2.cpu import prepare_cpu
prepare_cpu()
def mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
# A block that large, once freed, makes glibc take all smaller ones from its heap.
large = torch.ones(31 << 18)
del large
before = mib()
blocks = [torch.ones(1 << 18) for _ in range(300)]
full = mib() - before
kept = blocks[::10]
del blocks
print(full, mib() - before)
"""


def test_freed_tensors_leave_no_holes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HOLES],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""},
        timeout=200,
        check=True,
    )
    full, left = map(int, done.stdout.split()[-2:])
    assert full >= 290
    assert left <= 60
