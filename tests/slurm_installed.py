"""Whether a Slurm cluster can be started on this machine, and what to do where it cannot."""

import os
import shutil

import pytest

INSTALL = "apt-get install slurmctld slurmd slurm-client munge shellcheck"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "unshare")


def require_slurm() -> None:
    """Skip where Slurm can't run, and say how to get it; in CI (CI=true) fail instead."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        reason = f"no {', '.join(missing)} on this machine; {INSTALL}"
    elif os.geteuid() != 0:
        reason = "the test cluster gives each node its own namespaces; run the tests as root"
    else:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"Slurm is required in CI: {reason}", pytrace=False)
    pytest.skip(reason)


def search_path() -> str:
    """The PATH on which Slurm's programs and daemons are found."""
    # Debian keeps the daemons in sbin, which is not on every user's PATH.
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
