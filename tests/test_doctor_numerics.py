"""Which cells `doctor --numerics` proves on which machine, and how it is started on a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.gpus import Gpu
from cookbook.cli.main import main
from cookbook.config import validate
from cookbook.config.resolve import this_machine
from cookbook.doctor import numerics

H200 = Gpu("NVIDIA H200", 9.0, 139.8)
B200 = Gpu("NVIDIA B200", 10.0, 179.0)


@pytest.fixture(autouse=True)
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [rule for rule in validate.HERE if rule is not validate.packages]
    monkeypatch.setattr(validate, "HERE", others)


def proved(ranks: int, gpu: Gpu | None) -> dict[str, Any]:
    found = numerics.candidates(this_machine(ranks, gpu))
    assert len({cell.name for cell, _ in found}) == len(found)
    return {cell.name: cell for cell, left_out in found if not left_out}


PRECISIONS = {"bf16", "mxfp8", "mxfp8_wgrad_hp", "mxfp8_linear", "float8"}
A2A = {"bf16 mxfp8_a2a", "mxfp8 mxfp8_a2a"}
FLASH = "bf16 standard model.attention=flash_attention_4 loss.num_chunks=8"
QWEN3 = {f"{name} qwen3_debug" for name in ("bf16 standard", FLASH)}
CPU = {f"{name} standard" for name in PRECISIONS} | {*A2A, FLASH, *QWEN3}
ONE_GPU = {name.replace("qwen3_debug", "qwen3_30b_a3b") for name in CPU - A2A}
TP2 = "parallelism.tensor_parallel_degree=2 loss.num_chunks=8"
TWO_GPUS = (
    ONE_GPU
    | A2A
    | {"bf16 deepep", "mxfp8 deepep"}
    | {f"mxfp8 {ep_backend} {TP2}" for ep_backend in ("standard", "deepep", "mxfp8_a2a")}
)


@pytest.mark.parametrize(
    ("ranks", "gpu", "expected"),
    [(2, None, CPU), (1, H200, ONE_GPU), (2, H200, TWO_GPUS), (2, B200, TWO_GPUS)],
)
def test_what_can_run_here_is_proved(ranks: int, gpu: Gpu | None, expected: set[str]) -> None:
    cells = proved(ranks, gpu)
    assert set(cells) == expected
    for name, cell in cells.items():
        assert cell.world == ranks
        # Emulated where the GPU has no such format, and only there.
        pair = " ".join(name.split()[:2])
        no_format = ("mxfp8" in pair and gpu is not B200) or ("float8" in pair and gpu is None)
        assert cell.emulated == no_format
    assert cells["bf16 standard"].recipe.name == ("deepseek_v3_16b" if gpu else "debug")


def test_the_kernels_of_a_cluster_are_proved_on_its_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--numerics", "--cluster", "soperator-b200"]) == 2
    assert "not those of soperator-b200; on a node, or in its image:" in capsys.readouterr().err


# Stands in for torchrun: keeps its words and the cells, and writes what the ranks would have.
TORCHRUN = """
import json, shutil, sys
from pathlib import Path
folder = Path(__file__).parents[2]
case = json.loads((folder / "case").read_text())
(folder / "words").write_text("\\n".join(sys.argv[1:]))
shutil.copy(sys.argv[-3], folder / "cells")
if "proofs" in case:
    content = {"gpu": None, "seconds": 7.4, "proofs": [{"ok": ok} for ok in case["proofs"]]}
    Path(sys.argv[-1]).write_text(json.dumps(content))
print("a rejected configuration", file=sys.stderr)
print("a path that does not exist!")
print("ok     a kernel")
(ranks,) = (word.partition("=")[2] for word in sys.argv if word.startswith("--log-dir"))
rank = Path(ranks, "none_x", "attempt_0", "1")
rank.mkdir(parents=True)
(rank / "stderr.log").write_text(case.get("stderr", ""))
sys.exit(case["ends"])
"""
IMPORT_ERROR = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    import nothing
ModuleNotFoundError: No module named 'nothing'
"""


@pytest.mark.parametrize(
    ("case", "status", "verdict"),
    [
        ({"ends": 0, "proofs": [True, True]}, 0, "2 kernels proved on the CPU in 7 s"),
        ({"ends": 1, "proofs": [True, False]}, 1, "1 of 2 kernels are wrong on the CPU"),
        ({"ends": 9}, 1, "not proved: torchrun ended with status 9"),
        (
            {"ends": 1, "stderr": IMPORT_ERROR},
            *(1, "not proved: ModuleNotFoundError: No module named 'nothing'"),
        ),
    ],
)
def test_the_status_says_whether_all_kernels_are_right(
    case: dict[str, Any], status: int, verdict: str, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    (tmp_path / "torch/distributed").mkdir(parents=True)
    for package in ("torch", "torch/distributed"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "torch/distributed/run.py").write_text(TORCHRUN)
    (tmp_path / "case").write_text(json.dumps(case))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(numerics, "visible_gpus", list)
    output = tmp_path / "out.json"
    assert main(["doctor", "--numerics", "--cluster", "local", "--output", str(output)]) == status
    said = capfd.readouterr()
    printed = said.out.splitlines()
    assert "ok     a kernel" in printed and "exist!" not in said.out
    assert (printed[-1], said.err) == (verdict, "")
    assert output.exists() == ("proofs" in case)
    words = (tmp_path / "words").read_text().splitlines()
    assert "--nproc-per-node=2" in words and words[-1] == str(output)
    # Only the verdicts of rank 0 are shown.
    assert "--redirects=0:2,1:3" in words
    cells = dict(json.loads((tmp_path / "cells").read_text()))
    assert set(cells) == CPU
    assert all(f"--cookbook.precision={name.split()[0]}" in cells[name] for name in CPU)
    reason = "not here  bf16 deepep: deepep needs CUDA GPUs"
    assert [line for line in printed if line.startswith(reason)]
