"""Shared fixtures, and the order and workers of tests."""

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import PRELOADED, copy_checkout
from tests.slurm_cluster import CPU_NODES, SlurmCluster
from tests.slurm_installed import require_slurm

# The default is this machine's Slurm; tests mean the published cluster.
os.environ.setdefault("COOKBOOK_CLUSTER", "soperator-b200")
# A shell's background job ignores interrupts; what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


_SERVER: Any = forkserver._forkserver


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one server of ranks for all workers, so that TorchTitan is imported once."""
    _SERVER.set_forkserver_preload(PRELOADED)
    _SERVER.ensure_running()
    node.workerinput["forkserver"] = _SERVER._forkserver_address


def pytest_configure(config: pytest.Config) -> None:
    """Connect a worker to that server."""
    if hasattr(config, "workerinput"):
        _SERVER._forkserver_address = config.workerinput["forkserver"]
        _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        _SERVER.ensure_running = resource_tracker.ensure_running


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm cluster of 32 nodes with 8 GPUs each; tests must leave it idle."""
    require_slurm()
    with SlurmCluster.start(tmp_path_factory.mktemp("slurm"), nodes=32) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def own_slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """A cluster of its module's NODES nodes, with its SLURM_SETTINGS if it has some."""
    require_slurm()
    settings = getattr(request.module, "SLURM_SETTINGS", None)
    folder = tmp_path_factory.mktemp("s")
    with SlurmCluster.start(folder, nodes=request.module.NODES, settings=settings) as cluster:
        yield cluster


@pytest.fixture
def small(own_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The module's own cluster, which is idle after the test."""
    yield own_slurm
    own_slurm.cancel_all()


@pytest.fixture
def two_nodes(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The profile of two nodes of the cluster that this process is on; its jobs end after it."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.env[name])
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    # Nodes are checked; a rehearsal, ten seconds of a core, is the matter of other tests.
    monkeypatch.setenv("COOKBOOK_PREFLIGHT", "nodes")
    (tmp_path / "two-nodes.yaml").write_text(f"{CPU_NODES}nodes: 2\n")
    yield tmp_path / "two-nodes.yaml"
    slurm.cancel_all()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with fake tokenizers."""
    return copy_checkout(tmp_path_factory.mktemp("a checkout") / "moe-cookbook", assets=True)


SLURM_WORKERS = 3


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of letters and texts for TorchTitan's Trainer."""
    from tests.titan_run import write_assets

    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order and group the tests for several workers (`make test`).

    Tests on Slurm come first, on some workers with a cluster each: they mostly wait while the
    other workers compute. Then come trainings; short tests fill the end. Tests that share a
    fixture of their module go to one worker.
    """
    items.sort(key=lambda item: [not item.get_closest_marker(name) for name in ("slurm", "titan")])
    on_slurm = Counter(item.path.stem for item in items if item.get_closest_marker("slurm"))
    loads, worker_of = [0] * SLURM_WORKERS, {}
    for name, number in on_slurm.most_common():
        worker_of[name] = loads.index(min(loads))
        loads[worker_of[name]] += number
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group(f"slurm-{worker_of[item.path.stem]}"))
        elif isinstance(item, pytest.Function) and _shares_with_its_module(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _shares_with_its_module(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(one.scope == "module" for found in definitions for one in found)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """pytest's folder under a unique name: pytest reuses names, and caches are keyed by path."""
    own = tmp_path / str(next(_numbers))
    own.mkdir()
    return own


_numbers = itertools.count()


@pytest.fixture
def patches_applied() -> Any:
    """The names of what was corrected while a test runs; none before it."""
    from cookbook.titan.tt_0_2_2 import activity

    before = set(activity.patches_applied)
    activity.patches_applied.clear()
    yield activity.patches_applied
    activity.patches_applied.clear()
    activity.patches_applied.update(before)
