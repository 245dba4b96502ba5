"""In: this machine and this checkout. Out: findings: what is ready, and what to do where not.

    python -m cookbook.doctor [--cluster soperator-b200] [--json]

Standard library only and no torch, so that it answers at once, also where nothing is installed yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from cookbook.base.errors import InputError
from cookbook.doctor import machine, software
from cookbook.doctor.surroundings import Finding, Surroundings

WIDTH = 100
_COLOURS = {"ok": "32", "warning": "33", "problem": "31", "not here": "2"}


def run_checks(
    here: Surroundings | None = None, partition: str | None = None, local: bool = False
) -> list[Finding]:
    """The findings, in reading order.

    Args:
        partition: the cluster profile's; None for Slurm's default one.
        local: leave out what only runs on a cluster need.
    """
    here = here or Surroundings()
    if local:
        return [
            software.check_python(here),
            software.check_pins(here),
            software.check_compiler(here),
            machine.check_gpus(here),
            software.check_corpus(here),
            machine.check_disk(here, local),
        ]
    return [
        software.check_python(here),
        software.check_pins(here),
        software.check_torchao(here),
        software.check_compiler(here),
        machine.check_gpus(here),
        machine.check_ibgda(here),
        machine.check_memlock(here),
        machine.check_network(here),
        software.check_deepep(here),
        *software.check_tokenizers(here),
        software.check_corpus(here),
        machine.check_disk(here),
        *machine.check_slurm(here, partition),
        software.check_wandb(here),
    ]


def is_ready(findings: Sequence[Finding]) -> bool:
    return all(finding.state != "problem" for finding in findings)


def format_findings(findings: Sequence[Finding], colour: bool = False) -> str:
    """A line per finding, its remedy below it where there is one, and the counts at the end."""
    width = max(len(finding.name) for finding in findings)
    indent = " " * (width + 12)
    lines = []
    for finding in findings:
        state = f"{finding.state:<8}"
        if colour:
            state = f"\033[{_COLOURS[finding.state]}m{state}\033[0m"
        lines.append(f"{finding.name:<{width}}  {state}  {finding.found}")
        if finding.remedy:
            wrapped = textwrap.wrap(finding.remedy, max(WIDTH - len(indent) - 3, 40))
            lines += [f"{indent}{'-> ' if not i else '   '}{row}" for i, row in enumerate(wrapped)]
    counts = Counter[str](finding.state for finding in findings)
    summary = ", ".join(f"{counts[state]} {state}" for state in _COLOURS if counts[state])
    verdict = "ready" if is_ready(findings) else "not ready"
    return "\n".join([*lines, "", f"{verdict}: {summary}"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cookbook.doctor",
        description="Say whether this machine is ready for this stack, and what to do where not. "
        "Exit status 1 where there is a problem.",
    )
    parser.add_argument(
        "--local", action="store_true", help="only what runs on this machine alone need"
    )
    parser.add_argument("--cluster", metavar="C", help="the cluster profile to check for")
    parser.add_argument("--partition", help="the Slurm partition to look at (default: its default)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parsed = parser.parse_args(arguments)
    partition, local = parsed.partition, parsed.local
    if parsed.cluster:
        # Only here: reading a profile needs PyYAML, and the doctor also works without it.
        from cookbook.cells.cluster import load_cluster
        from cookbook.stack.stack import load_stack

        try:
            cluster = load_cluster(parsed.cluster, load_stack())
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        partition = partition or cluster.partition
        local = local or cluster.scheduler == "local"
    findings = run_checks(partition=partition, local=local)
    if parsed.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(format_findings(findings, colour=sys.stdout.isatty()))
    return 0 if is_ready(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
