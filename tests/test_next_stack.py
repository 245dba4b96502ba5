"""A made-up next TorchTitan needs its own folder, its dialect and its recipes, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cookbook.base.paths import ROOT
from cookbook.config.dialect.names import PACKAGE, SET_BY_SCRIPTS, Names
from tests.cells import STACK
from tests.checkout import copy_checkout
from tests.started import python

# The template and the cookbook's own records spell these.
_KEPT = {*SET_BY_SCRIPTS, Names.description, Names.is_wandb_on}
# All other options have other names, and these two are gone, with the value that holds instead.
GONE = {Names.score_activations: "False", Names.ep_chunks: "1"}
RENAMED = {name: f"{name}_anew" for name in STACK.options if name not in {*_KEPT, *GONE}}
DIALECT = "cookbook/config/dialect/names.py"
CELL = ("debug", "--cluster", "h200-node", "--ep-backend", "standard", "--precision")
PREDICT = """
from cookbook.config.cluster import load_cluster
from cookbook.config.resolve import cell_on
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import describe_ranks
from cookbook.predict.rank import count_work
cell = cell_on(load_cluster("h200-node"), "debug", "float8", "standard", {})
ranks = describe_ranks(cell)
print([predict_memory(cell, rank) for rank in ranks], count_work(cell, ranks), ranks)
"""


def _respelt(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The content of a YAML file with the new names, as dotted keys."""
    found = dict[str, Any]()
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name in ("needs", "emulated", "options"):
            found[name] = _respelt(value)
        elif isinstance(value, dict) and any(one.startswith(f"{name}.") for one in STACK.options):
            found |= _respelt(value, f"{name}.")
        elif name not in GONE:
            found[RENAMED.get(name, name)] = value
    return found


@pytest.fixture(scope="module")
def next_stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_checkout(tmp_path_factory.mktemp("next"))
    (folder / "assets").symlink_to(ROOT / "assets")
    pins, own = folder / "requirements.txt", folder / "cookbook/titan/tt_next"
    pins.write_text(pins.read_text().replace("torchtitan==0.2.2", "torchtitan==next"))
    table = json.loads((ROOT.joinpath(*PACKAGE.split(".")) / "options.json").read_text())
    for key in ("options", "optional", "choices"):
        content = {RENAMED.get(name, name): one for name, one in table[key].items()}
        table[key] = {name: one for name, one in content.items() if name not in GONE}
    own.mkdir()
    (own / "options.json").write_text(json.dumps(table))
    text = (folder / DIALECT).read_text()
    for name, value in GONE.items():
        assert text.count(f'"{name}"') == 1
        text = text.replace(f'"{name}"', f"value={value}")
    text = re.sub(r'"([\w.]+)"', lambda found: f'"{RENAMED.get(found[1], found[1])}"', text)
    (folder / DIALECT).write_text(text)
    for path in (folder / "recipes").rglob("*.yaml"):
        if path.parent.name not in ("sweep", "hardware"):
            path.write_text(
                yaml.safe_dump(_respelt(yaml.safe_load(path.read_text())), sort_keys=False)
            )
    return folder


def _said(folder: Path, *words: str) -> tuple[int, str]:
    """What a command answers in a checkout, in the old spelling."""
    done = python(*words, cwd=folder, variables={"PYTHONPATH": str(folder)})
    # A script ends with the content of recipe, overlays and cluster, in their own spelling.
    text = re.sub(r"(?s)<<'CELL'\n.*\nCELL\n", "", done.stdout + done.stderr)
    for old, new in ((str(ROOT), str(folder)), ("tt_0_2_2", "tt_next"), ("v0.2.2", "vnext")):
        text = text.replace(new, old)
    return done.returncode, re.sub(r"_anew\b", "", text)


@pytest.mark.parametrize("precision", ["bf16", "float8"])
def test_cells_are_rendered_and_checked_as_before(next_stack: Path, precision: str) -> None:
    for verb, *words in (("render",), ("check", "--rules-only", "--json")):
        before, found = (
            _said(folder, "submit.py", verb, *CELL, precision, *words)
            for folder in (ROOT, next_stack)
        )
        assert before[0] in (0, 1) and "debug-" in before[1]
        assert found == before


def test_memory_and_work_are_predicted_as_before(next_stack: Path) -> None:
    status, before = _said(ROOT, "-c", PREDICT)
    assert status == 0 and "StageMemory(" in before
    assert _said(next_stack, "-c", PREDICT) == (status, before)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            "training.seq_len=256",
            "has no option 'training.seq_len'; nearest: training.seq_len_anew",
        ),
        ("deepep.num_chunks=2", "TorchTitan next has no option 'deepep.num_chunks'"),
        ("training.seq_len_anew=257", "training.seq_len_anew: 257 is not a multiple of"),
        ("optimizer.beta1_anew=2", "optimizer.beta1_anew: found 2.0, allowed: 0 to below 1"),
        (
            "activation_checkpoint.num_layers_kept_anew=1",
            "activation_checkpoint.mode_anew none rec",
        ),
    ],
)
def test_a_refusal_names_the_new_option(next_stack: Path, asked: str, says: str) -> None:
    words = ("submit.py", "check", *CELL, "bf16", "--set", asked)
    done = python(*words, cwd=next_stack, variables={"PYTHONPATH": str(next_stack)})
    assert done.returncode == 2 and says in done.stderr
