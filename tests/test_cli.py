"""How `submit.py` starts, what it prints and writes, and its exit status."""

import ast
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from cookbook.config.recipe import names_in
from tests.checkout import copy_checkout
from tests.programs import write_program
from tests.submit import ROOT, environment, listing, submit
from tests.waiting import HANG_S


def start(
    command: list[str], folder: Path, variables: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `command`; runs go to `folder`, and no environment is started again into."""
    own = environment(folder / "runs", **{"VENV": str(folder / "none"), **(variables or {})})
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=HANG_S)


VERBS = ["list", "show", "render", "new", "run", "sweep", "status", "logs", "cancel", "report"]
VERBS += ["check", "check-line", "doctor", "profile", "plan", "compare", "export", "data"]
SET_UP = shlex.quote(str(ROOT / "setup.sh"))
PP = "parallelism.pipeline_parallel_degree=1"
RENDER = ("render", "debug", "--cluster", "soperator-b200")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "kept").touch()
    return folder


def test_list_names_everything(runs: Path) -> None:
    answer = submit("list", runs=runs)
    assert (answer.status, answer.stderr) == (0, "")
    for kind in ("", "precision", "ep_backend", "cluster", "sweep"):
        title = {"": "recipe", "ep_backend": "EP backend"}.get(kind, kind)
        assert f"{title}s:\n" in answer.stdout
        for name in names_in(kind):
            assert re.search(rf"(?m)^  {re.escape(name)}  +\S", answer.stdout)
    assert answer.stdout.count("(default here)") == 1


def test_every_verb_has_help_and_a_near_miss_is_named(runs: Path) -> None:
    whole = submit(runs=runs)
    assert whole == submit("--help", runs=runs) and (whole.status, whole.stderr) == (0, "")
    for verb in VERBS:
        answer = submit(verb, "--help", runs=runs)
        assert (answer.status, answer.stderr) == (0, "")
        assert answer.stdout.startswith(f"usage: submit.py {verb}") and verb in whole.stdout
        wrong = submit(f"{verb}x", runs=runs)
        assert (wrong.status, wrong.stdout) == (2, "") and f"did you mean '{verb}'?" in wrong.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list"],
        ["show", "debug", "--cluster", "soperator-b200"],
        RENDER,
        ["sweep", "matrix", "--dry-run", "--cluster", "soperator-b200"],
        ["status"],
    ],
)
def test_the_login_node_never_waits_for_heavy_imports(tmp_path: Path, words: list[str]) -> None:
    light = words[0] in ("--help", "list")
    program = (
        "import sys\nfrom cookbook.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'torchtitan', 'submitit', 'numpy', 'matplotlib'}\n"
        f"heavy |= {{'rich.console', 'jinja2'}} if {light} else set()\n"
        f"heavy |= {{'pydantic', 'yaml'}} if {words == ['--help']} else set()\n"
        "sys.exit(f'imported: {heavy}' if heavy & set(sys.modules) else 0)\n"
    )
    done = start([sys.executable, "-c", program, *words], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_show_prints_the_cell_as_yaml_with_origins_on_request(runs: Path) -> None:
    words = ["show", "deepseek_v3_671b", "--precision", "mxfp8_default", "--ep-backend", "deepep"]
    words += ["--cluster", "soperator-b200", "--nodes", "16", "--set", "training.steps=7"]
    cell = yaml.safe_load(submit(*words, runs=runs).stdout)
    assert cell["name"] == "671b-mxfp8-deepep"
    assert (cell["nodes"], cell["ranks_per_node"]) == (16, 8)
    assert cell["options"]["training.steps"] == 7
    assert cell["environment"]["NVSHMEM_IB_ENABLE_IBGDA"] == "1"
    origins = yaml.safe_load(submit(*words, "--origins", runs=runs).stdout)["options"]
    assert origins["training.steps"] == {"value": 7, "from": "--set training.steps"}
    saves = submit(*words, "--origins", "--set", "checkpoint.enable=true", runs=runs).stdout
    last = yaml.safe_load(saves)["options"]["checkpoint.last_save_model_only"]
    assert last == {"value": False, "from": "the cookbook's default (TorchTitan's is true)"}
    assert origins["model.converters"]["from"].startswith("recipes/precision/mxfp8.yaml:")


def test_render_prints_the_script_or_writes_it(runs: Path, tmp_path: Path) -> None:
    printed = submit(*RENDER, runs=runs).stdout
    assert printed.startswith("#!/bin/bash\n") and printed.count("#SBATCH") >= 5
    assert submit(*RENDER, "-o", "-", runs=runs).stdout == printed
    target = tmp_path / "new folder" / "a.sh"
    answer = submit(*RENDER, "-o", str(target), runs=runs)
    assert (answer.status, answer.stdout) == (0, "")
    assert answer.stderr == f"wrote {target}: debug-bf16-standard for soperator-b200\n"
    # It names itself.
    assert target.read_text(encoding="utf-8") == printed.replace("train.sh", "a.sh")
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_dry_run_submits_nothing_and_shows_the_plan(runs: Path) -> None:
    before = listing(runs)
    answer = submit("sweep", "matrix", "--dry-run", "--cluster", "local", runs=runs)
    # DeepEP's cells are refused.
    assert (answer.status, answer.stderr) == (1, "")
    assert "checked: the rules, this environment; not checked: TorchTitan's build" in answer.stdout
    assert "deepseek_v3_671b is too large here" in answer.stdout
    assert "its stand-in debug runs instead" in answer.stdout
    for cell in ("bf16-standard", "bf16-deepep", "mxfp8-standard", "mxfp8-deepep"):
        assert f"debug-{cell}" in answer.stdout
    answer = submit("sweep", "convergence", "--dry-run", "--cluster", "local", runs=runs)
    assert "left out, meant for the large recipe: training.steps" in answer.stdout
    assert listing(runs) == before


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("submit.py ru", ["run"]),
        ("submit.py run deepseek_v3_671", ["deepseek_v3_671b", "deepseek_v3_671b_fast"]),
        ("submit.py run debug --cluster h2", ["h200-node"]),
        ("submit.py run debug --set training.seq", ["training.seq_len="]),
        ("submit.py report --format j", ["json"]),
    ],
)
def test_a_shell_completes_words(line: str, found: list[str], runs: Path, tmp_path: Path) -> None:
    own = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    own |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    # argcomplete answers on descriptor 8.
    shell = ["bash", "-c", 'exec "$@" 8>"$0" 9>/dev/null', str(tmp_path / "answer")]
    command = [*shell, sys.executable, "submit.py"]
    subprocess.run(command, cwd=ROOT, env=environment(runs, **own), capture_output=True)
    assert set((tmp_path / "answer").read_text().split()) >= {*found}


def test_a_cluster_that_the_environment_names(runs: Path) -> None:
    wrong = {"COOKBOOK_CLUSTER": "locl"}
    answer = submit("run", "debug", "--dry-run", runs=runs, variables=wrong)
    assert answer.status == 2 and "COOKBOOK_CLUSTER: unknown cluster 'locl'" in answer.stderr


NARROW = [
    ["list"],
    ["sweep", "matrix", "--dry-run", "--cluster", "soperator-b200"],
    ["check", "matrix", "--rules-only", "--cluster", "soperator-b200"],
    ["plan", "deepseek_v3_16b_fast", "--vary", "training.local_batch_size=2", "--set", PP],
]


@pytest.mark.parametrize("words", NARROW, ids=lambda words: words[0])
def test_at_80_columns_no_line_breaks_inside_a_word(words: list[str], runs: Path) -> None:
    terminal, slave = os.openpty()
    env = environment(runs, COLUMNS="80", TERM="dumb")
    with subprocess.Popen([sys.executable, "submit.py", *words], stdout=slave, env=env, cwd=ROOT):
        os.close(slave)
        printed = b""
        with contextlib.suppress(OSError):  # once the other end is closed
            while part := os.read(terminal, 65536):
                printed += part
    os.close(terminal)
    lines = printed.decode().splitlines()
    # But for a word that is longer, such as an address.
    assert lines and not [line for line in lines if len(line) > 80 and " " in line.strip()]


@pytest.mark.parametrize("words", [["list"], ["--help"], ["doctor", "--cluster", "local"]])
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_output_is_no_error(tmp_path: Path, words: list[str], closed: str) -> None:
    shell = ["bash", "-c", f'"$@" {closed}', "bash"]
    done = start([*shell, sys.executable, "submit.py", *words], tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    # Where the training packages are missing, the doctor finds that problem.
    assert done.returncode == 0 or (words[0] == "doctor" and done.returncode == 1)


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("return 7", 7, ""),
        ("raise InputError('a.yaml', 'is wrong')", 2, "test: a.yaml: is wrong\n"),
        ("raise JobError('it failed')", 1, "test: it failed\n"),
        ("open('/no/such/file')", 1, "test: /no/such/file: No such file or directory\n"),
        ("raise OSError(28, 'No space left on device')", 1, "test: No space left on device\n"),
        ("raise BrokenPipeError(32, 'Broken pipe')", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("sys.exit('words')", 1, "words\n"),
    ],
)
def test_each_end_has_its_status(tmp_path: Path, work: str, status: int, said: str) -> None:
    program = (
        "import sys\n"
        "from cookbook.base.errors import InputError, JobError, run_command\n"
        f"def work():\n    print('before')\n    {work}\n"
        "sys.exit(run_command('test', work))\n"
    )
    done = start([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (status, "before\n", said)


def test_a_fault_keeps_its_traceback(tmp_path: Path) -> None:
    program = "from cookbook.base.errors import run_command; run_command('test', lambda: 1 // 0)"
    done = start([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "ZeroDivisionError" in done.stderr


# The tests' Python without any package, as a system's Python is before setup.sh has run.
BARE = [sys.executable, "-S"]


class TestWithoutPackages:
    @pytest.mark.parametrize("words", ["list", "run debug --dry-run", "check-line sbatch a.sh"])
    def test_a_verb_ends_with_the_sentence_about_setup(self, tmp_path: Path, words: str) -> None:
        done = start([*BARE, "submit.py", *words.split()], tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(
            rf"submit.py: {sys.executable}: \w+ is not installed, and VENV={tmp_path}/none holds "
            rf"no Python; run: bash {re.escape(SET_UP)}, with VENV unset\n",
            done.stderr,
        )

    def test_the_doctor_works(self, tmp_path: Path) -> None:
        done = start([*BARE, "submit.py", "doctor", "--json"], tmp_path)
        assert (done.returncode, done.stderr) == (1, "")
        findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
        assert findings["pins"]["state"] == "problem"
        assert set(findings["pins"]) == {"name", "state", "found", "remedy"}
        for words in (["submit.py", "doctor"], ["-m", "cookbook.cli.main", "doctor"]):
            text = start([*BARE, *words], tmp_path)
            assert text.stdout.splitlines()[-1].startswith("not ready: ")
            profile = start([*BARE, *words, "--cluster", "local"], tmp_path)
            assert (profile.returncode, profile.stderr.count("\n")) == (2, 1)
            assert "is not installed" in profile.stderr


def test_an_old_python_can_read_the_file_and_says_so(tmp_path: Path) -> None:
    """Python 3.6 is the oldest that systems in use still have."""
    source = (ROOT / "submit.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__ import annotations" not in source
    program = (
        "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0); "
        "sys.argv = ['submit.py', 'list']; runpy.run_path('submit.py', run_name='__main__')"
    )
    done = start([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "is Python 3.9, 3.11 or later is needed; run: bash " in done.stderr


BASE_PYTHON = os.path.realpath(sys.executable)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment with the tests' packages."""
    folder = tmp_path / "an environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=HANG_S
    )
    for packages in folder.glob("lib/python*/site-packages"):
        (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


class TestEnvironment:
    """`submit.py` is started by a Python outside, and goes on under that of VENV."""

    @pytest.mark.parametrize("place", ["relative", "symlink", "the checkout's, without VENV"])
    def test_it_is_used_from_anywhere(self, tmp_path: Path, venv: Path, place: str) -> None:
        checkout, chosen = tmp_path / "check out", venv.name
        if place.startswith("the checkout's"):
            (copy_checkout(checkout) / ".venv").symlink_to(venv)
            chosen = ""
        else:
            checkout.symlink_to(ROOT)
        if place == "symlink":
            (tmp_path / "env").symlink_to(venv)
            chosen = str(tmp_path / "env")
        command = [BASE_PYTHON, str(checkout / "submit.py"), "doctor", "--json"]
        done = start(command, tmp_path, {"VENV": chosen}, cwd=tmp_path)
        assert done.stderr == ""
        (found,) = (one["found"] for one in json.loads(done.stdout) if one["name"] == "python")
        assert Path(found.partition(" in ")[2]).resolve() == venv

    def test_a_set_up_that_failed_blocks_no_other_python(self, tmp_path: Path) -> None:
        checkout = copy_checkout(tmp_path / "mine")
        (checkout / ".venv/.cookbook").mkdir(parents=True)
        (checkout / ".venv/.cookbook/unfinished").touch()
        (checkout / ".venv/bin").mkdir()
        write_program(checkout / ".venv/bin/python", "#!/bin/sh\nexit 7\n")
        command = [sys.executable, str(checkout / "submit.py"), "list"]
        done = start(command, tmp_path, {"VENV": ""}, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("content", ["no program at all", "#!/no/such/interpreter\n"])
    def test_a_python_that_does_not_start(self, tmp_path: Path, venv: Path, content: str) -> None:
        write_program(venv / "bin/python", content)
        done = start([sys.executable, "submit.py", "list"], tmp_path, {"VENV": str(venv)})
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"VENV={venv}: its bin/python does not start: " in done.stderr
