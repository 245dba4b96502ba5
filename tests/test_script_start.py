"""How a rendered script hands over to the supervisor, and starts torchrun for an attempt."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.launch.script import render_launcher, render_script
from cookbook.supervise.__main__ import parse, validate
from tests.script_run import ScriptRunner, Start
from tests.submit import ROOT

PROFILE = {
    "description": "two nodes without GPUs",
    "scheduler": "slurm",
    "nodes": 2,
    "ranks_per_node": 2,
    "max_restarts": 3,
    "environment": {"FROM_PROFILE": "yes"},
}


class Job:
    """A cell's script, rendered now, in a job of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "cookbook"
        self.root.mkdir()
        (self.root / "submit.py").touch()
        self.runner = ScriptRunner(folder / "stand-ins", python=None)
        self.cell_dir = folder / "runs" / "mine" / "cell"
        self.script = folder / "train.sh"
        self.render()

    def cluster(self, **profile: object) -> Cluster:
        # A file is read once, so each has a name of its own.
        path = self.folder / f"mine-{len(list(self.folder.glob('mine-*')))}.yaml"
        path.write_text(yaml.safe_dump(PROFILE | profile))
        return load_cluster(str(path))

    def render(
        self, recipe: str = "debug", ep_backend: str = "standard", **profile: object
    ) -> Cell:
        overlays = load_precision("bf16"), load_ep_backend(ep_backend)
        cell = resolve_cell(merge_config(load_recipe(recipe), *overlays, self.cluster(**profile)))
        self.script.write_text(render_script(cell, self.root))
        return cell

    def run(self, *words: str, **environment: str) -> Start:
        here = {"CELL_DIR": str(self.cell_dir), **environment}
        return self.runner.run(self.script, *words, root=self.root, environment=here)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def endpoint(start: Start) -> str:
    assert start.status == 0, start.output
    (found,) = [word for word in start.torchrun if word.startswith("--rdzv-endpoint=")]
    return found.partition("=")[2]


def test_one_srun_starts_one_torchrun_a_node(job: Job) -> None:
    start = job.run("--training.steps=5")
    attempt = job.cell_dir / "attempt-0"
    cut = start.srun.index("torchrun")
    assert set(start.srun[:cut]) == {
        "--nodes=2",
        "--ntasks=2",
        "--nodelist=worker-0,worker-1",
        "--cpus-per-task=128",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--job-name=attempt-0",
    }
    assert set(start.torchrun[: start.torchrun.index("torchtitan.train")]) == {
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint(start)}",
        "--rdzv-id=4711_attempt-0_debug-bf16-standard",
        "--role=rank",
        f"--log-dir={attempt}/ranks",
        "--redirects=3",
        "--tee=3",
        "--local-ranks-filter=0",
        "-m",
    }
    # Checkpoints belong to the cell, all else to the attempt; the user's words are the last.
    assert start.train_args[-6:] == [
        f"--job.dump_folder={job.cell_dir}",
        "--metrics.save_tb_folder=attempt-0/tb",
        "--comm.save_traces_folder=attempt-0/comm_traces",
        "--profiling.save_traces_folder=attempt-0/profile_traces",
        "--profiling.save_memory_snapshot_folder=attempt-0/memory_snapshot",
        "--training.steps=5",
    ]
    assert start.environment["FROM_PROFILE"] == "yes"
    assert start.environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[rank${rank}]:"
    assert start.environment["PYTHONPATH"].split(":")[0] == str(job.root)
    # Under `sbatch --export=NONE` Slurm says NONE here.
    assert job.run(SLURM_EXPORT_ENV="NONE").environment["SLURM_EXPORT_ENV"] == "ALL"
    # What sbatch was asked for comes before what the node has.
    assert "--cpus-per-task=96" in job.run(SLURM_CPUS_PER_TASK="96").srun


def test_a_log_that_cannot_be_written_fails_no_training(job: Job) -> None:
    job.runner.replace("tee", "exit 1\n")
    job.runner.replace("torchrun", "for i in {1..20000}; do echo a line; done\n")
    assert job.run().status == 0
    job.runner.replace("torchrun", "exit 9\n")
    assert job.run().status == 9


def test_a_launcher_finds_the_cookbook_though_slurm_answers_late(job: Job) -> None:
    launcher = job.root / "train_16b.sh"
    recipe, cluster = load_recipe("deepseek_v3_16b"), load_cluster("soperator-b200")
    launcher.write_text(render_launcher(recipe, cluster, launcher.name))
    job.runner.replace("sleep", "exit 0\n")
    fails = 'echo x >>"${RECORDS}/squeue"\n(($(wc -l <"${RECORDS}/squeue") > 3)) || exit 1\n'
    job.runner.replace("squeue", f"{fails}echo {launcher}\n")
    start = job.runner.run(launcher, root=job.root, environment={"COOKBOOK_ROOT": ""})
    assert start.status == 0, start.output
    job.runner.replace("squeue", "exit 1\n")
    asked_once = {"COOKBOOK_ROOT": "", "COOKBOOK_CHECK": "1"}
    start = job.runner.run(launcher, root=job.root, environment=asked_once)
    assert (start.status, start.torchrun) == (2, [])
    assert "squeue gives no answer" in start.output and "export COOKBOOK_ROOT" in start.output


def test_the_port_of_the_rendezvous_is_one_whatever_the_jobs_number(job: Job) -> None:
    found = [
        int(endpoint(job.run(SLURM_JOB_ID=number)).rpartition(":")[2])
        for number in ("1", "999", "4711", "65000", "65001", "99999999")
    ]
    # Below the ports that Linux gives to whoever asks for any.
    assert all(1024 < port < 32768 for port in found), found
    # Jobs that share a node come soon after one another.
    assert found[3] != found[4]


