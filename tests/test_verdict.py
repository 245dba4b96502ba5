"""One verdict, whoever asks; what this environment lacks is said as such."""

import contextlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.cli.main import main
from cookbook.config.cell import ERROR, WARNING, Cell
from cookbook.config.cluster import default_cluster, runs_here
from cookbook.config.options import command_line_settings
from cookbook.config.validate import judge, missing_here
from cookbook.launch.script import render_script
from cookbook.launch.submit import create_run
from cookbook.run import slurm
from cookbook.supervise.start import chosen_cell, validated
from tests.check_cells import cell_of, with_options
from tests.script_run import carried

TOKENIZER, DATA = "model.hf_assets_path", "training.dataset_path"
B200 = "soperator-b200"
BIG, SMALL = "deepseek_v3_671b", "deepseek_v3_16b"

# recipe, precision, EP backend, --set words; whether it may run on 32 nodes x 8 B200.
CELLS: list[tuple[str, str, str, list[str], bool]] = [
    (BIG, "bf16", "standard", [], True),
    (BIG, "mxfp8_wgrad_hp", "deepep", [], True),
    (BIG, "float8", "mxfp8_a2a", [], True),
    (BIG, "float8", "deepep", ["parallelism.context_parallel_degree=2"], False),
    (BIG, "mxfp8_linear", "standard", [], False),
    (BIG, "bf16", "deepep", ["parallelism.expert_parallel_degree=1"], False),
    (BIG, "bf16", "standard", ["parallelism.expert_parallel_degree=48"], False),
    (BIG, "bf16", "standard", ["validation.enable=true"], False),
    (BIG, "bf16", "standard", ["compile.components=modle"], False),
    (BIG, "bf16", "standard", ["checkpoint.enable=true", "checkpoint.keep_latest_k=1"], False),
    (SMALL, "mxfp8_linear", "deepep", [], True),
]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the cluster, its tokenizers and its packages."""
    monkeypatch.setattr(slurm, "node_groups", lambda: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def _is_reported(cell: Cell, capsys: pytest.CaptureFixture[str]) -> bool:
    run = create_run("mine", [cell])
    capsys.readouterr()
    assert main(["report", run.name, "--format", "json"]) in (0, 1)
    (found,) = json.loads(capsys.readouterr().out)["cells"]
    return bool(found["status"] != "refused")


def _starts(words: list[str]) -> bool:
    recipe, precision, ep_backend, *own = words
    cell = cell_of(recipe, precision=precision, ep_backend=ep_backend, cluster=B200)
    options = [f"--{word.removesuffix('=true')}" for word in own]
    try:
        validated(*chosen_cell(carried(render_script(cell)), options))
    except InputError:
        return False
    return True


@pytest.mark.parametrize(
    ("recipe", "precision", "ep_backend", "options", "may_run"), CELLS, ids=str
)
def test_every_asker_gives_the_same_verdict(
    recipe: str,
    precision: str,
    ep_backend: str,
    options: list[str],
    may_run: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    words = [recipe, "--precision", precision, "--ep-backend", ep_backend, "--cluster", B200]
    for option in options:
        words += ["--set", option]
    check = main(["check", *words, "--rules-only", "--json"])
    dry_run = main(["run", *words, "--dry-run"])
    # Of another program's; the door sets it.
    monkeypatch.setenv("COOKBOOK_SCHEDULER", "")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "32")
    named = [recipe, precision, ep_backend, *options]
    given = command_line_settings(options)
    # Wrong input makes no cell, so no run.
    report = may_run
    with contextlib.suppress(InputError):
        values = {name: setting.value for name, setting in given.items()}
        cell = cell_of(recipe, values, precision=precision, ep_backend=ep_backend, cluster=B200)
        report = _is_reported(cell, capsys)
    check_line = _starts(named)
    # In a job, whose environment has everything.
    monkeypatch.setattr("cookbook.config.validate.missing_here", lambda *_: [])
    answers = [check == 0, dry_run == 0, check_line, _starts(named), report]
    assert answers == [may_run] * 5
    assert {check, dry_run} <= ({0} if may_run else {1, 2}) and check == dry_run


@pytest.mark.parametrize("groups", [None, [(32, "gpu:b200:8(S:0-1)")], [(1, "gpu:h200:8")]])
def test_what_is_missing_refuses_where_the_job_would_run_here(
    groups: list[tuple[int, str]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = with_options(cell_of(BIG, ep_backend="deepep"), {TOKENIZER: "/nowhere"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(slurm, "node_groups", lambda: groups)
    is_here = groups is not None
    assert runs_here(cell.cluster) is is_here
    verdict = judge(cell)
    assert {one.level for one in verdict.here or ()} == {ERROR if is_here else WARNING}
    assert bool(verdict.refused) is is_here
    if is_here:
        assert str(verdict.refused).startswith(f"{TOKENIZER}: /nowhere/tokenizer.json is not there")
    else:
        assert "not an error: this machine has no Slurm, so jobs on sop" in str(verdict.here)
    assert all("bash setup.sh --arch 10.0" in one.remedy for one in verdict.here)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert judge(cell).refused
    tilde = judge(with_options(cell, {TOKENIZER: "~/tokenizer"}))
    assert str(tilde.refused).endswith("write the whole path: nothing is expanded")
    # The job's script starts its Python.
    monkeypatch.setenv("VENV", "/nowhere")
    assert "VENV" in {one.option for one in judge(cell).here or ()}
    assert verdict.parts == "checked: the rules, this environment; not checked: TorchTitan's build"


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        (None, "local"),
        ([(32, "gpu:b200:8(S:0-1)")], "soperator-b200"),
        ([(4, "gpu:nvidia_h200:8"), (2, "(null)")], "h200-node"),
        ([(40, "gpu:8")], "fits 3 of h100-node, h200-node, soperator-b200"),
        ([(16, "gpu:b200:8")], "what Slurm reports (16 nodes with gpu:b200:8) fits no profile"),
        ([], "what Slurm reports (nothing) fits no profile"),
    ],
)
def test_the_default_cluster_is_the_one_that_slurm_has(
    groups: list[tuple[int, str]] | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COOKBOOK_CLUSTER", raising=False)
    monkeypatch.setattr(slurm, "node_groups", lambda: groups)
    if " " not in found:
        assert default_cluster() == found
        return
    with pytest.raises(InputError) as caught:
        default_cluster()
    assert caught.value.place == "--cluster" and found in caught.value.found
    assert "name one, here or in COOKBOOK_CLUSTER: h100-node, " in caught.value.remedy
    monkeypatch.setenv("COOKBOOK_CLUSTER", "h200-node")
    assert default_cluster() == "h200-node"


def test_paths_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "x"}\n' * 2)
    (tmp_path / "tokenizer").mkdir()
    load = "checkpoint.initial_load_path"

    def missing(tokenizer: object, data: object, checkpoint: Any = None) -> list[tuple[str, str]]:
        paths = {TOKENIZER: str(tokenizer), DATA: str(data), load: checkpoint}
        cell = with_options(cell_of("debug", cluster="local"), {"checkpoint.enable": True, **paths})
        found = missing_here(cell)
        return [(one.option, one.reason) for one in found]

    # A folder without the file is no tokenizer.
    assert missing(tmp_path / "tokenizer", tmp_path / "data") == [
        (TOKENIZER, f"{tmp_path}/tokenizer/tokenizer.json is not there")
    ]
    file = tmp_path / "tokenizer/tokenizer.json"
    file.write_text("{}")
    file.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    from_checkout = os.path.relpath(tmp_path, ROOT)
    assert missing(f"{from_checkout}/tokenizer", f"{from_checkout}/data") == []
    # The job does not stand where its submitter stood.
    assert missing(file.parent, "data") == [(DATA, "data is not there")]
    assert missing(file.parent, file) == [(DATA, f"{file} is a file, allowed: a folder")]
    assert missing(file.parent, tmp_path, "/none") == [(load, "/none is not there")]
