"""The snapshot of the cookbook's code that a run carries, so that its jobs run no later code.

submitit's RsyncSnapshot would need git and rsync, and leave out files that are not committed.
"""

import contextlib
import hashlib
import shutil
import tempfile
from pathlib import Path

from cookbook.base.paths import CHECKOUT, CODE, ROOT

_PARTS = ("cookbook", "templates", "requirements.txt")


def code_folder(run: Path, name: str) -> Path:
    """Return the snapshot called `name` in the folder of a run."""
    return run / "code" / name


def snapshot_code(run: Path) -> str:
    """Copy the code that runs now into the run's folder, unless it is there; return its name.

    The name follows from the content, so that jobs with the same code share a snapshot.
    """
    digest = hashlib.sha256(str(ROOT).encode())
    for path in _files():
        digest.update(f"{path.relative_to(CODE)}\n".encode() + path.read_bytes())
    target = code_folder(run, digest.hexdigest()[:12])
    if target.is_dir():
        return target.name
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    try:
        for path in _files():
            copy = building / path.relative_to(CODE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        (building / CHECKOUT).write_text(str(ROOT), encoding="utf-8")
        building.chmod(0o755)
        # Another job may have been faster.
        with contextlib.suppress(OSError):
            building.rename(target)
        return target.name
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _files() -> list[Path]:
    found = (path for part in _PARTS for path in (CODE / part, *(CODE / part).rglob("*")))
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def code_of_job(run: Path, job: str) -> Path:
    """Return the link by which the script of a job finds its code after a requeue."""
    return run / "code" / f"job-{job}"