def test_spare_nodes_are_named_to_the_supervisor(job: Job) -> None:
    recipe = job.folder / "spare.yaml"
    text = (ROOT / "recipes/debug.yaml").read_text()
    recipe.write_text(text.replace("nodes: 1\n", "nodes: 1\nspare_nodes: 1\n", 1))
    job.render(recipe=str(recipe))
    assert "#SBATCH --nodes=2\n" in job.script.read_text()
    assert {"--nodes=2", "--spare-nodes=1"} <= set(job.run().asked)


def test_a_relative_folder_starts_at_the_cookbooks(job: Job) -> None:
    start = job.run(CELL_DIR="runs/mine/try")
    assert f"--job.dump_folder={job.root}/runs/mine/try" in start.train_args
    assert start.folder == str(job.root)
    assert start.asked[2] == f"{job.root}/runs/mine/try"
    # Without one it is the cell's, the same each time.
    for place in ("runs", str(job.folder / "elsewhere")):
        folder = (job.root / place / "debug/debug-bf16-standard").resolve()
        assert job.run(CELL_DIR="", COOKBOOK_RUNS=place).asked[2] == str(folder)


def test_ranks_that_the_profile_no_longer_has_are_refused(job: Job) -> None:
    profile = job.render().cluster.path
    start = parse(job.run().asked[2:])
    profile.write_text(yaml.safe_dump(PROFILE | {"ranks_per_node": 4}))
    load_cluster.cache_clear()
    with pytest.raises(InputError, match="found 2, and mine-1 has 4 here; render the script again"):
        validate(start)


@pytest.mark.parametrize("key", ["source", "source_if_exists"])
def test_commands_of_a_clusters_own_file_may_fail(job: Job, key: str) -> None:
    file = job.folder / "modules of the site.sh"
    file.write_text(
        "module_is_not_there load cuda\nfalse\nfalse | cat\n"
        'export CARDS="${NO}x" FROM_PROFILE=no\nreturn 3\n'
    )
    profile: dict[str, Any] = {"source_if_exists": [str(job.folder / "not there")]}
    profile[key] = [str(file)]
    job.render(**profile)
    start = job.run()
    assert start.status == 0, start.output
    # What the profile itself says comes later.
    assert (start.environment["CARDS"], start.environment["FROM_PROFILE"]) == ("x", "yes")
    # What comes after it is as strict as before: errors, unset variables, the heads of pipes.
    for broken in ("false", ': "${NOT_SET}"', "false | cat"):
        job.render(**profile)
        text = job.script.read_text()
        job.script.write_text(text.replace("\nTRAIN_ARGS=(", f"\n{broken}\nTRAIN_ARGS=(", 1))
        start = job.run()
        assert start.status != 0 and start.torchrun == [], broken


def test_a_clusters_own_file_that_is_not_there_is_named_and_ends_the_job(job: Job) -> None:
    file = job.folder / "not there.sh"
    job.render(source=[str(file)])
    start = job.run()
    assert (start.status, start.asked, start.torchrun) == (2, [], [])
    assert f"train.sh: source: cannot read {file} on " in start.output
    assert "correct the cluster's profile" in start.output
    # The login node need not have it.
    assert job.run(COOKBOOK_CHECK="1").status == 0


def test_a_variable_from_another_one_does_not_replace_the_users(job: Job) -> None:
    overlay = job.folder / "mine_too.yaml"
    overlay.write_text("description: mine\nenvironment_from: {CARDS: NCCL_IB_HCA}\n")
    job.render(ep_backend=str(overlay))
    assert job.run(NCCL_IB_HCA="mlx5_4").environment["CARDS"] == "mlx5_4"
    assert job.run(NCCL_IB_HCA="mlx5_4", CARDS="mlx5_9").environment["CARDS"] == "mlx5_9"
    assert "CARDS" not in job.run().environment


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "--precision=bf16"),
        ({"RECIPE": "mxfp8_default"}, "--precision=mxfp8"),
        ({"PRECISION": "float8", "RECIPE": "mxfp8_default"}, "--precision=float8"),
        ({"PRECISION": "fp4"}, ""),
        ({"EP_BACKEND": "deep"}, ""),
    ],
)
def test_the_names_that_a_launcher_takes(job: Job, environment: dict[str, str], said: str) -> None:
    job.script.write_text(render_launcher(load_recipe("debug"), job.cluster(), "train.sh"))
    # Which cell it trains is not known when it is submitted.
    assert "#SBATCH --job-name=debug\n" in job.script.read_text()
    start = job.run(**environment)
    assert (start.status == 0) == bool(said), start.output
    if said:
        assert said in start.asked
        assert f"--cookbook.{said[2:]}" in start.train_args
    else:
        assert (start.status, start.asked) == (2, [])
        (name, word) = next(iter(environment.items()))
        assert f"train.sh: {name}: found '{word}', allowed: " in start.output


def test_the_published_cell_has_its_number_by_plain_sbatch_too(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.script.write_text((ROOT / "train_671b.sh").read_text())
    published = {"EP_BACKEND": "deepep", "SLURM_JOB_NUM_NODES": "32", "WANDB_API_KEY": "key"}
    monkeypatch.setenv("COOKBOOK_CHECK", "1")  # DeepEP is not installed here
    for word, number in (("--training.steps=20", 859), ("--training.local_batch_size=16", None)):
        asked = job.run(word, **published).asked
        assert validate(parse(asked[2:])).published == number, word
