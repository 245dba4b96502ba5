"""Compares what the nodes of a job report: who differs, and whether that is the node's fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cookbook.run.excluded import PASSING_H
from cookbook.supervise.node import Report

# Logs are read side by side, and a checkpoint's age is told by its time.
_MOST_SKEW_S = 5.0
_MOST_DIFFERENCES = 3


@dataclass(frozen=True)
class Fault:
    """Why a node cannot train: the check that it failed, what was found, hours to leave it out."""

    check: str
    reason: str
    hours: float


Faults = dict[str, list[Fault]]


def differing(reports: Sequence[Report]) -> Faults:
    """The nodes whose packages, files or cards are not those of most; by node.

    Where no value has most nodes, the first node's counts: the job's script runs there.
    """
    found: dict[str, list[str]] = {}
    names = dict.fromkeys(name for report in reports for name in report.facts)
    for name in names:
        # What a node without GPUs does not know, it need not have; their want is another check's.
        knowing = [report for report in reports if name in report.facts]
        values = [report.facts[name] for report in knowing]
        counts = Counter(values)
        # A dictionary keeps its order, so of two with the same count the first node's comes first.
        usual = max(counts, key=lambda value: counts[value])
        for report, value in zip(knowing, values, strict=True):
            if value != usual:
                found.setdefault(report.node, []).append(f"{name} is {value}, elsewhere {usual}")
    return {
        node: [Fault("same software", _short(differences), PASSING_H)]
        for node, differences in found.items()
    }


def _short(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_DIFFERENCES
    words = "; ".join(differences[:_MOST_DIFFERENCES])
    return f"{words}; and {more} more" if more > 0 else words


def skewed(reports: Sequence[Report], received: Mapping[str, float]) -> Faults:
    """The nodes whose clock differs from the others'.

    Args:
        received: when each node's report came, by the clock of the node that runs the script.
    """
    # Each is late by the way of its lines, which takes milliseconds.
    offsets = {report.node: report.clock - received[report.node] for report in reports}
    middle = statistics.median(offsets.values()) if offsets else 0.0
    return {
        node: [Fault("clock", f"its clock is {_signed(offset - middle)}", PASSING_H)]
        for node, offset in offsets.items()
        if abs(offset - middle) > _MOST_SKEW_S
    }


def _signed(seconds: float) -> str:
    return f"{abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"


def common_fault(faults: Faults, nodes: Sequence[str]) -> str | None:
    """What more than half of several nodes have: that is no fault of a node. None where nothing is.

    It is the cluster, the profile or the job: leaving nodes out would empty the cluster.
    """
    by_check: dict[str, list[str]] = {}
    for node, of_node in faults.items():
        for fault in of_node:
            by_check.setdefault(fault.check, []).append(node)
    for check, failing in by_check.items():
        if len(failing) > 1 and 2 * len(failing) > len(nodes):
            first = next(fault for fault in faults[failing[0]] if fault.check == check)
            return f"{check}: {len(failing)} of {len(nodes)} nodes, {failing[0]}: {first.reason}"
    return None


def all_of(of_node: Sequence[Fault]) -> str:
    """All that is wrong with a node, in one line."""
    return "; ".join(fault.reason for fault in of_node)
