"""`model.attention` from the user's side: where it is taken, what is refused, what a run says."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.gpus import Gpu
from cookbook.check.check import judge
from cookbook.cli.launch import describe_plan
from cookbook.config.cell import Cell, train_argv
from cookbook.config.cluster import Cluster
from cookbook.config.expand import CellRequest, expand_sweep
from cookbook.config.finding import ERROR, HINT
from cookbook.config.options import Options
from cookbook.config.sweep import load_sweep
from cookbook.config.validate.here import missing_here
from tests.check_cells import cell_of, cluster_of, with_options
from tests.submit import ROOT, environment, submit

ATTENTION = "model.attention"
FLASH = {ATTENTION: "flash_attention_4"}
WORD = "--model.attention=flash_attention_4"
SMALL = "deepseek_v3_16b"
CP = "parallelism.context_parallel_degree"
B200 = "soperator-b200"
CONTAINER = str(ROOT / "tests/clusters/container.yaml")


def local_cpu() -> Cluster:
    """`local` as on a machine without GPUs, whatever this one has."""
    return dataclasses.replace(cluster_of("local"), gpu=None, gpus_per_node=None)


def with_gpu(name: str, capability: float) -> Cluster:
    return dataclasses.replace(cluster_of(B200), gpu=Gpu(name, capability, 80))


def errors(cell: Cell) -> list[tuple[str, str]]:
    return [(one.option, one.reason) for one in judge(cell) if one.level == ERROR]


def test_a_recipe_and_the_command_line_take_it(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    text = (ROOT / "recipes/deepseek_v3_16b.yaml").read_text()
    recipe.write_text(
        text.replace("flavor: 16B\n", "flavor: 16B\n  attention: flash_attention_4\n")
    )
    for cell in (cell_of(str(recipe)), cell_of(SMALL, FLASH)):
        assert cell.refused is None and cell.uses_flash_attention
        assert WORD in train_argv(cell)
    # As published unless somebody asks for it.
    published = cell_of(SMALL)
    assert not published.uses_flash_attention
    assert not [word for word in train_argv(published) if ATTENTION in word]
    back = cell_of(str(recipe), {ATTENTION: "flavor"})
    assert not back.uses_flash_attention and "--model.attention=flavor" in train_argv(back)


def test_a_sweep_varies_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    values = "[flavor, flash_attention_4]"
    path.write_text(f"description: d\nrecipes: [{SMALL}]\nvary: {{{ATTENTION}: {values}}}\n")
    cells = expand_sweep(load_sweep(str(path)), CellRequest(cluster=cluster_of(B200)))
    assert [(cell.name, cell.uses_flash_attention) for cell in cells] == [
        ("16b-bf16-standard-attention_flavor", False),
        ("16b-bf16-standard-attention_flash_attention_4", True),
    ]


def test_a_misspelt_value_is_an_error(tmp_path: Path) -> None:
    done = submit("show", SMALL, "--set", f"{ATTENTION}=flash_attention_3", runs=tmp_path)
    assert done.status == 2
    assert f"--set {ATTENTION}" in done.stderr and "flash_attention_4" in done.stderr


def install(folder: Path, init: str | None = None) -> Path:
    """A folder of packages with FlashAttention-4's in it, or an older version's where `init`."""
    package = folder / "flash_attn"
    package.mkdir(parents=True)
    if init is None:
        (package / "cute").mkdir()
    else:
        (package / "__init__.py").write_text(init)
    return folder


def check_line(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(checkout / "submit.py"), "check-line", *words],
        cwd=checkout,
        env=environment(checkout / "runs", **variables),
        capture_output=True,
        text=True,
    )


def test_the_end_of_an_sbatch_line_takes_it(checkout: Path, tmp_path: Path) -> None:
    installed = {"PYTHONPATH": str(install(tmp_path))}
    done = check_line(checkout, "sbatch", "train_16b.sh", WORD, **installed)
    assert done.returncode == 0, done.stderr
    assert "16b-bf16-standard may run: 32 node(s) x 8 B200" in done.stderr
    done = check_line(checkout, "sbatch", "train_16b.sh", WORD, f"--{CP}=2", **installed)
    assert done.returncode == 2
    assert f"{CP}: FlashAttention-4 computes each document on one rank" in done.stderr
    # The flavor's own attention would not take it either.
    assert "set it to 1\n" in done.stderr


def test_the_end_of_an_sbatch_line_is_refused_where_it_is_not_installed(
    checkout: Path, tmp_path: Path
) -> None:
    older = {"PYTHONPATH": str(install(tmp_path, init="print('older code ran')"))}
    done = check_line(checkout, "sbatch", "train_16b.sh", WORD, **older)
    assert done.returncode == 2
    assert "FlashAttention-4 (flash-attn-4) is not installed; run: bash setup.sh" in done.stderr
    assert "older code ran" not in done.stdout + done.stderr
    assert check_line(checkout, "sbatch", "train_16b.sh", **older).returncode == 0


@pytest.mark.parametrize(
    ("name", "capability", "may_run"),
    [
        ("A100", 8.0, False),
        ("L40S", 8.9, False),
        ("H200", 9.0, True),
        ("B200", 10.0, True),
        ("B300", 10.3, True),
        ("Thor", 11.0, False),
        ("RTX PRO 6000", 12.0, False),
    ],
)
def test_it_needs_a_gpu_that_it_has_kernels_for(
    name: str, capability: float, may_run: bool
) -> None:
    cluster = with_gpu(name, capability)
    assert errors(cell_of(SMALL, cluster=cluster)) == []
    found = errors(cell_of(SMALL, FLASH, cluster=cluster))
    if may_run:
        assert found == []
    else:
        ((option, reason),) = found
        assert option == ATTENTION and reason.endswith(f"or 10.x (B200), {name} has {capability}")


@pytest.mark.parametrize(
    ("recipe", "options", "words", "remedy"),
    [
        (SMALL, FLASH, "context parallelism (2) cuts documents over several", "set it to 1"),
        (SMALL, {}, "for SDPA only, and flavor 16B has flex", "set it to 1"),
        ("debug", FLASH, "(2) cuts documents over several", "or set model.attention=flavor"),
        ("debug", {}, "", ""),
    ],
)
def test_context_parallelism_is_refused_with_the_reason(
    recipe: str, options: dict[str, str], words: str, remedy: str
) -> None:
    cell = cell_of(recipe, {CP: 2, **options}, cluster=B200)
    found = [one for one in judge(cell) if one.level == ERROR]
    if not words:
        assert found == []
        return
    (one,) = found
    assert one.option == CP and words in one.reason and one.remedy.endswith(remedy)


def test_only_flavors_with_sdpa_have_context_parallelism() -> None:
    """The documents name them."""
    flavors = cell_of(SMALL).options.stack.model_args["deepseek_v3"]
    found = {name for name, args in flavors.items() if args["attn_type"] == "sdpa"}
    assert found == {"debugmodel", "proxy"}


def test_heads_that_nobody_compared_are_refused() -> None:
    cell = cell_of(SMALL, FLASH)
    stack = cell.options.stack
    (sizes,) = [stack.models["deepseek_v3"]["16B"]]
    assert (sizes.qk_head_dim, sizes.v_head_dim) == (192, 128)
    for other in ({"v_head_dim": 64}, {"qk_head_dim": 128}):
        flavors = {"16B": dataclasses.replace(sizes, **other)}
        changed = dataclasses.replace(stack, models={"deepseek_v3": flavors})
        mine = dataclasses.replace(cell, options=Options(changed, cell.options.settings))
        ((option, reason),) = errors(mine)
        assert option == ATTENTION
        assert reason.startswith("FlashAttention-4 is for heads of 192/128 (queries and keys/value")
        assert errors(with_options(mine, {ATTENTION: "flavor"})) == []


def test_without_the_cookbooks_hooks_it_would_do_nothing() -> None:
    cell = dataclasses.replace(cell_of(SMALL, FLASH), hooks="mine")
    ((option, reason),) = errors(cell)
    assert option == ATTENTION and "from the cookbook's hooks alone" in reason


def test_refusals_name_a_public_source() -> None:
    cell = dataclasses.replace(cell_of(SMALL, {CP: 2, **FLASH}, cluster=with_gpu("A100", 8.0)))
    found = [one for one in judge(cell) if one.level == ERROR]
    assert len(found) == 2
    assert all(one.reference.startswith("https://") and one.remedy for one in found)


def test_a_cpu_runs_the_reference_and_says_so() -> None:
    cell = cell_of("debug", FLASH, cluster=local_cpu())
    assert cell.refused is None and cell.attends_by_reference
    (hint,) = [one for one in judge(cell) if one.rule == "reference_has_no_speed"]
    assert hint.level == HINT and "its speed means nothing" in hint.reason
    assert "FlashAttention-4's reference (numerics only)" in describe_plan("debug", [cell])
    for other in (cell_of("debug", cluster=local_cpu()), cell_of(SMALL, FLASH)):
        assert not other.attends_by_reference
        assert "reference" not in describe_plan("x", [other])
        assert not [one for one in judge(other) if one.rule == "reference_has_no_speed"]


def test_a_missing_package_is_known_before_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [*sys.path]
    older, new = install(tmp_path / "older", init="1 / 0"), install(tmp_path / "new")
    monkeypatch.setattr(sys, "path", [str(older), *path])
    importlib.invalidate_caches()

    def found(cell: Cell) -> list[str]:
        return [str(one) for one in missing_here(cell) if one.rule == "packages"]

    missing = found(cell_of(SMALL, FLASH))
    assert missing == [
        f"{ATTENTION}: FlashAttention-4 (flash-attn-4) is not installed; run: bash setup.sh, or "
        f"set {ATTENTION}=flavor"
    ]
    # TorchTitan's own attention needs none of it, the reference neither, and a container has its
    # own packages.
    assert found(cell_of(SMALL)) == []
    assert found(cell_of("debug", FLASH, cluster=local_cpu())) == []
    smaller = {"parallelism.expert_parallel_degree": 8}
    assert found(cell_of(SMALL, FLASH | smaller, cluster=cluster_of(CONTAINER))) == []
    monkeypatch.setattr(sys, "path", [str(new), *path])
    importlib.invalidate_caches()
    assert found(cell_of(SMALL, FLASH)) == []


@pytest.mark.titan
def test_a_sweep_on_the_cpu_trains_both_and_reports_what_ran(tmp_path: Path) -> None:
    sweep = tmp_path / "mine.yaml"
    sweep.write_text(
        "description: both\nrecipes: [debug]\n"
        "baseline: {precision: bf16, ep_backend: standard}\n"
        "options: {training.steps: 2, training.seq_len: 64}\n"
        "vary: {model.attention: [flavor, flash_attention_4]}\n"
    )
    on_cpu = {"CUDA_VISIBLE_DEVICES": ""}
    words = ["sweep", str(sweep), "--cluster", "local"]
    done = submit(*words, runs=tmp_path / "runs", timeout=400, variables=on_cpu)
    assert done.status == 0, done.stdout + done.stderr
    assert "FlashAttention-4's reference (numerics only)" in done.stdout
    assert "- attention: a token attends to 32 tokens on average" in done.stdout
    answer = submit("report", "--format", "json", runs=tmp_path / "runs")
    own, flash = json.loads(answer.stdout)["cells"]
    kinds: list[Any] = [own["attention"], flash["attention"]]
    assert kinds == ["sdpa", "flash_attention_4_reference"]
    assert own["mean_attended_length"] == flash["mean_attended_length"] == 32.5
    assert flash["final_loss"] == pytest.approx(own["final_loss"], rel=1e-3)
    assert (own["emulated"], flash["emulated"], flash["speedup"]) == (False, True, None)
    assert "finished, emulated" in done.stdout
    attempts = tmp_path.glob("runs/*/*flash*/attempt-*/environment.json")
    (environment_file,) = attempts
    observed = json.loads(environment_file.read_text())
    assert observed["attention"] == "flash_attention_4_reference"
    assert observed["mean_attended_length"] == 32.5
