"""A job that puts itself back into the queue outlasts Slurm's signal until all is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.submit import ROOT

# As slurmstepd does, it signals all that runs in the job, this command too, before the second one.
SCONTROL = """\
#!/bin/sh
case "$1" in
  requeue) kill -TERM 0 ;;
  update) sleep 0.3 && echo "$@" >"{folder}/said" ;;
esac
"""
LEAVE = (
    "from cookbook.supervise.leave import leave_for_queue\nleave_for_queue('7', ['worker-3'], None)"
)


def _leave(folder: Path, scontrol: str) -> subprocess.CompletedProcess[str]:
    program = folder / "scontrol"
    program.write_text(scontrol.format(folder=folder))
    program.chmod(0o755)
    return subprocess.run(
        [sys.executable, "-c", LEAVE],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
    )


def test_what_to_leave_out_is_said_though_the_signal_has_come(tmp_path: Path) -> None:
    done = _leave(tmp_path, SCONTROL)
    assert (tmp_path / "said").read_text() == "update JobId=7 ExcNodeList=worker-3\n", done.stderr
    # As a process that was told to stop, and only then.
    assert done.returncode == 143 and done.stderr == ""


def test_a_requeue_that_slurm_refuses_is_an_error(tmp_path: Path) -> None:
    done = _leave(tmp_path, "#!/bin/sh\necho 'Job is not requeuable' >&2\nexit 1\n")
    assert "JobError: scontrol requeue 7: Job is not requeuable" in done.stderr
    assert done.returncode == 1
