"""README's two commands on a system that has nothing: Debian 13 with Python 3.13, in a chroot."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit import ROOT

PACKAGES = "python3,python3-venv,python3-dev,gcc,make,git,ca-certificates"
# From the machine: how to reach package indexes.
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
VARIABLES = ("PIP_CERT", "PIP_INDEX_URL", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
HOME = "/home/my home"
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh Debian 13 with a clone of this checkout, in a path with a space, of a user `me`."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("makes a chroot: run as root, after apt-get install debootstrap")
    root = tmp_path_factory.mktemp("trixie")
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "trixie", str(root)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for file in filter(os.path.exists, NETWORK):
        shutil.copy(file, root / file[1:])
    for folder in ("dev/shm", "tmp"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder).chmod(0o1777)
    mounts = {"proc": root / "proc", "devpts": root / "dev/pts"}
    for kind, place in mounts.items():
        subprocess.run(["mount", "-t", kind, kind, str(place)], check=True)
    try:
        subprocess.run(["chroot", root, "useradd", "-m", "-d", HOME, "me"], check=True)
        clone = root / HOME[1:] / "moe cookbook"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        subprocess.run(["chroot", root, "chown", "-R", "me:", HOME], check=True)
        yield root
    finally:
        for place in mounts.values():
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("make demo", "What was too large here"),
        # The whole `make test` takes 20 minutes; these train, resume and export.
        ("make test PYTEST_ARGS='tests/test_local_run.py tests/test_cli.py'", " passed"),
    ],
)
def test_the_commands_of_the_readme(system: Path, command: str, found: str) -> None:
    known = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    env = known | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": HOME, "LANG": "C.UTF-8"}
    enter = ["chroot", "--userspec=me", str(system), "bash", "-c"]
    command = f"cd '{HOME}/moe cookbook' && {command}"
    done = subprocess.run([*enter, command], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and found in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
