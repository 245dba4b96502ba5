"""How a rendered script becomes a request, and an attempt's script that starts torchrun."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe
from cookbook.config.request import cell_of_script
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.launch.script import render_launcher, render_script
from cookbook.launch.submit import create_run
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from cookbook.run.status import Status, read_attempt_end, write_status
from cookbook.supervise.start import chosen_cell
from cookbook.supervise.supervisor import Supervisor
from tests.cells import CLUSTER_FILES, EP_BACKENDS, PRECISIONS, Point
from tests.checkout import STAND_IN, copy_checkout
from tests.script_run import ScriptRunner, Start, carried
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
        self.root = ROOT
        self.runner = ScriptRunner(folder / "stand-ins")
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
    cut = start.srun.index("python")
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
    # Checkpoints belong to the cell, all else to the attempt.
    assert start.train_args[-6:] == [
        f"--checkpoint.folder={job.cell_dir}/checkpoint",
        f"--job.dump_folder={job.cell_dir}",
        "--metrics.save_tb_folder=attempt-0/tb",
        "--comm.save_traces_folder=attempt-0/comm_traces",
        "--profiling.save_traces_folder=attempt-0/profile_traces",
        "--profiling.save_memory_snapshot_folder=attempt-0/memory_snapshot",
    ]
    assert [word for word in start.train_args if "training.steps" in word] == ["--training.steps=5"]
    assert start.environment["FROM_PROFILE"] == "yes"
    assert start.environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[rank${rank}]:"
    # The code is the run's own, and not that of the working folder.
    record = read_record(CellFolder(job.cell_dir).record)
    code = job.cell_dir.parent / "code" / (record.code or "")
    assert start.environment["PYTHONPATH"].split(":")[0] == str(code)
    assert start.environment["PYTHONSAFEPATH"] == "1"
    # Under `sbatch --export=NONE` Slurm says NONE here.
    assert job.run(SLURM_EXPORT_ENV="NONE").environment["SLURM_EXPORT_ENV"] == "ALL"
    # What sbatch was asked for comes before what the node has.
    assert "--cpus-per-task=96" in job.run(SLURM_CPUS_PER_TASK="96").srun
    # Left over from another job, in which sbatch was called.
    shown = (job.runner.programs / "scontrol").read_text().partition("\n")[2]
    job.runner.replace(
        "scontrol", shown.replace("esac", "job) echo NumCPUs=256 CPUs/Task=1 ;;\nesac")
    )
    foreign = {
        f"SLURM_{name}": "4" for name in ("CPUS_PER_TASK", "MEM_PER_CPU", "GPU_BIND", "HINT")
    }
    again = job.run(**foreign)
    assert "--cpus-per-task=128" in again.srun and not foreign.keys() & again.environment.keys()


def test_a_log_that_cannot_be_written_fails_no_training(job: Job) -> None:
    job.runner.replace("tee", "exit 1\n")
    job.runner.replace("torchrun", "for i in {1..20000}; do echo a line; done\n")
    assert job.run().status == 0
    job.runner.replace("torchrun", "exit 9\n")
    assert job.run().status == 9


def test_a_launcher_finds_the_cookbook_though_slurm_answers_late(job: Job) -> None:
    job.runner.replace("sleep", "exit 0\n")
    fails = 'echo x >>"${RECORDS}/squeue"\n(($(wc -l <"${RECORDS}/squeue") > 3)) || exit 1\n'
    fails += 'echo "$@" >"${RECORDS}/asked"\n'
    job.runner.replace("squeue", f"{fails}echo {ROOT}/train_16b.sh\n")
    # Of an array it asks for its own element, where squeue has a line for each.
    array = {"SLURM_ARRAY_JOB_ID": "4710", "SLURM_ARRAY_TASK_ID": "1", "COOKBOOK_ROOT": ""}
    start = job.runner.run(ROOT / "train_16b.sh", root=ROOT, environment=array)
    assert "32 does not divide 16 ranks of a stage" in start.output, start.output
    asked = (job.runner.folder / "records/asked").read_text()
    assert "--jobs=4710_1 " in asked


def test_the_port_of_the_rendezvous_is_one_whatever_the_jobs_number(job: Job) -> None:
    found = [
        int(endpoint(job.run(SLURM_JOB_ID=number)).rpartition(":")[2])
        for number in ("1", "999", "4711", "65000", "65001", "99999999")
    ]
    # Below the ports that Linux gives to whoever asks for any.
    assert all(1024 < port < 32768 for port in found), found
    # Jobs that share a node come soon after one another.
    assert found[3] != found[4]


def test_spare_nodes_are_known_to_the_supervisor(job: Job) -> None:
    recipe = job.folder / "spare.yaml"
    text = (ROOT / "recipes/debug.yaml").read_text()
    recipe.write_text(text.replace("nodes: 1\n", "nodes: 1\nspare_nodes: 1\n", 1))
    job.render(recipe=str(recipe))
    assert "#SBATCH --nodes=2\n" in job.script.read_text()
    cell = cell_of_script(carried(job.script.read_text()), (), {}, nodes=2)
    assert (cell.nodes, cell.spare_nodes) == (1, 1)
    with pytest.raises(InputError, match="all would be spare"):
        cell_of_script(carried(job.script.read_text()), (), {}, nodes=1)


def test_a_relative_folder_starts_at_the_cookbooks(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COOKBOOK_SCHEDULER", "")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    script = carried(job.script.read_text())
    monkeypatch.setenv("CELL_DIR", "runs/mine/try")
    assert chosen_cell(script, ())[1].path == (ROOT / "runs/mine/try").resolve()
    # As in scripts that read it.
    monkeypatch.setenv("NNODES", "2")
    assert chosen_cell(script, ())[0].nodes == 2
    monkeypatch.setenv("NNODES", "16")
    with pytest.raises(InputError, match=r"has 2 node\(s\); write: sbatch --nodes=16 train.sh"):
        chosen_cell(script, ())
    monkeypatch.delenv("NNODES")
    # Without one it is the cell's, the same each time.
    monkeypatch.setenv("CELL_DIR", "")
    for place in ("runs", str(job.folder / "elsewhere")):
        monkeypatch.setenv("COOKBOOK_RUNS", place)
        folder = (ROOT / place / "debug/debug-bf16-standard").resolve()
        assert chosen_cell(script, ())[1].path == folder


def test_ranks_that_the_profile_does_not_have_are_refused(job: Job) -> None:
    text = job.script.read_text().replace("\nranks_per_node: 2\n", "\nranks_per_node: 4\n", 1)
    line = text[: text.index("\nranks_per_node: 4")].count("\n") + 2
    with pytest.raises(InputError, match="found 4, and mine-0 has 2 here; render the") as refused:
        cell_of_script(carried(text), (), {}, nodes=2)
    assert refused.value.place == f"train.sh:{line}: ranks_per_node"


def test_what_is_edited_in_a_copy_reaches_the_ranks(job: Job) -> None:
    job.runner.replace("wrapper", 'export WRAPPED="$1"\nshift\nexec "$@"\n')
    text = job.script.read_text()
    for before, after in (
        ("\nexec ", "\nexport MINE=yes\nexec "),
        ("\n  torchrun --nnodes", "\n  wrapper mine torchrun --max-restarts=1 --nnodes"),
        ("\n    torchrun --nnodes", "\n    wrapper mine torchrun --max-restarts=1 --nnodes"),
        ("      steps: 8", "      steps: 9"),
        ("FROM_PROFILE: 'yes'", "FROM_PROFILE: mine"),
        ("--wait=60", "--wait=90"),
    ):
        text = text.replace(before, after)
    job.script.write_text(text)
    start = job.run()
    assert start.status == 0, start.output
    assert {"--wait=90", "wrapper", "mine"} <= set(start.srun)
    assert "--max-restarts=1" in start.torchrun and "--training.steps=9" in start.train_args
    known = {name: start.environment[name] for name in ("MINE", "WRAPPED", "FROM_PROFILE")}
    assert known == {"MINE": "yes", "WRAPPED": "mine", "FROM_PROFILE": "mine"}
    # The attempt's own script says so, and runs again as it stands.
    own = (job.cell_dir / "attempt-0/train.sh").read_text()
    assert "--training.steps=9\n" in own and "--max-restarts=1" in own and "--wait=90" in own


def test_a_script_reads_no_recipe_overlay_or_profile(job: Job, tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    (checkout / "recipes/debug.yaml").write_text("model: [half")
    shutil.rmtree(checkout / "recipes/precision")
    (job.folder / "mine-0.yaml").unlink()
    offline = ("--model.hf_assets_path=/tmp", "--training.dataset_path=/tmp")
    start = job.runner.run(job.script, *offline, root=checkout, environment={"PRECISION": ""})
    assert "/tmp/tokenizer.json is not there" in start.output, start.output


def test_a_requeued_job_runs_the_code_that_it_began_with(job: Job, tmp_path: Path) -> None:
    checkout, here = (
        copy_checkout(tmp_path / "checkout", assets=True),
        {"CELL_DIR": str(job.cell_dir)},
    )
    first = job.runner.run(job.script, root=checkout, environment=here)
    assert first.status == 0, first.output
    # A pull that renames a package, while the job waits for its next start.
    (checkout / "cookbook").rename(checkout / "renamed")
    write_status(CellFolder(job.cell_dir), Status("running", 0, started=1.0))
    here["SLURM_RESTART_COUNT"] = "1"
    again = job.runner.run(job.script, root=checkout, environment=here)
    assert again.status == 0, again.output
    assert again.environment["ATTEMPT"] == "attempt-1"
    assert again.environment["COOKBOOK_CODE"] == first.environment["COOKBOOK_CODE"]


def test_a_script_of_an_earlier_version_is_refused_with_one_line(job: Job) -> None:
    line = 'exec "${VENV}/bin/python" -m cookbook.supervise "${CELL_DIR}" --script="$0" --cell=x'
    head, _, _ = job.script.read_text().partition("\nexec ")
    job.script.write_text(f'{head}\n{line} --nproc-per-node=8 -- --training.steps=5 -- "$@"\n')
    start = job.run()
    assert (start.status, start.output.count("\n")) == (2, 1)
    assert "is of an earlier version of the cookbook; render the script again" in start.output
    # So is a job that `submit.py` submitted, whose pickle holds a supervisor.
    with pytest.raises(SystemExit) as ended:
        Supervisor.__new__(Supervisor).__setstate__({"folders": [], "arguments": []})
    assert ended.value.code == 2


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
        job.script.write_text(text.replace("\nexec ", f"\n{broken}\nexec ", 1))
        start = job.run()
        assert start.status != 0 and start.torchrun == [], broken


def test_a_clusters_own_file_that_is_not_there_is_named_and_ends_the_job(job: Job) -> None:
    file = job.folder / "not there.sh"
    job.render(source=[str(file)])
    start = job.run()
    assert (start.status, start.torchrun) == (2, [])
    assert f"source: cannot read {file} on " in start.output
    assert "correct the cluster's profile" in start.output


def test_a_variable_from_another_one_does_not_replace_the_users(job: Job) -> None:
    overlay = job.folder / "mine_too.yaml"
    overlay.write_text("description: mine\nenvironment_from: {CARDS: NCCL_IB_HCA}\n")
    job.render(ep_backend=str(overlay))
    assert job.run(NCCL_IB_HCA="mlx5_4").environment["CARDS"] == "mlx5_4"
    assert job.run(NCCL_IB_HCA="mlx5_4", CARDS="mlx5_9").environment["CARDS"] == "mlx5_9"
    assert "CARDS" not in job.run().environment


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, "bf16"),
        ({"RECIPE": "mxfp8_default"}, "mxfp8"),
        ({"PRECISION": "mxfp8", "RECIPE": "mxfp8_default"}, "mxfp8"),
        ({"PRECISION": "fp4"}, ""),
        ({"EP_BACKEND": "deep"}, ""),
    ],
)
def test_the_names_that_a_launcher_takes(
    job: Job, environment: dict[str, str], chosen: str
) -> None:
    text = render_launcher(load_recipe("debug"), job.cluster(), "train.sh")
    # Which cell it trains is not known when it is submitted.
    assert "#SBATCH --job-name=debug\n" in text
    if chosen:
        cell = cell_of_script(carried(text), (), environment, nodes=2)
        assert (cell.precision.name, cell.name) == (chosen, f"debug-{chosen}-standard")
        return
    ((name, word),) = environment.items()
    with pytest.raises(InputError, match=f"{name}: unknown value '{word}'; allowed: "):
        cell_of_script(carried(text), (), environment, nodes=2)


def test_the_published_cell_has_its_number_by_plain_sbatch_too() -> None:
    script, published = carried((ROOT / "train_671b.sh").read_text()), {"EP_BACKEND": "deepep"}
    for words, nodes, number in (
        (["--training.steps=20", "--metrics.enable_wandb"], 32, 859),
        (["--training.local_batch_size=16"], 32, None),
        ([], 16, None),
    ):
        assert cell_of_script(script, words, published, nodes).published == number, words


# On B200 every pair of three precisions and the EP backends; three on CPU nodes, emulated or not.
DOORS = [Point("debug", p, e, "soperator-b200") for p in PRECISIONS[2:] for e in EP_BACKENDS]
DOORS += [Point("debug", p, "standard", str(CLUSTER_FILES[1])) for p in ("bf16", *PRECISIONS[3:])]


_OF_JOB = "SHLVL|_|CELL_DIR|WANDB_RUN_ID|SLURM_RESTART_COUNT|PWD"


@pytest.mark.parametrize("point", DOORS, ids=str)
def test_by_either_door_a_job_is_the_same(
    point: Point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by `submit.py`, by its script, and by Slurm after a requeue."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    runner, run = ScriptRunner(tmp_path / "stand-ins"), create_run("driver", [point.cell()])
    (driver,), script = run.cells, CellFolder(tmp_path / "runs/script/cell")
    nodes, found = str(point.cell().nodes), list[object]()
    shared = {"WANDB_API_KEY": "key", "NCCL_IB_HCA": "mlx5_4:1", "SLURM_JOB_NUM_NODES": nodes}
    shared |= {"COOKBOOK_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(STAND_IN)}
    code = run.folder / "code" / (read_record(driver.record).code or "")
    # As the batch file has it.
    by_driver = tmp_path / "batch.sh"
    by_driver.write_text(
        f'export PYTHONSAFEPATH=1 PYTHONPATH="{code}:${{PYTHONPATH}}"\n'
        f'cd {ROOT} && exec "${{VENV}}/bin/python" -m cookbook.supervise "{driver.path}"\n'
    )
    for number, (batch, cell, restart) in enumerate(
        ((by_driver, driver, {}), (driver.script, script, {}), (driver.script, script, {"1": "1"}))
    ):
        own = {"CELL_DIR": str(cell.path), "SLURM_RESTART_COUNT": restart.get("1", "0")}
        start = runner.run(batch, root=ROOT, environment=shared | own)
        assert start.status == 0, start.output
        attempt = cell.attempts()[-1]
        end, record = read_attempt_end(attempt), read_record(cell.record)
        assert end is not None and attempt.number == max(0, number - 1), start.output
        own_lines = [f"{name}={one}" for name, one in start.environment.items()]
        own_lines += attempt.script.read_text().splitlines()
        texts = sorted([*own_lines, *start.srun, repr(record), repr((end.cause, end.decision))])
        text = "\n".join(texts).replace(f"{cell.path.parent}/{cell.name}", "CELL_DIR")
        text = text.replace(str(cell.path.parent), "RUN")
        # The stand-in for Python adds its own folder once more each time.
        text = re.sub(rf"(:{runner.folder}/packages)+", "", text)
        text = re.sub(r"attempt-\d", "attempt", text)
        found.append(re.sub(rf"(?m)^(export )?({_OF_JOB})=.*\n", "", text))
        write_status(cell, Status("running", attempt.number, started=1.0))
    assert found[0] == found[1] == found[2]
