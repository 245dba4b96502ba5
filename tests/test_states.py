"""Which processes of this machine still run a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cookbook.run.processes import local_job_lives
from cookbook.run.run import Run, RunRecord


def test_a_process_lives_from_its_first_moment_to_its_last(tmp_path: Path) -> None:
    run = Run(tmp_path, RunRecord("smoke-1", "local", ()), ())
    # Often enough to meet the moment in which a new process has no command line yet.
    for _ in range(100):
        process = subprocess.Popen(["sh", "-c", "read line", str(tmp_path)], stdin=subprocess.PIPE)
        try:
            assert local_job_lives(run, str(process.pid))
        finally:
            process.kill()
            # Ended, but not yet waited for: a zombie, as after the driver's own child.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert not local_job_lives(run, str(process.pid))
            process.communicate()
    assert not local_job_lives(run, str(process.pid))


def test_another_process_under_the_same_id_is_not_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, RunRecord("smoke-1", "local", ()), ())
    assert not local_job_lives(run, str(os.getpid()))
    assert not local_job_lives(run, "1")
