"""The doctor on a stand-in for a node that is whole at first, then has one part broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from cookbook.base.gpus import NVIDIA_SMI
from cookbook.base.tables import display_width
from cookbook.config.stack import read_pins, stack_name
from cookbook.doctor import checks, slurm
from cookbook.doctor.check import Finding, check
from cookbook.doctor.checks import TOPICS, is_ready, render_findings
from cookbook.doctor.surroundings import (
    SLURM_CONFIG,
    SLURM_HISTORY,
    SLURM_PARTITIONS,
    SLURM_PING,
    Answer,
    Surroundings,
)
from tests.doctor_node import B200_ROW, COMMIT, H200_ROW, LIMITS, Node, whole_node
from tests.submit import ROOT


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return whole_node(tmp_path)


def test_a_whole_node_is_ready(node: Node) -> None:
    findings = node.findings()
    not_ok = {name: finding for name, finding in findings.items() if finding.state != "ok"}
    assert not_ok.keys() <= {"disk", "python"}
    assert findings["gpus"].found.startswith("8 x NVIDIA B200 (10.0, 179 GiB)")
    assert "MXFP8 in hardware" in findings["gpus"].found
    assert "32 nodes, gpu:nvidia_b200:8" in findings["partition"].found
    assert findings["accounting"].found.startswith("off: ")
    assert findings["pins"].found.startswith(f"stack {stack_name()}")
    assert "never-shown" not in render_findings(list(findings.values()))


Break = Callable[[Node], object]


def answer(
    command: tuple[str, ...], status: int | None, output: str = "", error: str = ""
) -> Break:
    return lambda node: node.answers.update({command: Answer(status, output, error)})


def write(path: str, text: str | bytes) -> Break:
    return lambda node: node.write(path, text)


def remove(path: str) -> Break:
    def act(node: Node) -> None:
        target = node.folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return act


BROKEN: list[tuple[Break, str, str, str]] = [
    (lambda node: node.install("torchao", "0.17.0"), "pins", "problem", "torchao is 0.17.0"),
    (remove("site/submitit-1.5.4.dist-info"), "pins", "problem", "submitit is missing"),
    (
        write("site/torchao/_C_mxfp8.abi3.so", b"\x7fELF libcudart.so.13 ..."),
        "torchao kernels",
        "warning",
        "not for torch's CUDA 12.8",
    ),
    (remove(cache_from_source("site/torch/__init__.py")), "bytecode", "warning", "about 20 s"),
    (lambda node: node.commands.remove("gcc"), "compiler", "problem", "a C compiler missing"),
    (answer(NVIDIA_SMI, 9, "No devices were found\n"), "gpus", "problem", "No devices were found"),
    (answer(NVIDIA_SMI, None, error="no answer in 5 s"), "gpus", "problem", "no answer in 5 s"),
    (answer(NVIDIA_SMI, None), "gpus", "not here", "trains on its CPU"),
    (answer(NVIDIA_SMI, 0, B200_ROW.replace("570", "560")), "gpus", "problem", "driver 560"),
    (answer(NVIDIA_SMI, 0, H200_ROW), "gpus", "ok", "only emulated"),
    (answer(NVIDIA_SMI, 0, "NVIDIA A100, 8.0, 81920, 550.1, GPU-c\n"), "gpus", "warning", "A100"),
    (write("root/proc/driver/nvidia/params", ""), "ibgda", "warning", "stays within a node"),
    (
        write("root/proc/self/limits", LIMITS + "Max locked memory  8388608  8388608  bytes\n"),
        "memlock",
        "problem",
        "8 MiB",
    ),
    (
        remove("root/etc/profile.d/90-nccl-network-vars.sh"),
        "network",
        "warning",
        "no NCCL_IB_HCA",
    ),
    (
        write("root/etc/profile.d/90-nccl-network-vars.sh", 'NCCL_IB_HCA="mlx5_40:1"\n'),
        "network",
        "problem",
        "names mlx5_40",
    ),
    (
        write("root/sys/class/infiniband/mlx5_7/ports/1/state", "1: DOWN\n"),
        "network",
        "problem",
        "mlx5_7 is DOWN",
    ),
    (remove("root/sys/class/infiniband"), "network", "not here", "no RDMA device"),
    (remove("site/deep_ep-1.2.1.dist-info"), "deepep", "warning", "not installed"),
    (
        lambda node: node.install("deep_ep", "1.2.1", direct_url__json="{}"),
        "deepep",
        "problem",
        f"pinned {COMMIT[:7]}",
    ),
    (
        write("site/deep_ep_cpp.cpython-312.so", b"NVSHMEM is disabled during compilation"),
        "deepep",
        "warning",
        "intra-node kernels only",
    ),
    (remove("site/deep_ep_cpp.cpython-312.so"), "deepep", "problem", "without its library"),
    (remove("checkout/assets/hf/A/tokenizer.json"), "tokenizer a", "warning", "not in assets/hf/A"),
    (remove("checkout/assets/local"), "local corpus", "warning", "not made"),
    (answer(SLURM_PING, 1, "Slurmctld(primary) at c is DOWN\n"), "slurm", "problem", "is DOWN"),
    (
        answer(SLURM_PING, 1, error="scontrol: fatal: Could not establish a configuration source"),
        "slurm",
        "warning",
        "without a configuration",
    ),
    (lambda node: node.commands.remove("srun"), "slurm", "problem", "sbatch without srun"),
    (lambda node: node.commands.remove("sbatch"), "slurm", "not here", "--cluster local"),
    (answer(SLURM_PARTITIONS, 0, "main*|down|32|(null)|1:00\n"), "partition", "problem", "not up"),
    (answer(SLURM_PARTITIONS, 0, "main|up|3|(null)|1:00\n"), "partition", "problem", "no default"),
    (
        answer(SLURM_CONFIG, 0, "AccountingStorageType = accounting_storage/slurmdbd\n"),
        "accounting",
        "warning",
        "sacct fails",
    ),
    (lambda node: node.environment.clear(), "wandb", "not here", "TensorBoard only"),
]


@pytest.mark.parametrize(
    ("break_it", "name", "state", "found"),
    BROKEN,
    ids=[f"{name}-{found}".replace(" ", "_") for _, name, _, found in BROKEN],
)
def test_each_finding(node: Node, break_it: Break, name: str, state: str, found: str) -> None:
    break_it(node)
    finding = node.findings()[name]
    assert (finding.state, found in finding.found) == (state, True), finding
    if state in ("warning", "problem"):
        assert finding.remedy
    assert is_ready(list(node.findings().values())) == (state != "problem")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_half_a_tokenizer_is_none(node: Node, name: str) -> None:
    assert node.findings()["tokenizer a"].state == "ok"
    (node.folder / "checkout/assets/hf/A" / name).unlink()
    finding = node.findings()["tokenizer a"]
    assert (finding.state, finding.found) == ("warning", "not in assets/hf/A")


def test_gdrcopy_stands_in_for_driver_options(node: Node) -> None:
    node.write("root/proc/driver/nvidia/params", "EnableStreamMemOPs: 0\n")
    node.write("root/sys/module/gdrdrv/version")
    assert node.findings()["ibgda"] == Finding("ibgda", "ok", "through GDRCopy (gdrdrv is loaded)")


def test_accounting_that_works(node: Node) -> None:
    config = "AccountingStorageType = accounting_storage/slurmdbd\n"
    node.answers[SLURM_CONFIG] = Answer(0, config)
    node.answers[SLURM_HISTORY] = Answer(0)
    assert node.findings()["accounting"].found.startswith("on: ")


def test_torch_from_another_index_is_the_pinned_one(node: Node) -> None:
    pin = next(pin.value for pin in read_pins() if pin.name == "torch")
    shutil.rmtree(node.folder / f"site/torch-{pin}.dist-info")
    node.install("torch", f"{pin}+cu130")
    assert node.findings()["pins"].state == "ok"


def test_nothing_installed_names_the_environment(node: Node) -> None:
    shutil.rmtree(node.folder / "site")
    assert node.findings()["pins"].remedy == "run ./setup.sh"
    node.write("checkout/.venv/bin/python")
    assert ".venv/bin/python" in node.findings()["pins"].remedy


def test_local_leaves_the_cluster_out(node: Node) -> None:
    assert node.findings(local=True).keys() == {
        "python",
        "pins",
        "compiler",
        "flash attention",
        "gpus",
        "local corpus",
        "disk",
        "scratch",
    }


def test_a_function_with_the_decorator_is_a_check(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    @check(local=True)
    def added(here: Surroundings) -> Finding:
        return Finding("added", "ok", str(here.repository))

    monkeypatch.setattr(slurm, "added", added, raising=False)
    assert node.findings()["added"].found == str(node.folder / "checkout")
    assert "added" in node.findings(local=True)


def test_every_module_with_checks_is_a_topic() -> None:
    folder = Path(checks.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "\n@check(" in path.read_text()}
    assert modules == {topic.__name__.rpartition(".")[2] for topic in TOPICS}


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_lines_are_aligned_and_fit_the_terminal(
    node: Node, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    # A list of network cards is one long word, which is not cut.
    findings = [finding for finding in node.findings().values() if finding.name != "network"]
    findings[0] = replace(
        findings[0], name="first", state="problem", found="some words", remedy="do this " * 30
    )
    for colour in (False, True):
        lines = render_findings(findings, colour).splitlines()
        assert max(map(display_width, lines)) <= min(columns, 100)
        start = lines[1].index("-> do this")
        # The remedy's second line stands below its first.
        assert lines[2][:start].strip() == ""
        assert lines[2][start:].startswith(("do this ", "this do "))
        assert lines[-1].startswith("not ready: ")
    assert f"\033[31mproblem\033[0m  {findings[0].found[:9]}" in "\n".join(lines)


def test_as_a_command_without_any_package() -> None:
    """-I -S: no site-packages, as on a machine where nothing is installed yet."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); " + (
        "from cookbook.doctor.__main__ import main; status = main(['--json']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["pins"]["state"] == "problem"
    assert set(findings["pins"]) == {"name", "state", "found", "remedy"}
