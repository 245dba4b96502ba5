"""GPUs as nvidia-smi lists them, and those of them that CUDA shows."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from cookbook.base import gpus
from cookbook.base.gpus import (
    NVIDIA_SMI,
    Gpu,
    InstalledGpu,
    installed_gpus,
    parse_nvidia_smi,
    peak_tflops,
    select_visible,
    visible_gpus,
)

H200 = Gpu("NVIDIA H200", 9.0, 140.4)
A, B = "GPU-98822d69-3857-60a7-432d-d2f07c01937b", "GPU-af8d6c48-55af-fd5f-dead-4a982160bd0d"
# What a machine with two H200 printed.
ROWS = "".join(f"NVIDIA H200, 9.0, 143771, 580.159.04, {uuid}\n" for uuid in (A, B))
PAIR = (InstalledGpu(H200, "580.159.04", A), InstalledGpu(H200, "580.159.04", B))


def test_a_row_is_a_gpu() -> None:
    assert parse_nvidia_smi(ROWS) == PAIR


@pytest.mark.parametrize(
    ("output", "models"),
    [
        ("", []),
        ("No devices were found\n", []),
        ("NVIDIA H200, [N/A], 143771, 580.1, GPU-a\n", []),
        ("NVIDIA GB10, 12.1, [N/A], 580.1, GPU-a\n", [Gpu("NVIDIA GB10", 12.1, 0.0)]),
        ("NVIDIA X, rev. 2, 9.0, 1024, 580.1, GPU-a\n", [Gpu("NVIDIA X, rev. 2", 9.0, 1.0)]),
        ("NVIDIA H200, 9.0, 143771\n", []),
        ("a warning\n" + ROWS, [H200, H200]),
    ],
)
def test_rows_that_say_less(output: str, models: list[Gpu]) -> None:
    assert [gpu.model for gpu in parse_nvidia_smi(output)] == models


def test_a_profile_gives_what_a_model_has_and_no_more() -> None:
    """Driver and UUID belong to a machine; a key of the YAML for them would mean nothing."""
    assert [field.name for field in fields(Gpu)] == ["name", "compute_capability", "memory_gib"]


# Value, and the GPUs that CUDA counted and named under it: driver 580.159.04, two H200.
SEEN: list[tuple[str | None, str]] = [
    (None, "01"),
    ("", ""),
    (" ", ""),
    ("-1", ""),
    ("0", "0"),
    ("1", "1"),
    ("1,0", "10"),
    ("0,0", ""),
    ("0,-1,1", "0"),
    ("0,5,1", "0"),
    ("5", ""),
    (" 1", "1"),
    ("1 ,0", "10"),
    ("0, 1", "01"),
    ("0x1", "0"),
    ("1gpu,0b", "10"),
    ("+1", "1"),
    ("-0", "0"),
    ("01", "1"),
    ("0,,1", "0"),
    (",0", ""),
    ("1,0,1", ""),
    ("0,1,5,0", "01"),
    ("0,1,0,5", ""),
    ("0,-1,0", "0"),
    ("a0", ""),
    ("٠", ""),
    ("99999999999999999999", ""),
    (A, "0"),
    (B, "1"),
    (A[:8], "0"),
    (A.upper(), "0"),
    (f"{A}x", "0"),
    ("GPU-", ""),
    (f"GPU-,{A}", ""),
    (f"{B},{A}", "10"),
    (f"{A} ,{B}", "01"),
    (f"{A}, {B}", "0"),
    (f"{A},{A}", ""),
    (f"{A},{A[:12]}", ""),
    (f"{A},0", "0"),
    (f"0,{B}", "0"),
    (f"GPU-nope,{A}", ""),
    (f"{A},GPU-nope,{B}", "0"),
    (f" {A}", ""),
    (A.removeprefix("GPU-"), ""),
    (A.lower(), ""),
    ("MIG-x", ""),
]


@pytest.mark.parametrize(("chosen", "seen"), SEEN, ids=[repr(chosen) for chosen, _ in SEEN])
def test_cuda_visible_devices_is_read_as_cuda_reads_it(chosen: str | None, seen: str) -> None:
    assert select_visible(PAIR, chosen) == tuple(PAIR[int(index)] for index in seen)


def test_gpus_without_uuids_are_still_several() -> None:
    nameless = [InstalledGpu(H200, "580.1", "[N/A]")] * 3
    assert len(select_visible(nameless, "0,2")) == 2


def stand_in(folder: Path, body: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (f"cat <<'END'\n{ROWS}END", 2),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", 0),
        # Rows of a query that failed are not trusted.
        (f"cat <<'END'\n{ROWS}END\nexit 15", 0),
        ("printf 'caf\\351, 9.0, 1024, 580.1, GPU-a\\n'", 1),
    ],
)
def test_nvidia_smi_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, count: int
) -> None:
    # It answers only the very query whose columns are parsed.
    query = " ".join(NVIDIA_SMI[1:])
    stand_in(tmp_path, f'[ "$*" = "{query}" ] || exit 2\n{body}')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert len(installed_gpus()) == count


def test_without_nvidia_smi_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_gpus() == ()


def test_the_environment_selects_and_every_gpu_stays_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, f"cat <<'END'\n{ROWS}END")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{B[:9]}")
    visible_gpus.cache_clear()
    try:
        assert visible_gpus() == (H200,)
        assert installed_gpus() == PAIR
    finally:
        visible_gpus.cache_clear()


@pytest.mark.parametrize(
    ("name", "bits", "peak"),
    [
        ("NVIDIA H200", 16, 989),
        ("NVIDIA H100 80GB HBM3", 16, 989),
        ("NVIDIA H100 PCIe", 16, 756),
        ("NVIDIA B200", 8, 4500),
        ("NVIDIA GB200", 16, 2500),
        ("NVIDIA A100-SXM4-80GB", 8, None),
        ("NVIDIA H200", 32, None),
        ("NVIDIA L4", 16, None),
    ],
)
def test_the_peak_is_the_cards_for_the_format(name: str, bits: int, peak: float | None) -> None:
    assert peak_tflops(name, bits) == peak


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC\n"
            "GCC version:  gcc version 12.3.0\n",
            "535.183.01",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
            "580.159.04",
        ),
        ("GCC version:  gcc version 12.3.0\n", None),
        (None, None),
    ],
)
def test_the_drivers_version_is_the_kernels_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, version: str | None
) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "version")
    assert gpus.driver_version() == version
