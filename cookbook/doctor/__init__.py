"""The doctor: is this machine ready for this stack? These imports register its checks.

It needs no installed packages without `--cluster` and `--numerics`, so it can run before set-up.
"""

import argparse
import json
from dataclasses import asdict

from cookbook.base.errors import InputError, named_at
from cookbook.doctor import machine, software  # noqa: F401
from cookbook.doctor.check import Surroundings, diagnose, is_ready, render_findings


def check_machine(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; return 0 if there is no problem, else 1."""
    cluster = None
    if arguments.cluster:
        from cookbook.config.cluster import load_cluster

        with named_at("--cluster"):
            cluster = load_cluster(arguments.cluster)
    if arguments.numerics:
        from cookbook.doctor.numerics import prove

        if cluster and cluster.scheduler != "local":
            found = f"proves the kernels of this machine, not those of {cluster.name}"
            remedy = "on a node, or in its image: python -m cookbook.cli.main doctor --numerics"
            raise InputError(
                "--numerics", found, f"{remedy}; such as by srun --nodes=1 --exclusive"
            )
        return prove(arguments.output)
    local = arguments.local or (cluster is not None and cluster.scheduler == "local")
    findings = diagnose(Surroundings(cluster, local))
    as_json = json.dumps([asdict(finding) for finding in findings], indent=2)
    print(as_json if arguments.json else render_findings(findings))
    return 0 if is_ready(findings) else 1
