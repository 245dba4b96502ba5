"""All checks of the doctor in reading order, and their findings as text."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence

from cookbook.base.tables import text_table
from cookbook.doctor import machine, slurm, software
from cookbook.doctor.check import Check, Finding, Surroundings

# A check is added in the module of its topic; within a module they run in the order of definition.
TOPICS = (software, machine, slurm)

_WIDTH = 100
_COLOURS = {"ok": "32", "warning": "33", "problem": "31", "not here": "2"}


def _checks() -> Iterator[Check]:
    for topic in TOPICS:
        yield from (one for one in vars(topic).values() if isinstance(one, Check))


def diagnose(here: Surroundings) -> list[Finding]:
    """Return the findings of every check, in reading order."""
    looked = [one.finding(here) for one in _checks() if one.is_for_local or not here.local]
    return [finding for finding in looked if finding]


def node_problems(here: Surroundings) -> dict[str, tuple[str, float]]:
    """Return why a job cannot train on this node: by check, the reason and the hours to exclude it.

    Warnings do not count.
    """
    problems = {}
    for one in _checks():
        if one.node_hours is not None:
            finding = one.finding(here)
            if finding and finding.state == "problem":
                problems[one.name] = (finding.found, one.node_hours)
    return problems


def is_ready(findings: Sequence[Finding]) -> bool:
    """Return whether nothing stands in the way; warnings do not."""
    return all(finding.state != "problem" for finding in findings)


def render_findings(findings: Sequence[Finding], colour: bool = False) -> str:
    """Return a line for each finding, its remedy below it, and the counts at the end."""
    rows = []
    for finding in findings:
        state: str = finding.state
        if colour:
            state = f"\033[{_COLOURS[state]}m{state}\033[0m"
        rows.append([finding.name, state, finding.found])
        if finding.remedy:
            rows.append(["", "", f"-> {finding.remedy}"])
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    counts = Counter[str](finding.state for finding in findings)
    summary = ", ".join(f"{counts[state]} {state}" for state in _COLOURS if counts[state])
    verdict = "ready" if is_ready(findings) else "not ready"
    return f"{text_table(rows, width=width)}\n\n{verdict}: {summary}"
