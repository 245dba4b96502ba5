"""What a training process is doing, told by TorchTitan's own messages."""

from __future__ import annotations

import enum
import re

from cookbook.observe.text import MAX_LINE_BYTES, RANK


class Phase(enum.StrEnum):
    """What a rank is doing; the value is the text to show."""

    LOADING = "loading"
    """Imports, process group, tokenizer and data."""
    BUILDING = "building"
    COMPILING = "compiling"
    """torch.compile is set up, and the model sharded; most kernels are made in the first step."""
    LOADING_CHECKPOINT = "loading checkpoint"
    FIRST_STEP = "first step"
    TRAINING = "training"
    SAVING_CHECKPOINT = "saving checkpoint"
    FINISHING = "finishing"


# How TorchTitan 0.2.2 begins the message that opens a phase. `Applied ...` is none of them: it is
# also said without torch.compile.
_PHASES = {
    "Starting job: ": Phase.LOADING,
    "Building device mesh": Phase.LOADING,
    "Building ": Phase.BUILDING,
    "Compiling each TransformerBlock": Phase.COMPILING,
    "Loading the checkpoint from ": Phase.LOADING_CHECKPOINT,
    "Training starts at step ": Phase.FIRST_STEP,
    "Saving the checkpoint ": Phase.SAVING_CHECKPOINT,
    "Finished saving the checkpoint ": Phase.TRAINING,
    "Training completed": Phase.FINISHING,
    "Process group destroyed": Phase.FINISHING,
}
# What the cookbook's part of the training process says, where TorchTitan waits without a word for
# what is written, or copied, behind the training's back (`titan/tt_0_2_2/saving.py`).
_OWN_PHASES = {
    "cookbook: waiting until the checkpoint is ": Phase.SAVING_CHECKPOINT,
    "cookbook: the checkpoint is copied": Phase.TRAINING,
}
_ALL_PHASES = _PHASES | _OWN_PHASES
_OPENERS = "|".join(map(re.escape, _ALL_PHASES))
_PHASE = re.compile(rf"\[titan\] [^\[\]]* - INFO - ({_OPENERS})")
# Begins with what all of them share, for speed.
_PHASE_BYTES = re.compile(f"INFO - (?:{_OPENERS})".encode())


def parse_phase(line: str, rank: int | None = None) -> Phase | None:
    """The phase that a line opens, of any rank or only of `rank`; None where it opens none."""
    found = _PHASE.search(line)
    if found is None:
        return None
    ranks = RANK.findall(line, 0, found.start())
    if rank is not None and (not ranks or int(ranks[-1]) != rank):
        return None
    return _ALL_PHASES[found.group(1)]


def last_phase(block: bytes, start: int, rank: int | None) -> Phase | None:
    """The newest phase that the lines of a block (see `text.blocks`) open from `start` on."""
    phase = None
    for found in _PHASE_BYTES.finditer(block, start):
        begin = block.rfind(b"\n", 0, found.start()) + 1
        end = block.find(b"\n", found.end())
        if end - begin <= MAX_LINE_BYTES:
            phase = parse_phase(block[begin:end].decode("utf-8", "replace"), rank) or phase
    return phase
