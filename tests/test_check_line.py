"""`submit.py check-line`: an sbatch line is judged before it waits in the queue."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.script_run import stack_packages
from tests.submit import ROOT, environment, listing


def check_line(
    checkout: Path, *words: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    packages = stack_packages(checkout.parent / "packages")
    variables = environment(checkout / "lines", PYTHONPATH=packages)
    return subprocess.run(
        [sys.executable, str(checkout / "submit.py"), "check-line", *words],
        cwd=cwd or checkout,
        env={name: text for name, text in variables.items() if name != "PRECISION"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["sbatch", "train_671b.sh"], "671b-bf16-standard may run: 32 node(s) x 8 B200"),
        (["RECIPE=mxfp8_default sbatch train_671b.sh"], "671b-mxfp8-standard may run"),
        (
            ["PRECISION=mxfp8", "sbatch", "--nodes=16", "train_671b.sh", "--training.steps=5"],
            "671b-mxfp8-standard may run: 16 node(s)",
        ),
        (
            # Read by the supervisor, W&B and NCCL, and like names that the script reads itself.
            ["COOKBOOK_PREFLIGHT=nodes WANDB_RUN_ID=a NCCL_IB_TC=1 sbatch -N16 train_671b.sh"],
            "may run: 16 node(s)",
        ),
        (["sbatch", "--nodes", "8-16", "train_671b.sh"], "may run: 8 node(s)"),
        (["sbatch", "--gres=nvme:1", "train_671b.sh"], "may run: 32 node(s) x 8 B200"),
        (["NNODES= sbatch train_671b.sh --deepep.num_chunks=2"], "warning: deepep.num_chunks: has"),
    ],
)
def test_a_line_that_may_run(checkout: Path, words: list[str], verdict: str) -> None:
    done = check_line(checkout, *words)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert verdict in done.stderr
    assert not (checkout / "lines").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sbatch", "train_671b.sh", "--training.step=5"], "nearest: training.steps"),
        (["sbatch", "-N", "3", "train_671b.sh"], "32 does not divide 12 ranks of a stage; try 4"),
        (["sbatch", "--gres=gpu:4", "train_671b.sh"], "the job has 4 GPUs a node, and the"),
        (["sbatch", "-G", "8", "train_671b.sh"], "the job has 0 GPUs a node, and the"),
        (
            ["sbatch", "--export=ALL,PRECISION=fp4", "train_671b.sh"],
            "PRECISION: unknown value 'fp4'",
        ),
        (["PRECISON=mxfp8", "sbatch", "train_671b.sh"], "did you mean PRECISION?"),
        (["RECIPE=mxfp8_default PRECISION=bf16 sbatch train_671b.sh"], "PRECISION is bf16; unset"),
        (["CELL_DIR=~/a/b", "sbatch", "train_671b.sh"], "found ~/a/b, and nothing is expanded"),
        (["COOKBOOK_PREFLIGHT=of sbatch train_671b.sh"], "found 'of', allowed: full, nodes, off"),
        (["bash", "train_671b.sh"], "runs inside a Slurm job; start it with: sbatch train_671b"),
        (["sbatch", "--nodes=three", "train_671b.sh"], "--nodes: found 'three', allowed: a whole"),
        (["srun", "train_671b.sh"], "found 'srun', which is no file; allowed: sbatch"),
    ],
)
def test_a_line_that_may_not_run_says_why(checkout: Path, words: list[str], message: str) -> None:
    done = check_line(checkout, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (checkout / "lines").exists()


def test_options_below_a_command_are_not_read_by_sbatch(checkout: Path, tmp_path: Path) -> None:
    text = (checkout / "train_671b.sh").read_text().replace("\n#SBATCH", "\nexport A=1\n#SBATCH", 1)
    (tmp_path / "mine.sh").write_text(text)
    done = check_line(checkout, "sbatch", "mine.sh", cwd=tmp_path)
    assert done.returncode == 2
    assert "sbatch does not read `#SBATCH" in done.stderr and "below the command" in done.stderr


def test_an_edited_copy_is_judged_by_what_it_says(checkout: Path, tmp_path: Path) -> None:
    words = ["render", "debug", "--cluster", "soperator-b200", "-o", str(tmp_path / "mine.sh")]
    subprocess.run([sys.executable, str(checkout / "submit.py"), *words], check=True)
    script = tmp_path / "mine.sh"
    assert check_line(checkout, "sbatch", "mine.sh", cwd=tmp_path).returncode == 0
    # It would train BF16 all the same.
    done = check_line(checkout, "PRECISION=mxfp8", "sbatch", "mine.sh", cwd=tmp_path)
    assert done.returncode == 2
    assert "PRECISION=mxfp8: this script trains bf16; render another one" in done.stderr
    script.write_text(script.read_text().replace("      steps: 8", "      steps: 0"))
    done = check_line(checkout, "sbatch", "mine.sh", cwd=tmp_path)
    assert done.returncode == 2
    assert "training.steps: found 0, allowed: 1 and up" in done.stderr
    assert listing(tmp_path) == ["mine.sh"]


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/bash\nset -euo pipefail\n",
        # A script of one's own that calls the cookbook's.
        "#!/bin/bash\n# -m cookbook.supervise begin <<'CELL'\nsource train_671b.sh\n",
        # The cookbook's, cut before it hands over.
        (ROOT / "train_671b.sh").read_text(encoding="utf-8").rpartition("CELL")[0],
    ],
    ids=["plain", "sourced", "cut"],
)
def test_a_script_of_others_is_never_run(checkout: Path, tmp_path: Path, script: str) -> None:
    path = tmp_path / "evil.sh"
    path.write_text(f"{script}touch '{tmp_path}/ran'\n")
    for words in (["sbatch", str(path)], ["bash", str(path)], [str(path), "train_671b.sh"]):
        done = check_line(checkout, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "is no script of the cookbook, and was not run; name train_" in done.stderr
    assert listing(tmp_path) == ["evil.sh"]
