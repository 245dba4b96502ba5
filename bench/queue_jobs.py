"""Times how long it takes to queue 100 jobs, on a real Slurm cluster of 32 nodes started here.

python -m bench.queue_jobs        target: under 15 s
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

try:
    from tests.slurm_cluster import SlurmCluster
except ModuleNotFoundError as error:
    sys.exit(f"bench.queue_jobs needs the package {error.name}; run: ./setup.sh --local --dev")

ROOT = Path(__file__).resolve().parent.parent
JOBS = 100
TARGET_S = 15.0
PROFILE = """
description: one CPU node each
scheduler: slurm
exclusive: false
ranks_per_node: 2
"""
SWEEP = f"""
description: as many cells as there are seeds
recipes: [debug]
vary: {{debug.seed: {list(range(JOBS))}}}
"""


def main() -> int:
    """Queue the jobs, print the time, cancel them."""
    # Sockets have short names: the cluster's folder is not below a long temporary path.
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder)
        (path / "profile.yaml").write_text(PROFILE)
        (path / "seeds.yaml").write_text(SWEEP)
        with SlurmCluster.start(path / "slurm") as cluster:
            for name in cluster.node_names:
                cluster.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=bench")
            begin = time.perf_counter()
            cluster.run(
                *(sys.executable, str(ROOT / "submit.py"), "sweep", str(path / "seeds.yaml")),
                *("--cluster", str(path / "profile.yaml"), "--detach"),
                env={"COOKBOOK_RUNS": str(path / "runs"), "VENV": sys.prefix},
            )
            seconds = time.perf_counter() - begin
            queued = len(cluster.run("squeue", "--noheader").stdout.splitlines())
    print(f"{queued} jobs queued in {seconds:.1f} s (target: under {TARGET_S:.0f} s)")
    return 0 if queued == JOBS and seconds < TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
