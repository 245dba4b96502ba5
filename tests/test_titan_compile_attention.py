"""FlashAttention-4's kernels compiled without a GPU, by the real package: does a job find them?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from cookbook.install.attention import differences, flash_attention_pins

pytestmark = [pytest.mark.titan, pytest.mark.nightly]

# Ignored by git, and kept for the next time.
PACKAGES = ROOT / "build" / f"flash_attention-{sys.version_info.major}.{sys.version_info.minor}"
GPUS = {90: "sm_90a", 100: "sm_100a"}
# Forward, and of the backward its preparation, itself and what follows it, for few documents and
# for many; how many documents, in tiles of one size or three, and which tile is whose.
KERNELS = {
    90: {"fwd": 2, "bwd_pre": 2, "bwd": 2, "bwd_post": 2, "tile_cumsum": 3, "blocks_to_batch": 1},
    100: {"fwd": 2, "bwd_pre": 2, "bwd": 2, "bwd_post": 2, "tile_cumsum": 2, "blocks_to_batch": 1},
}


@pytest.fixture(scope="module")
def packages() -> dict[str, str]:
    """The environment of a Python that has FlashAttention-4; 0.5 GB, half a minute at first."""
    pins = flash_attention_pins()
    if differences(pins, [str(PACKAGES)]):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        part = PACKAGES.with_name(f"{PACKAGES.name}.part")
        for folder in (part, PACKAGES):
            shutil.rmtree(folder, ignore_errors=True)
        command = [*pip, "--no-deps", "--target", str(part)]
        done = subprocess.run(
            [*command, *(pin.requirement for pin in pins)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = f"FlashAttention-4 cannot be installed: {done.stdout.strip()[-300:]}"
            if os.environ.get("CI") == "true":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
        part.rename(PACKAGES)
    # What nvidia-cutlass-dsl's .pth file adds.
    folders = (PACKAGES, PACKAGES / "nvidia_cutlass_dsl/dsl_packages", ROOT)
    # Numbers of a user who tries something out.
    tried = {"FLASH_ATTENTION_ARCH": "sm_80", "FA_LOG_LEVEL": "1", "CUTE_DSL_ARCH": "sm_80"}
    return {**os.environ, **tried, "PYTHONPATH": os.pathsep.join(map(str, folders))}


@pytest.fixture(scope="module")
def compiled(packages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for Hopper and for Blackwell."""
    into = tmp_path_factory.mktemp("compiled")
    words = ["kernels", "--arch", "9.0;10.0", "--into", str(into)]
    done = subprocess.run(
        [sys.executable, "-m", "cookbook.install.attention", *words],
        env=packages,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for capability in GPUS:
        kept = json.loads((into / f"sm{capability}.json").read_text())
        folder = Path(kept["folder"])
        assert folder.parent == into and folder.name.startswith(f"sm{capability}-cuda1")
        assert sorted(kept["kernels"]) == names_of(folder)
    return into


def names_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.o"))


@pytest.mark.parametrize("capability", GPUS)
def test_each_kind_of_gpu_has_all_kernels_in_its_own_code(capability: int, compiled: Path) -> None:
    (folder,) = compiled.glob(f"sm{capability}-*")
    found: dict[str, int] = {}
    for name in names_of(folder):
        kind = Path(name).parts[1]
        found[kind] = found.get(kind, 0) + 1
        code = (folder / name).read_bytes()
        assert {gpu for gpu in GPUS.values() if gpu.encode() in code} == {GPUS[capability]}
    assert found == KERNELS[capability]


@pytest.mark.parametrize("capability", GPUS)
def test_a_job_compiles_no_kernel(
    capability: int, compiled: Path, packages: dict[str, str], tmp_path: Path
) -> None:
    """At other heads, lengths and scales, and with tensors that hold values."""
    # Without a GPU it does not know its processors.
    given = {
        "FLASH_ATTENTION_NUM_SMS": "140",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path),
    }
    unset = {"FLASH_ATTENTION_ARCH", "FA_LOG_LEVEL", "CUTE_DSL_ARCH"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention_job", str(capability), str(compiled)],
        env={name: value for name, value in packages.items() if name not in unset} | given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = compiled.glob(f"sm{capability}-*")
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded == sorted(str(tmp_path / name) for name in names_of(folder))
