"""The image of templates/Dockerfile, built without a GPU in a copy of this machine's root folder.

A rendered script then trains in it, with an srun that does what pyxis does.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.checkout import copy_checkout
from tests.programs import write_program
from tests.submit import ROOT, submit

pytestmark = [pytest.mark.titan, pytest.mark.nightly]

PROFILE = """
description: a CPU node whose tasks run in a container
scheduler: slurm
ranks_per_node: 2
emulate: true
container: {image: moe-cookbook.sqsh}
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do
  case "$1" in
    --container-mounts=*) mounts="${1#*=}" ;;
    --container-workdir=*) folder="${1#*=}" ;;
  esac
  shift
done
IFS=, read -ra mounts <<<"${mounts}"
for mount in "${mounts[@]}"; do
  mkdir -p "${IMAGE}${mount#*:}"
  mount --bind "${mount%%:*}" "${IMAGE}${mount#*:}"
done
exec chroot "${IMAGE}" env PATH="${IMAGE_PATH}" sh -c 'cd "$0"; exec "$@"' "${folder}" "$@"
"""


@dataclass
class Image:
    """A root folder, and the variables that its Dockerfile sets."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"

    def run(self, command: str) -> None:
        """Run a shell's command in the image."""
        words = ["env", "-i", *(f"{name}={value}" for name, value in self.variables.items())]
        script = f"cd {self.folder} && {command}"
        subprocess.run(["chroot", str(self.root), *words, "sh", "-ec", script], check=True)

    def build(self, dockerfile: Path) -> None:
        """Follow a Dockerfile from the line after FROM on."""
        text = re.sub(r"(?m)^#.*\n", "", dockerfile.read_text()).replace("\\\n", "")
        for line in text.splitlines():
            instruction, _, words = line.partition(" ")
            if instruction == "RUN":
                self.run(words)
            elif instruction in ("ARG", "ENV"):
                name, _, value = words.partition("=")
                old = self.variables["PATH"]
                self.variables[name] = value.strip('"').replace("${PATH}", old)
            elif instruction == "WORKDIR":
                self.folder = words
                self._path(".").mkdir(parents=True)
            elif instruction == "COPY":
                *sources, target = words.split()
                for source in sources:
                    self._copy(ROOT / source, self._path(target))
            else:
                assert instruction == "FROM", line

    def _path(self, name: str) -> Path:
        return self.root / self.folder.lstrip("/") / name

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    """This machine's root folder under an overlay that keeps no change."""
    if os.getuid() != 0:
        pytest.skip("only root can change its root folder")
    upper, work, root = (tmp_path / name for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        folder.mkdir()
    layers = f"lowerdir=/,upperdir={upper},workdir={work}"
    try:
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", str(root)], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", str(root / "proc")], check=True)
        for name, minor in {"null": 3, "zero": 5, "random": 8, "urandom": 9}.items():
            device = root / "dev" / name
            device.unlink(missing_ok=True)
            os.mknod(device, stat.S_IFCHR, os.makedev(1, minor))
            device.chmod(0o666)
        (root / "dev/shm").mkdir(exist_ok=True)
        # As much as Docker gives a build.
        small = ["mount", "-t", "tmpfs", "-o", "size=65536k", "tmpfs", str(root / "dev/shm")]
        subprocess.run(small, check=True)
        shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
        # Where packages come from.
        kept = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        yield Image(root, {**kept, "PATH": path})
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", str(root)], check=False)


def test_the_image_trains_without_the_hosts_environment(image: Image, tmp_path: Path) -> None:
    image.build(ROOT / "templates/Dockerfile")
    checkout = copy_checkout(tmp_path / "checkout")
    shutil.copytree(ROOT / "assets/local", checkout / "assets/local")
    profile, script = tmp_path / "mine.yaml", tmp_path / "train.sh"
    profile.write_text(PROFILE)
    words = ["render", "debug", "--cluster", str(profile), "-o", str(script)]
    words += ["--set=training.steps=2", "--set=training.seq_len=64"]
    assert submit(*words, runs=tmp_path / "runs").status == 0
    binaries = tmp_path / "bin"
    write_program(binaries / "srun", SRUN)
    write_program(binaries / "scontrol", '#!/bin/sh\n[ "$2" != hostnames ] || echo localhost\n')
    # Outside the checkout, as a scratch folder is.
    attempt = tmp_path / "runs/mine/cell/attempt-0"
    variables = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "IMAGE": str(image.root),
        "IMAGE_PATH": image.variables["PATH"],
        "COOKBOOK_ROOT": str(checkout),
        "VENV": sys.prefix,
        "CELL_DIR": str(attempt.parent),
        "COOKBOOK_PREFLIGHT": "off",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_CPUS_ON_NODE": "2",
    }
    done = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (attempt / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and '"step": 2' in lines[1]
