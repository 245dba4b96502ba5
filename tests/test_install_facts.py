"""What an installed package can do, and whether a build is the one that is wanted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from cookbook.install import deepep_build
from cookbook.install.attention import runs_on
from cookbook.install.deepep import DeepEp, Nvshmem, find_deepep
from cookbook.install.deepep_build import CannotBuildError, Plan, Toolkit, is_built, make_plan
from cookbook.install.packages import find_distribution, package_folder


@pytest.mark.parametrize(
    ("version", "is_new_enough"),
    [("3.3.8", False), ("3.3.9", True), ("3.3.20", True), ("3.10.1", True), ("2.99.99", False)],
)
def test_versions_are_compared_as_numbers(version: str, is_new_enough: bool) -> None:
    assert Nvshmem(Path("/x"), version).new_enough == is_new_enough


@pytest.mark.parametrize(
    ("capability", "runs"),
    [(8.0, False), (8.9, False), (9.0, True), (10.0, True), (10.3, True), (12.0, False)],
)
def test_flash_attention_has_kernels_for_hopper_and_blackwell(
    capability: float, runs: bool
) -> None:
    assert runs_on(capability) == runs


@pytest.mark.parametrize(
    ("content", "internode"),
    [
        (b"libnvshmem_host.so.3", True),
        (b"libcudart.so.12", False),
        # Without NVSHMEM its functions between nodes are assertions that say so.
        (b"libnvshmem_host.so.3 NVSHMEM is disabled during compilation", False),
        (b"", False),
    ],
)
def test_deepep_sends_between_nodes_where_its_library_was_built_for_it(
    tmp_path: Path, content: bytes, internode: bool
) -> None:
    about = tmp_path / "deep_ep-1.2.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n")
    (about / "direct_url.json").write_text('{"vcs_info": {"commit_id": "abc"}}')
    library = tmp_path / "deep_ep_cpp.cpython-312.so"
    library.write_bytes(content)
    assert find_deepep([str(tmp_path)]) == DeepEp("1.2.1", "abc", library, internode)


BUILT = Plan("c0ffee", "2.10.0", "12.8", "9.0;10.0", "3.4.5")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DeepEP as `BUILT` says; the stamp of its build."""
    stamp = tmp_path / "deep_ep.json"
    stamp.write_text(json.dumps(asdict(BUILT)))
    found = DeepEp("1.2.1", BUILT.commit, tmp_path, True)
    monkeypatch.setattr(deepep_build, "STAMP", stamp)
    monkeypatch.setattr(deepep_build, "find_deepep", lambda: found)
    torch = SimpleNamespace(version=BUILT.torch)
    monkeypatch.setattr(deepep_build, "find_distribution", lambda name: torch)
    monkeypatch.setattr(deepep_build, "torch_cuda", lambda: BUILT.cuda)
    monkeypatch.setattr(deepep_build, "deepep_pin", lambda: SimpleNamespace(value=BUILT.commit))
    return stamp


@pytest.mark.parametrize(
    ("arch", "expected"), [("", True), ("9.0", True), ("9.0;10.0", True), ("10.0;12.0", False)]
)
def test_a_build_counts_for_the_gpus_that_it_was_made_for(
    built: Path, arch: str, expected: bool
) -> None:
    assert is_built(arch) == expected


@pytest.mark.parametrize("part", ["commit", "torch", "cuda"])
def test_a_build_of_another_pin_or_torch_does_not_count(built: Path, part: str) -> None:
    built.write_text(json.dumps(asdict(BUILT) | {part: "another"}))
    assert not is_built("")
    built.unlink()
    assert not is_built("")


@pytest.mark.parametrize(
    ("releases", "said"),
    [
        ([], "no CUDA toolkit"),
        ([(13, 0)], "torch is built for CUDA 12.8 and the toolkit found is CUDA 13.0"),
        ([(11, 8), (13, 0)], "the major versions must agree"),
        # It goes on with the one that fits, up to the next obstacle.
        ([(13, 0), (12, 4)], r"CUDA 12.4 in /cuda-12 cannot compile for GPUs 10.0"),
    ],
)
def test_the_toolkit_is_of_torchs_major_version(
    built: Path, monkeypatch: pytest.MonkeyPatch, releases: list[tuple[int, int]], said: str
) -> None:
    found = [Toolkit(Path(f"/cuda-{release[0]}"), release) for release in releases]
    monkeypatch.setattr(deepep_build, "_find_toolkits", lambda cuda: iter(found))
    with pytest.raises(CannotBuildError, match=said):
        make_plan("10.0")


def test_a_package_is_looked_for_where_it_is_asked_for(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "flash_attn/cute").mkdir(parents=True)
    (there / "flash_attn").mkdir(parents=True)
    # A file of that name is no package.
    (there / "flash_attn/cute").touch()
    name = "flash_attn.cute"
    assert package_folder(name, [str(there), str(here)]) == here / "flash_attn/cute"
    assert package_folder(name, [str(there)]) is None
    assert package_folder("yaml") is not None and package_folder("yaml", [str(here)]) is None
    (here / "mine-1.5.dist-info").mkdir()
    (here / "mine-1.5.dist-info/METADATA").write_text("Name: mine\nVersion: 1.5\n")
    found = find_distribution("mine", [str(there), str(here)])
    assert found is not None and found.version == "1.5"
    assert find_distribution("mine") is None and find_distribution("PyYAML") is not None
    assert find_distribution("PyYAML", [str(here)]) is None
