"""Runs a script of the cookbook and shows how it starts torchrun, without Slurm and GPUs.

Stand-ins for Slurm's commands are put on PATH; the script itself is run as it is.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.yamlfile import YamlFile, parse_yaml
from cookbook.config.request import HANDED_OVER
from tests.programs import write_program
from tests.waiting import HANG_S


def carried(text: str, path: Path = Path("train.sh")) -> YamlFile:
    """What a script carries, as its last line hands it over."""
    above, _, below = text.partition(f"{HANDED_OVER}\n")
    return parse_yaml("\n" * (above.count("\n") + 1) + below.partition("\nCELL\n")[0], path)


def stack_packages(folder: Path) -> str:
    """A folder for PYTHONPATH: an empty torchao where this Python has none, else nothing.

    A job is refused where a package is missing that its precision needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("torchao") is None:
        (folder / "torchao").mkdir(exist_ok=True)
        (folder / "torchao/__init__.py").touch()
    return str(folder)


_PROGRAMS = {
    "srun": """\
printf '%s\\0' "$@" >"${RECORDS}/srun"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
""",
    "torchrun": """\
printf '%s\\0' "$@" >"${RECORDS}/torchrun"
env -0 >"${RECORDS}/environment"
pwd >"${RECORDS}/folder"
""",
    "scontrol": """\
case "$2" in
  hostnames) printf "worker-%s\\n" {0..31} ;;
  node) echo "NodeName=${4} Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=${4} Version=22.05" ;;
esac
""",
    "squeue": "exit 1\n",
    "sinfo": "",
}


@dataclass(frozen=True)
class Start:
    """What a script did: its status and words, and the torchrun that it started, if any."""

    status: int
    output: str
    srun: list[str]
    torchrun: list[str]
    environment: Mapping[str, str]
    folder: str

    @property
    def train_args(self) -> list[str]:
        """The words that reach TorchTitan."""
        assert self.torchrun, self.output
        return self.torchrun[self.torchrun.index("torchtitan.train") + 1 :]


class ScriptRunner:
    """Runs scripts in `folder`, where it puts its stand-ins and what they write down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.venv = folder / "venv"
        for name, text in _PROGRAMS.items():
            write_program(self.programs / name, f"#!/bin/bash\n{text}")
        packages = stack_packages(folder / "packages")
        text = f'PYTHONPATH="${{PYTHONPATH:-}}:{packages}" exec {sys.executable} "$@"\n'
        write_program(self.venv / "bin/python", f"#!/bin/bash\n{text}")

    def run(
        self,
        script: Path,
        *words: str,
        root: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Start:
        """Run `script` with `words` in a job of two nodes, the cookbook being at `root`."""
        records = self.folder / "records"
        records.mkdir(exist_ok=True)
        for path in records.iterdir():
            path.unlink()
        done = subprocess.run(
            ["bash", str(script), *words],
            env={
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "HOME": str(self.folder),
                "RECORDS": str(records),
                "COOKBOOK_ROOT": str(root),
                "COOKBOOK_RUNS": str(self.folder / "runs"),
                "VENV": str(self.venv),
                # The nodes of this job are not there.
                "COOKBOOK_PREFLIGHT": "off",
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NODELIST": "worker-[0-1]",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_SUBMIT_DIR": str(self.folder),
                "SLURM_CPUS_ON_NODE": "128",
                **(environment or {}),
            },
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=HANG_S,
        )
        variables = [word.partition("=") for word in _words(records / "environment")]
        return Start(
            status=done.returncode,
            output=done.stdout.decode(errors="replace"),
            srun=_words(records / "srun"),
            torchrun=_words(records / "torchrun"),
            environment={name: value for name, _, value in variables},
            folder=(records / "folder").read_text().strip() if variables else "",
        )

    def replace(self, program: str, text: str) -> None:
        write_program(self.programs / program, f"#!/bin/bash\n{text}")


def _words(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
