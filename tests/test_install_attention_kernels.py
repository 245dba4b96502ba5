"""When set-up compiles FlashAttention-4's kernels, for which GPUs, and when it need not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.install import attention_kernels
from cookbook.install.attention_kernels import FAILED, NOT_NEEDED, TO_COMPILE, capabilities, main
from cookbook.titan.common import kernel_cache


def gpu(capability: float, driver: str = "580.1") -> Any:
    return SimpleNamespace(model=SimpleNamespace(compute_capability=capability), driver=driver)


class Machine:
    """One with FlashAttention-4, whose compiler is noted and not run."""

    def __init__(self, compiled: Path) -> None:
        self.compiled = compiled
        self.gpus: tuple[Any, ...] = ()
        self.asked: list[str] = []
        self.failing: set[str] = set()
        self.lacks: list[str] = []

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "cookbook.titan.common.compile_attention"]
        self.asked.append(command[3])
        if command[3] in self.failing:
            return subprocess.CompletedProcess(command, 1, "")
        folder = self.compiled / f"sm{command[3]}-cuda13"
        (folder / "fwd").mkdir(parents=True, exist_ok=True)
        (folder / "fwd/a.o").touch()
        kept = json.dumps({"folder": str(folder), "kernels": ["fwd/a.o"]})
        return subprocess.CompletedProcess(command, 0, f"some warning\n{kept}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "kernels")
    monkeypatch.setattr(kernel_cache, "COMPILED", machine.compiled)
    monkeypatch.setattr(attention_kernels, "installed_gpus", lambda: machine.gpus)
    monkeypatch.setattr(attention_kernels, "differences", lambda pins: machine.lacks)
    monkeypatch.setattr("subprocess.run", machine.run)
    return machine


@pytest.mark.parametrize(
    ("arch", "here", "expected"),
    [
        ("10.0", (9.0, 9.0), [100]),
        ("9.0a;10.0a", (), [90, 100]),
        ("", (9.0, 9.0), [90]),
        ("10.3;12.0", (), [103]),
        ("", (8.0,), []),
        ("", (), []),
    ],
)
def test_kernels_are_for_the_gpus_that_are_asked_for_else_for_those_here(
    arch: str, here: tuple[float, ...], expected: list[int], machine: Machine
) -> None:
    machine.gpus = tuple(map(gpu, here))
    assert capabilities(arch) == expected


def test_what_is_there_is_not_compiled_again(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--arch", "9.0;10.0"]
    assert main([*both, "--plan"]) == TO_COMPILE and not machine.asked
    assert capsys.readouterr().out == "FlashAttention-4's kernels for GPUs 9.0 and 10.0\n"
    assert main(["--arch", "9.0"]) == 0 and machine.asked == ["90"]
    assert main([*both, "--plan"]) == TO_COMPILE
    assert capsys.readouterr().out == "FlashAttention-4's kernels for GPUs 10.0\n"
    assert main(both) == 0 and machine.asked == ["90", "100"]
    assert main([*both, "--plan"]) == main(both) == 0 and len(machine.asked) == 2


@pytest.mark.parametrize("change", ["kernel", "stamp", "cut", "driver", "packages", "python"])
def test_what_was_made_from_something_else_or_is_not_whole_is_compiled_anew(
    change: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus = (gpu(9.0),)
    assert main([]) == main([]) == 0 and len(machine.asked) == 1
    stamp = machine.compiled / "sm90.json"
    match change:
        case "kernel":
            (machine.compiled / "sm90-cuda13/fwd/a.o").unlink()
        case "stamp":
            stamp.unlink()
        case "cut":
            stamp.write_text(stamp.read_text()[:20])
        case "driver":
            # Another compiler may be taken with it.
            machine.gpus = (gpu(9.0, "570.1"),)
        case "packages":
            monkeypatch.setattr(attention_kernels, "flash_attention_pins", list)
        case "python":
            monkeypatch.setattr("platform.python_version", lambda: "4.0.0")
    assert main([]) == 0 and len(machine.asked) == 2
    assert main([]) == 0 and len(machine.asked) == 2


def test_a_failure_is_tried_again_and_stops_no_other_kind(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.failing = {"90"}
    assert main(["--arch", "9.0;10.0"]) == FAILED
    assert capsys.readouterr().err == "no kernels for GPUs 9.0\n"
    machine.failing = set()
    assert main(["--arch", "9.0;10.0"]) == 0
    assert machine.asked == ["90", "100", "90"]


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        (["flash-attn-4 is missing"], "it is not installed at its pins"),
        ([], "no Hopper or Blackwell GPU here tells for which; pass --arch 10.0 for B200"),
    ],
)
def test_it_says_why_nothing_is_compiled(
    lacks: list[str], reason: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.lacks = lacks
    machine.gpus = (gpu(8.0),)
    assert main([]) == main(["--plan"]) == NOT_NEEDED and not machine.asked
    assert reason in capsys.readouterr().out
