"""setup.sh's FlashAttention-4, from stand-in wheels: on login nodes, GPU nodes and laptops."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.set_up import WHEEL_FILES, Checkout, copy_for_setup, write_wheel

pytestmark = pytest.mark.titan

OTHERS = ("--no-tokenizers", "--no-deepep")
INSTALLING = "setup: installing FlashAttention-4 99.1 (10 packages); about a minute"
SITE = ".venv/lib/python*/site-packages"


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
    has_gpu(checkout, "")
    return checkout


def has_gpu(checkout: Checkout, row: str) -> None:
    smi = checkout.folder.parent / "bin/nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    smi.write_text(f"#!/bin/sh\necho '{row}'\n" if row else "#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    checkout.environment["PATH"] = f"{smi.parent}:{os.environ['PATH']}"


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
    ("row", "is_wanted"),
    [
        ("", False),
        ("NVIDIA A100, 8.0, 81920, 580.1, GPU-a", False),
        ("NVIDIA H200, 9.0, 143771, 580.1, GPU-b", True),
        ("NVIDIA B200, 10.0, 183359, 580.1, GPU-c", True),
    ],
)
def test_a_machine_for_itself_gets_it_where_its_gpu_takes_it(
    checkout: Checkout, row: str, is_wanted: bool
) -> None:
    has_gpu(checkout, row)
    done = checkout.setup("--local")
    assert (done.returncode, is_installed(checkout)) == (0, is_wanted), done.stdout
    assert (INSTALLING in done.stdout) is is_wanted
    assert "FlashAttention-4 is not installed" not in done.stdout


def test_gpus_that_do_not_take_it_are_named(checkout: Checkout) -> None:
    has_gpu(checkout, "NVIDIA A100, 8.0, 81920, 580.1, GPU-a")
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
