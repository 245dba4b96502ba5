"""Random options and files: the verdict foretells what the pinned TorchTitan does with them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from cookbook.base.paths import ROOT

# Faults that rules or the rehearsal once did not see, as options of one rank.
DIES = {
    "checkpoint.enable=true checkpoint.last_save_in_hf=true": "Only model can be saved",
    "checkpoint.enable=true checkpoint.initial_load_path={}/texts/good": "metadata is None",
    "checkpoint.enable=true checkpoint.initial_load_path={}/weights/cut/step-2": "load failed",
    "checkpoint.enable=true checkpoint.initial_load_in_hf=true": "Missing key",
    "profiling.enable_profiling=true profiling.profiler_active=0": "Invalid profiler schedule",
    "profiling.enable_memory_snapshot=true": "no attribute 'memory'",
    "activation_checkpoint.mode=full activation_checkpoint.determinism_check=x": "determinism",
    "training.dataset_path={}/texts/other-key": "KeyError: 'text'",
    "training.dataset_path={}/texts/cut": "EOFError",
    "model.hf_assets_path={}/tokenizer/broken": "Exception",
    "model.hf_assets_path={}/tokenizer/large model.overrides.vocab_size=16": "out of range",
    "optimizer.eps=0": "not finite",
    "lr_scheduler.total_steps=-4": "learning rates",
}
_SHOW = """
import json, sys
from pathlib import Path
from bench.stress import fate
said = {}
with fate.prepared() as (files, usual):
    fate.verdict = lambda case, folder: fate.Outcome()
    for line in json.loads(sys.argv[1]):
        pairs = (word.split("=") for word in line.replace("{}", str(files)).split())
        said[line] = fate.disagreement(fate.Case(options=dict(pairs)), usual)
print(json.dumps(said))
"""


def _python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.mark.titan
def test_random_cases_do_what_their_verdicts_say() -> None:
    assert "0 of 20 cases disagree" in _python("-m", "bench.stress.fate", "--cases=20", "--seed=1")


@pytest.mark.nightly
@pytest.mark.titan
def test_accepting_everything_would_be_seen() -> None:
    said: dict[str, Any] = json.loads(_python("-c", _SHOW, json.dumps([*DIES])).splitlines()[-1])
    assert not {line: said[line] for line, why in DIES.items() if why not in said[line]}
