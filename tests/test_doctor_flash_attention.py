"""The doctor on FlashAttention-4: its pins, its files, and a driver that its compiler can use."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cookbook.base.gpus import NVIDIA_SMI
from cookbook.config.stack import read_pins
from cookbook.doctor.check import Finding
from cookbook.doctor.checks import is_ready
from cookbook.doctor.surroundings import Answer
from tests.doctor_node import B200_ROW, COMPILER, COMPILER_FILE, H200_ROW, Node, whole_node

NAME = "flash attention"
PINS = {pin.name: pin.value for pin in read_pins() if pin.extra == "flash_attention"}
VERSION = PINS["flash-attn-4"]
A100_ROW = "NVIDIA A100, 8.0, 81920, 580.1, GPU-c\n"

Break = Callable[[Node], object]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return whole_node(tmp_path)


def remove(path: str) -> Break:
    def act(node: Node) -> None:
        target = node.folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return act


def uninstall(name: str) -> Break:
    return remove(f"site/{name.replace('-', '_')}-{PINS[name]}.dist-info")


def gpu(row: str) -> Break:
    return lambda node: node.answers.update({NVIDIA_SMI: Answer(0, row)})


@pytest.mark.parametrize(
    ("break_it", "state", "found"),
    [
        (
            uninstall("flash-attn-4"),
            "warning",
            "not installed: cells with model.attention=flash_attention_4 are refused",
        ),
        (
            lambda node: node.install("quack-kernels", "0.4.0"),
            "problem",
            f"quack-kernels is 0.4.0, pinned {PINS['quack-kernels']}",
        ),
        (uninstall("einops"), "problem", "einops is missing"),
        (remove("site/flash_attn/cute"), "problem", f"{VERSION} without the files of its kernels"),
        (remove(COMPILER), "problem", f"{VERSION} without the files of its compiler"),
        (
            remove(COMPILER_FILE.format(12)),
            "problem",
            f"{VERSION}: its compiler is for CUDA 13, which driver 570.195.03 does not take",
        ),
        (gpu(H200_ROW), "ok", f"{VERSION}, its compiler for CUDA 12 (driver 570.195.03)"),
        (
            gpu(B200_ROW.replace("570.195.03", "580.1")),
            "ok",
            f"{VERSION}, its compiler for CUDA 13 (driver 580.1)",
        ),
        (gpu(A100_ROW), "not here", "FlashAttention-4 needs Hopper or Blackwell GPUs"),
    ],
)
def test_each_finding(node: Node, break_it: Break, state: str, found: str) -> None:
    break_it(node)
    finding = node.findings()[NAME]
    assert (finding.state, finding.found) == (state, found)
    assert bool(finding.remedy) == (state in ("warning", "problem"))
    assert is_ready(list(node.findings().values())) == (state != "problem")


def test_the_cluster_s_gpus_count_on_a_login_node(node: Node) -> None:
    node.become_login_node()
    # It has no driver to compare with.
    expected = Finding(NAME, "ok", f"{VERSION}, its compiler for CUDA 12 and 13")
    assert node.findings("soperator-b200")[NAME] == expected


def test_a_machine_that_trains_on_its_cpu_has_no_line(node: Node) -> None:
    node.answers[NVIDIA_SMI] = Answer(None)
    assert NAME not in node.findings(local=True)
