"""The convergence experiment as it was registered before its first run: arms, seeds, rule, order.

Nothing here may change once a registered run has begun. docs/convergence.md gives the reasons, and
a test holds it to these numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# --- The rule ------------------------------------------------------------------------------------

# Of the reference's loss: equivalent within it. DeepSeek-V3 (arXiv:2412.19437, section 3.3).
MARGIN = 0.0025
# For all comparisons of one measure and one test together, by Holm's step-down procedure.
FAMILY_ERROR = 0.05
# The primary measure is the mean loss of the last tenth of the steps; the second one of all.
END, WHOLE = "end", "whole"
MEASURES = (END, WHOLE)
LAST = 10
# The parametric test, and one of another kind; where their verdicts part, it is undecided.
T_TEST, SIGN_FLIPS = "paired t", "sign flips"
TESTS = (T_TEST, SIGN_FLIPS)

# --- The arms ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A cell that is trained with each seed.

    Attributes:
        gpus: data-parallel ranks and EP degree; all share the tokens of a step.
        reference: the arm in the same layout that it is compared with; empty for such an arm.
    """

    name: str
    precision: str
    ep_backend: str = "standard"
    gpus: int = 1
    reference: str = ""


ARMS = (
    Arm("bf16", "bf16"),
    Arm("mxfp8", "mxfp8", reference="bf16"),
    Arm("mxfp8_wgrad_hp", "mxfp8_wgrad_hp", reference="bf16"),
    Arm("float8", "float8", reference="bf16"),
    Arm("bf16_ep2", "bf16", gpus=2),
    # The published claim: MXFP8 with the quantized all-to-all.
    Arm("mxfp8_a2a_ep2", "mxfp8", "mxfp8_a2a", gpus=2, reference="bf16_ep2"),
)
COMPARED = tuple(arm.name for arm in ARMS if arm.reference)
REFERENCE = {arm.name: arm.reference for arm in ARMS if arm.reference}

_ORDER = "order of the convergence runs"

# --- The runs ------------------------------------------------------------------------------------

# A run that ends by itself before its last step is repeated, up to this many starts.
STARTS = 3


@dataclass(frozen=True)
class Plan:
    """Runs of every arm.

    Attributes:
        sequences: of a step, over all GPUs of a run.
        options: over the recipe's.
    """

    recipe: str
    seeds: Sequence[int]
    steps: int
    sequences: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What is trained, but for the number of steps, which the rehearsal chooses by times alone.

    Attributes:
        steps: `rehearse` takes the most with which all runs fit.
        seconds: that all runs may take.
        rehearsal_seeds: none of `seeds`.
    """

    recipe: str
    seeds: Sequence[int]
    steps: Sequence[int]
    seconds: float
    sequences: int
    options: Mapping[str, Any]
    rehearsal_seeds: Sequence[int]

    def plan(self, steps: int) -> Plan:
        """The runs that count. What proved its kernels in the rehearsal need not do it again."""
        options = {**self.options, "cookbook.self_check": False}
        return Plan(self.recipe, self.seeds, steps, self.sequences, options)

    def rehearsal(self) -> Plan:
        """The same cells for their times and their kernels, without an end."""
        return Plan(self.recipe, self.rehearsal_seeds, 10_000, self.sequences, self.options)


REGISTERED = Experiment(
    recipe="proxy",
    # None of 42 to 46, which the first experiment used; as many as power.md asks for.
    seeds=tuple(range(1001, 1015)),
    steps=(1500, 1200, 1000, 800, 600, 500, 400),
    # 30 minutes of two H200, less 2 for the machine and the installation, 5 for the rehearsal, and
    # 2 at the end, when no run is started that would be cut off.
    seconds=(30 - 2 - 5 - 2) * 60,
    sequences=16,
    options={"metrics.enable_tensorboard": False},
    rehearsal_seeds=(998, 999),
)
SEEDS = REGISTERED.seeds

# A debug model for seconds, to try every step of the experiment out, on a CPU too. No result.
TRIAL = Experiment(
    recipe="debug",
    seeds=(1, 2, 3),
    steps=(10,),
    seconds=600,
    sequences=4,
    options={"training.seq_len": 64, "metrics.enable_tensorboard": False},
    rehearsal_seeds=(4, 5),
)


def run_name(arm: str, seed: int) -> str:
    return f"{arm}-seed{seed}"


def order(seeds: Sequence[int]) -> list[tuple[Arm, int]]:
    """Every run, seed by seed, and within a seed the arms in an order drawn once for all.

    So what has been run is balanced over the arms at any time.
    """
    found = []
    for seed in seeds:
        arms = list(ARMS)
        random.Random(f"{_ORDER}, seed {seed}").shuffle(arms)
        found += [(arm, seed) for arm in arms]
    return found
