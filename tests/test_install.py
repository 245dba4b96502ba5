"""What installed packages can do, whether a build is the one that is wanted, and for which GPUs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.install import attention, deepep
from cookbook.install.attention import NOT_NEEDED, main
from cookbook.install.deepep import (
    CannotBuildError,
    DeepEp,
    Plan,
    Toolkit,
    is_built,
    make_plan,
)

BUILT = Plan("c0ffee", "2.10.0", "12.8", "9.0;10.0", "3.4.5")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DeepEP as `BUILT` says; the stamp of its build."""
    stamp = tmp_path / "deep_ep.json"
    stamp.write_text(json.dumps(asdict(BUILT)))
    found = DeepEp("1.2.1", BUILT.commit, tmp_path, True)
    monkeypatch.setattr(deepep, "STAMP", stamp)
    monkeypatch.setattr(deepep, "find_deepep", lambda: found)
    torch = SimpleNamespace(version=BUILT.torch)
    monkeypatch.setattr(deepep, "find_distribution", lambda name: torch)
    monkeypatch.setattr(deepep, "torch_cuda", lambda: BUILT.cuda)
    monkeypatch.setattr(deepep, "deepep_pin", lambda: SimpleNamespace(value=BUILT.commit))
    return stamp


@pytest.mark.parametrize(
    ("change", "arch", "expected"),
    [
        ({}, "", True),
        ({}, "9.0", True),
        ({}, "9.0;10.0", True),
        ({}, "10.0;12.0", False),
        ({"commit": "another"}, "", False),
        ({"torch": "another"}, "", False),
        ({"cuda": "another"}, "", False),
        (None, "", False),
    ],
)
def test_a_build_counts_for_its_pin_its_torch_and_its_gpus(
    built: Path, change: dict[str, str] | None, arch: str, expected: bool
) -> None:
    if change is None:
        built.unlink()
    else:
        built.write_text(json.dumps(asdict(BUILT) | change))
    assert is_built(arch) == expected


@pytest.mark.parametrize(
    ("releases", "reason"),
    [
        ([], "no CUDA toolkit"),
        ([(13, 0)], "torch is built for CUDA 12.8 and the toolkit found is CUDA 13.0"),
        ([(11, 8), (13, 0)], "the major versions must agree"),
        # It goes on with the one that fits, up to the next obstacle.
        ([(13, 0), (12, 4)], r"CUDA 12.4 in /cuda-12 cannot compile for GPUs 10.0"),
    ],
)
def test_the_toolkit_is_of_torchs_major_version(
    built: Path, monkeypatch: pytest.MonkeyPatch, releases: list[tuple[int, int]], reason: str
) -> None:
    found = [Toolkit(Path(f"/cuda-{release[0]}"), release) for release in releases]
    monkeypatch.setattr(deepep, "_find_toolkits", lambda cuda: found)
    with pytest.raises(CannotBuildError, match=reason):
        make_plan("10.0")


def gpu(capability: float, driver: str = "580.1") -> Any:
    return SimpleNamespace(model=SimpleNamespace(compute_capability=capability), driver=driver)


class Machine:
    """One with FlashAttention-4, whose compiler is noted and not run."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.gpus: tuple[Any, ...] = ()
        self.asked: list[str] = []
        self.failing = ""
        self.lacks: list[str] = []

    def run(
        self, command: list[str], env: dict[str, str], **_: Any
    ) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "cookbook.titan.common.compile_attention"]
        # A user's own variable would be in the kernels.
        assert "FA_LOG_LEVEL" not in env
        self.asked.append(env["FLASH_ATTENTION_ARCH"])
        if env["FLASH_ATTENTION_ARCH"] == self.failing:
            return subprocess.CompletedProcess(command, 1, "")
        kernel = Path(env["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"], "fwd/a.o")
        kernel.parent.mkdir()
        kernel.touch()
        made = json.dumps({"cuda": 13, "kernels": ["fwd/a.o"]})
        return subprocess.CompletedProcess(command, 0, f"some warning\n{made}\n")

    def kernels(self, *words: str) -> int:
        return main(["kernels", "--into", str(self.into), *words])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "kernels")
    monkeypatch.setattr(attention, "installed_gpus", lambda: machine.gpus)
    monkeypatch.setattr(attention, "differences", lambda pins: machine.lacks)
    monkeypatch.setattr("subprocess.run", machine.run)
    monkeypatch.setenv("FA_LOG_LEVEL", "1")
    return machine


@pytest.mark.parametrize(
    ("arch", "here", "expected"),
    [
        ("10.0", (9.0, 9.0), ["sm_100"]),
        ("9.0a;10.0a", (), ["sm_90", "sm_100"]),
        ("", (9.0, 9.0), ["sm_90"]),
        ("8.9;10.3;12.0", (), ["sm_103"]),
        ("", (8.0,), []),
        ("", (), []),
    ],
)
def test_kernels_are_for_the_gpus_that_are_asked_for_else_for_those_here(
    arch: str, here: tuple[float, ...], expected: list[str], machine: Machine
) -> None:
    machine.gpus = tuple(map(gpu, here))
    assert machine.kernels("--arch", arch) == (0 if expected else NOT_NEEDED)
    assert machine.asked == expected


@pytest.mark.parametrize("change", ["kernel", "stamp", "cut", "driver", "packages", "python"])
def test_old_kernels(change: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus = (gpu(9.0),)
    assert machine.kernels() == machine.kernels() == 0 and len(machine.asked) == 1
    stamp = machine.into / "sm90.json"
    match change:
        case "kernel":
            (machine.into / "sm90-cuda13/fwd/a.o").unlink()
        case "stamp":
            stamp.unlink()
        case "cut":
            stamp.write_text(stamp.read_text()[:20])
        case "driver":
            # Another compiler may be taken with it.
            machine.gpus = (gpu(9.0, "570.1"),)
        case "packages":
            monkeypatch.setattr(attention, "flash_attention_pins", list)
        case "python":
            monkeypatch.setattr("platform.python_version", lambda: "4.0.0")
    assert machine.kernels() == machine.kernels() == 0 and len(machine.asked) == 2
