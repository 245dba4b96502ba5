"""TorchTitan on a CPU: BF16 products by way of float32, memory without holes."""

import pytest

from tests.started import python

pytestmark = pytest.mark.titan

# Large blocks, of which all but every tenth are freed: what stays is a tenth of them.
_HOLES = """
import resource
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
# As TorchTitan after each logged step.
cpu.CpuDevice("cpu").reset_peak_memory_stats()
print(full, mib() - before)
"""
# Kernels are replaced for a whole process. What oneDNN says of this CPU is put in its mouth.
_BEGIN = """
import torch
from cookbook.titan.tt_0_2_2 import cpu
# Importing the package has asked this CPU.
cpu.multiply_bf16_in_float32.cache_clear()
cpu.cpu_has_bf16 = lambda: SUPPORTED
cpu.prepare_cpu()
names = [one + end for one in ("mm", "addmm", "bmm", "baddbmm") for end in ("", ".out")]
print({"tt_0_2_2/cpu.py" in torch._C._dispatch_dump(f"aten::{name}") for name in names})
torch.manual_seed(0)
"""
_PRODUCTS = """
cpu.multiply_bf16_in_float32()
a, b, c = (torch.randn(48, 48, dtype=torch.bfloat16) for _ in range(3))
x, y, z = (torch.randn(3, 48, 48, dtype=torch.bfloat16) for _ in range(3))
scaled = dict(beta=0.5, alpha=-2)

def near(found, exact):
    assert found.dtype is torch.bfloat16, found.dtype
    error = (found.double() - exact).abs()
    # Half of BF16's last place, and what a float32 sum may add to it.
    assert bool((error <= exact.abs() * 2**-8 * 1.01 + 1e-4).all()), error.max()

A, B, C, X, Y, Z = (one.double() for one in (a, b, c, x, y, z))
near(torch.mm(a, b), A @ B)
near(torch.addmm(c, a, b, **scaled), C / 2 - 2 * (A @ B))
near(torch.addmm(c[0], a, b), C[0] + A @ B)
near(torch.bmm(x, y), X @ Y)
near(torch.baddbmm(z, x, y, **scaled), Z / 2 - 2 * (X @ Y))
near(torch.nn.functional.linear(x, a, c[0]), X @ A.T + C[0])
for empty in (torch.empty(0, dtype=a.dtype), torch.full_like(a, torch.nan)):
    near(torch.mm(a, b, out=empty), A @ B)
    near(empty, A @ B)
into = torch.full_like(x, torch.nan)
torch.baddbmm(z, x, y, out=into, **scaled)
near(into, Z / 2 - 2 * (X @ Y))
near(torch.full_like(c, 2.0).addmm_(a, b), 2 + A @ B)

ends = torch.tensor([16, 16, 48], dtype=torch.int32)
groups = [A[:16] @ X[0], A[:0] @ X[1], A[16:] @ X[2]]
near(torch._grouped_mm(a, x, offs=ends), torch.cat(groups))

w = a.clone().requires_grad_()
(w @ b).backward(c)
near(w.grad, C @ B.T)
# Nothing but the product, so that no C++ is compiled.
near(torch.compile(lambda a, b: torch.mm(a, b))(a, b), A @ B)

# Other types are as they were, and so are refusals.
single = torch.randn(48, 48)
exact = single.double() @ single.double()
assert (torch.mm(single, single).double() - exact).abs().max() < 1e-4
assert torch.mm(A, B).dtype is torch.float64
for wrong in (
    lambda: torch.mm(a, single),
    lambda: torch.mm(a, b, out=torch.empty(48, 48)),
    lambda: torch.mm(a, b[:3]),
    lambda: torch.addmm(single, a, b),
):
    try:
        wrong()
    except RuntimeError:
        continue
    raise AssertionError("a wrong product was taken")
print("ok")
"""


def run(script: str, supported: bool) -> list[str]:
    done = python("-c", _BEGIN.replace("SUPPORTED", str(supported)) + script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Overriding a previously registered kernel" not in done.stderr
    return done.stdout.splitlines()


def test_products_are_those_of_float32_and_other_types_are_left_alone() -> None:
    assert run(_PRODUCTS, supported=False)[-2:] == ["{True}", "ok"]


@pytest.mark.nightly
def test_freed_tensors_leave_no_holes_and_a_cpu_with_bf16_keeps_its_kernels() -> None:
    *_, replaced, sizes = run(_HOLES, supported=True)
    full, left = map(int, sizes.split())
    assert replaced == "{False}" and full >= 290 and left <= 60
