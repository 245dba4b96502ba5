"""What a cell has cost: GPU hours, and the price of a billion tokens at its speed."""

from __future__ import annotations

from cookbook.base.errors import InputError
from cookbook.config.cluster import load_cluster
from cookbook.observe.clock import logged_seconds
from cookbook.results.speed import Throughput
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord


def gpu_hours(folder: CellFolder, record: CellRecord) -> float | None:
    """Hours of all attempts times their GPUs, from the first to the last line of TorchTitan.

    None on a CPU, and where no log tells. What a job did before TorchTitan's first line, a minute
    or so, is not in it.
    """
    if record.device == "cpu":
        return None
    hours = 0.0
    for attempt in folder.attempts():
        seconds = logged_seconds(attempt.log)
        hours += (seconds or 0.0) / 3600 * record.as_of(attempt.number).world
    return hours or None


def cost_per_billion_tokens(record: CellRecord, throughput: Throughput | None) -> float | None:
    """At the cell's speed with its stalls, in the currency of the cluster's `price_per_gpu_hour`.

    None where that is not set, or the cluster's profile is not here.
    """
    if throughput is None or record.device == "cpu" or not record.cluster:
        return None
    try:
        price = load_cluster(record.files.get("cluster") or record.cluster).price_per_gpu_hour
    except InputError:
        return None
    return None if price is None else price * 1e9 / (3600 * throughput.mean)
