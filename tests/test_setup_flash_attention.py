"""setup.sh's FlashAttention-4, from stand-in wheels: on login nodes, GPU nodes and laptops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.set_up import WHEEL_FILES, Checkout, copy_for_setup, write_wheel
from tests.stand_in_gpus import B200

pytestmark = pytest.mark.titan

OTHERS = ("--no-tokenizers", "--no-deepep")
INSTALLING = "setup: installing FlashAttention-4 99.1 (10 packages); about a minute"
SITE = ".venv/lib/python*/site-packages"
A100 = {"name": "NVIDIA A100", "capability": [8, 0]}


COMPILER = """
import json, sys
from cookbook.titan.common.kernel_cache import folder_of
folder = folder_of(int(sys.argv[1]), 13)
folder.mkdir(parents=True)
(folder / "a.o").touch()
print(json.dumps({"folder": str(folder), "kernels": ["a.o"]}))
"""


def compiled_by(checkout: Checkout, text: str) -> None:
    """In the place of what compiles FlashAttention-4's kernels, which needs the package itself."""
    (checkout.folder / "cookbook/titan/common/compile_attention.py").write_text(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Versions that no machine has; no GPU, whatever this machine has."""
    checkout = copy_for_setup(tmp_path)
    requirements = checkout.folder / "requirements.txt"
    pins = re.compile('^(.+)==.+( ; extra == "flash_attention")$', re.MULTILINE)
    requirements.write_text(pins.sub(r"\1==99.1\2", requirements.read_text()))
    wheels = Path(checkout.environment["PIP_FIND_LINKS"])
    for name in pins.findall(requirements.read_text()):
        write_wheel(wheels, name[0], "99.1", WHEEL_FILES.get(name[0], ()))
    compiled_by(checkout, COMPILER)
    return checkout


def is_installed(checkout: Checkout) -> bool:
    return bool([*checkout.folder.glob(f"{SITE}/flash_attn/cute")])


def test_a_login_node_without_gpus_gets_it_once(checkout: Checkout) -> None:
    first = checkout.setup(*OTHERS)
    assert first.returncode == 0, first.stdout
    assert INSTALLING in first.stdout
    compilers = {path.name for path in checkout.folder.glob(f"{SITE}/nvidia_cutlass_dsl/**/*.so")}
    assert is_installed(checkout)
    assert compilers == {"_cutlass_ir.cu12.cp3.so", "_cutlass_ir.cu13.cp3.so"}
    assert checkout.setup(*OTHERS, "--quiet").stdout == ""
    # A new pin is installed into the environment that is there.
    requirements = checkout.folder / "requirements.txt"
    requirements.write_text(
        requirements.read_text().replace("flash-attn-4==99.1", "flash-attn-4==99.2")
    )
    write_wheel(Path(checkout.environment["PIP_FIND_LINKS"]), "flash-attn-4", "99.2")
    assert "installing FlashAttention-4 99.2" in checkout.setup(*OTHERS).stdout


def test_it_can_be_left_out(checkout: Checkout) -> None:
    done = checkout.setup(*OTHERS, "--no-flash-attention")
    assert done.returncode == 0, done.stdout
    assert "FlashAttention-4" not in done.stdout and not is_installed(checkout)


@pytest.mark.parametrize(
    ("gpus", "is_wanted"), [((), False), ((A100,), False), (({},), True), ((B200,), True)]
)
def test_a_machine_for_itself_gets_it_where_its_gpu_takes_it(
    checkout: Checkout, gpus: tuple[dict[str, Any], ...], is_wanted: bool
) -> None:
    checkout.has_gpus(*gpus)
    done = checkout.setup("--local")
    assert (done.returncode, is_installed(checkout)) == (0, is_wanted), done.stdout
    assert (INSTALLING in done.stdout) is is_wanted
    assert "FlashAttention-4 is not installed" not in done.stdout


def test_gpus_that_do_not_take_it_are_named(checkout: Checkout) -> None:
    checkout.has_gpus(A100)
    done = checkout.setup(*OTHERS)
    assert done.returncode == 0, done.stdout
    reason = "it needs Hopper or Blackwell GPUs; here are GPUs 8.0"
    assert f"FlashAttention-4 is not installed: {reason}" in done.stdout
    assert not is_installed(checkout)


def test_what_cannot_be_had_is_a_failure_and_the_rest_goes_on(checkout: Checkout) -> None:
    del checkout.environment["PIP_FIND_LINKS"]
    done = checkout.setup(*OTHERS)
    assert done.returncode == 1
    assert "| ERROR: No matching distribution found for flash-attn-4==99.1" in done.stdout
    assert "not done: FlashAttention-4" in done.stdout
    assert "ready: " in done.stdout


def kernels_of(checkout: Checkout) -> set[str]:
    folder = checkout.folder / ".venv/.cookbook/attention_kernels"
    return {str(path.relative_to(folder)) for path in folder.rglob("*.o")}


def test_kernels_are_compiled_once_for_the_gpus_that_are_named(checkout: Checkout) -> None:
    first = checkout.setup(*OTHERS)
    assert "FlashAttention-4's kernels are not compiled, each node's first job" in first.stdout
    assert not kernels_of(checkout)
    done = checkout.setup(*OTHERS, "--arch", "9.0,10.0")
    assert done.returncode == 0, done.stdout
    said = "compiling FlashAttention-4's kernels for GPUs 9.0 and 10.0; a minute for each kind"
    assert f"setup: {said} of GPU" in done.stdout
    assert kernels_of(checkout) == {"sm90-cuda13/a.o", "sm100-cuda13/a.o"}
    assert checkout.setup(*OTHERS, "--arch", "9.0;10.0", "--quiet").stdout == ""


def test_kernels_that_cannot_be_compiled_are_a_warning(checkout: Checkout) -> None:
    compiled_by(checkout, "raise SystemExit('no such compiler')\n")
    done = checkout.setup(*OTHERS, "--arch", "10.0")
    assert done.returncode == 0, done.stdout
    assert "  | no such compiler" in done.stdout and "not done" not in done.stdout
    assert "each node's first job compiles these kernels; to try again, run" in done.stdout
