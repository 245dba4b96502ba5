"""The doctor's command line: reports whether this machine is ready for this stack, with remedies.

    python -m cookbook.doctor [--cluster soperator-b200] [--json]
    python -m cookbook.doctor --numerics [--cluster soperator-b200] [--output FILE]

The doctor needs no installed packages without `--cluster` and `--numerics`, so it can run before
set-up.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cookbook.base.errors import named_at, run_command
from cookbook.doctor.check import Surroundings, diagnose, is_ready, render_findings
from cookbook.install import explain_missing


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cookbook.doctor",
        description="Check whether this machine is ready for this stack, with remedies. Exit "
        "status 1 if there is a problem.",
    )
    parser.add_argument("--local", action="store_true", help="check only what local runs need")
    parser.add_argument("--cluster", metavar="C", help="the cluster profile to check for")
    parser.add_argument("--partition", help="the Slurm partition to look at (default: its default)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    kernels = "compare this machine's kernels with a reference instead; with --cluster, as a job of"
    parser.add_argument("--numerics", action="store_true", help=f"{kernels} one node")
    parser.add_argument("--output", type=Path, help="where --numerics writes its proofs as JSON")
    return check_machine(parser.parse_args(arguments))


def check_machine(parsed: argparse.Namespace) -> int:
    """Print the diagnosis; return 0 if there is no problem, else 1."""
    cluster = None
    try:
        if parsed.cluster:
            from cookbook.config.cluster import load_cluster

            with named_at("--cluster"):
                cluster = load_cluster(parsed.cluster)
        if parsed.numerics:
            from cookbook.doctor.numerics import prove

            return prove(cluster, parsed.output)
    except ModuleNotFoundError as error:
        raise explain_missing(error) from None
    local = parsed.local or (cluster is not None and cluster.scheduler == "local")
    findings = diagnose(Surroundings(cluster, local, parsed.partition))
    if parsed.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(render_findings(findings))
    return 0 if is_ready(findings) else 1


if __name__ == "__main__":
    sys.exit(run_command("doctor", main))
