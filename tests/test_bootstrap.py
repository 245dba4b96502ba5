"""How `submit.py` starts: which Python, without packages, interrupted."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cookbook.config.stack import read_pins
from cookbook.install import find_distribution, import_name
from tests.checkout import copy_checkout
from tests.programs import write_program
from tests.start import start
from tests.submit import ROOT

# The tests' Python without any package, as a system's Python is before setup.sh has run.
BARE = [sys.executable, "-S"]
VERBS = {"list", "show", "render", "new", "check-line", "check", "run", "sweep", "status", "logs"}
VERBS |= {"cancel", "report", "compare", "profile", "plan", "export", "data", "doctor"}


class TestWithoutPackages:
    def test_the_list_of_verbs_is_whole(self, tmp_path: Path) -> None:
        help_text = start([*BARE, "submit.py", "--help"], tmp_path)
        assert (help_text.returncode, help_text.stderr) == (0, "")
        verbs = help_text.stdout.partition("VERB\n")[2].partition("\n\n")[0]
        named = {line.split()[0] for line in verbs.splitlines() if line[4:5].strip()}
        assert named == VERBS

    @pytest.mark.parametrize("words", ["list", "run debug --dry-run", "check-line sbatch a.sh"])
    def test_a_verb_ends_with_the_sentence_about_setup(self, tmp_path: Path, words: str) -> None:
        done = start([*BARE, "submit.py", *words.split()], tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(
            rf"submit.py: {sys.executable}: \w+ is not installed, and VENV={tmp_path}/none holds "
            rf"no Python; run: bash {ROOT}/setup.sh\n",
            done.stderr,
        )

    def test_the_doctor_works(self, tmp_path: Path) -> None:
        done = start([*BARE, "submit.py", "doctor", "--json"], tmp_path)
        assert (done.returncode, done.stderr) == (1, "")
        findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
        assert findings["pins"]["state"] == "problem"
        assert set(findings["pins"]) == {"name", "state", "found", "remedy"}
        for command in (["submit.py"], ["-m", "cookbook.doctor"]):
            words = [*command, *(["doctor"] if command == ["submit.py"] else [])]
            text = start([*BARE, *words], tmp_path)
            assert text.stdout.splitlines()[-1].startswith("not ready: ")
            profile = start([*BARE, *words, "--cluster", "local"], tmp_path)
            assert (profile.returncode, profile.stderr.count("\n")) == (2, 1)
            assert "is not installed" in profile.stderr

    def test_pinned_packages_are_known_by_their_import_names(self) -> None:
        installed = [pin.name for pin in read_pins() if find_distribution(pin.name)]
        assert {"PyYAML", "Jinja2"} <= set(installed)
        missing = [
            name for name in installed if importlib.util.find_spec(import_name(name)) is None
        ]
        assert missing == []


class TestOldPython:
    def test_it_can_read_the_file(self) -> None:
        """Python 3.6 is the oldest that systems in use still have."""
        source = (ROOT / "submit.py").read_text(encoding="utf-8")
        ast.parse(source, feature_version=(3, 6))
        assert "from __future__ import annotations" not in source

    def test_it_says_so(self, tmp_path: Path) -> None:
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
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    for packages in folder.glob("lib/python*/site-packages"):
        (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


class TestEnvironment:
    """`submit.py` is started by a Python outside, and goes on under that of VENV."""

    def used(self, done: subprocess.CompletedProcess[str]) -> str:
        """The environment that the doctor ran in."""
        assert done.stderr == ""
        findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
        return str(findings["python"]["found"]).partition(" in ")[2]

    @pytest.mark.parametrize("place", ["absolute", "relative", "symlink"])
    def test_it_is_used_from_anywhere(self, tmp_path: Path, venv: Path, place: str) -> None:
        script, chosen = ROOT / "submit.py", str(venv)
        if place == "relative":
            chosen = venv.name
        if place == "symlink":
            (tmp_path / "checkout").symlink_to(ROOT)
            (tmp_path / "env").symlink_to(venv)
            script, chosen = tmp_path / "checkout/submit.py", str(tmp_path / "env")
        command = [BASE_PYTHON, str(script), "doctor", "--json"]
        done = start(command, tmp_path, {"VENV": chosen}, cwd=tmp_path)
        assert Path(self.used(done)).resolve() == venv

    def test_without_venv_it_is_that_of_the_checkout(self, tmp_path: Path, venv: Path) -> None:
        copy = copy_checkout(tmp_path / "check out")
        (copy / ".venv").symlink_to(venv)
        done = start(
            [BASE_PYTHON, "submit.py", "doctor", "--json"], tmp_path, {"VENV": ""}, cwd=copy
        )
        assert Path(self.used(done)).resolve() == venv

    @pytest.mark.parametrize("content", ["no program at all", "#!/no/such/interpreter\n"])
    def test_a_python_that_does_not_start(self, tmp_path: Path, venv: Path, content: str) -> None:
        write_program(venv / "bin/python", content)
        done = start([sys.executable, "submit.py", "list"], tmp_path, {"VENV": str(venv)})
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"VENV={venv}: its bin/python does not start: " in done.stderr
