"""Variables that YAML files have a job export: what breaks a script, or cannot work, is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.config.cluster import load_cluster
from cookbook.config.options import RESERVED
from cookbook.config.overlay import Overlay, load_ep_backend, load_precision
from tests.cells import CLUSTERS, EP_BACKENDS, PRECISIONS
from tests.golden import golden_scripts, launchers

# Read from the caller's environment where it is set; a profile may set it for everyone.
FREE = {"WANDB_PROJECT", "NCCL_IB_HCA", "HOSTNAME"}


def _exported_by_files() -> set[str]:
    overlays: list[Overlay] = [*map(load_precision, PRECISIONS)]
    overlays += [load_ep_backend(name) for name in EP_BACKENDS]
    names = {name for one in overlays for name in (*one.environment, *one.environment_from)}
    return names | {name for cluster in CLUSTERS for name in load_cluster(cluster).environment}


def test_every_variable_of_the_scripts_is_reserved() -> None:
    assigned: set[str] = set()
    for text in [*golden_scripts().values(), *launchers().values()]:
        assigned |= set(re.findall(r"(?m)^\s*(?:export )?([A-Z][A-Z_]*)\+?=", text))
        # The supervisor exports the others that a script reads.
        assigned |= set(re.findall(r"[$][{]([A-Z][A-Z_]*)[}]", text))
    assert {"CELL_DIR", "TRAIN_NODES", "ATTEMPT", "TRAIN_ARGS", "PYTHONPATH"} <= assigned
    own = {name for name in assigned if not name.startswith(("COOKBOOK_", "SLURM_"))}
    assert own - FREE - _exported_by_files() <= RESERVED


@pytest.mark.parametrize("name", ["UID", "CELL_DIR", "ATTEMPT", "COOKBOOK_ROOT", "SLURM_JOB_ID"])
@pytest.mark.parametrize("key", ["environment", "environment_from"])
def test_a_variable_of_the_scripts_is_refused(tmp_path: Path, key: str, name: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"description: a\n{key}: {{{name}: OTHER}}\n")
    with pytest.raises(InputError, match=rf"mine.yaml:2: {key}.{name}: is a variable of bash or"):
        load_precision(str(path))


@pytest.mark.parametrize("value", ["/x:$PATH", "${HOME}/x", "$HOME"])
def test_a_value_that_waits_for_an_expansion_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"description: a\nscheduler: slurm\nenvironment: {{LD_PATH: '{value}'}}\n")
    with pytest.raises(InputError, match="exported as they stand: nothing is expanded; write the"):
        load_cluster(str(path))
