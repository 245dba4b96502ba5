"""What a request for a cell asks: which of its options say so, and how a cell keeps requests."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from cookbook.base.files import write_whole
from cookbook.config.dialect.names import SET_BY_SCRIPTS, Names
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, earlier_record

# Fields that only a sweep sets; a request made by running the cell's script lacks them.
_OF_SWEEPS = ("stand_in_for", "baseline", "prediction", "repeat_of", "repeat")
# Fields that each request sets anew.
_OF_JOBS = (
    *("max_restarts", "environment", "environment_from", "command", "spare_nodes", "commit"),
    *("code", "too_few_nodes", "profile"),
)
# Options for the first load of a request: no later resume inherits them.
ONCE = (Names.load_step, Names.load_excluded)
# Prefixes of options that change no step's speed. An interval does: of saves, validations or logs.
_NOT_OF_SPEED = (
    *(Names.steps, "lr_scheduler.", Names.lr, Names.seed, Names.shuffle_seed, *ONCE),
    *("checkpoint.initial_load_", "checkpoint.last_save_", Names.saves_kept),
    *("metrics.enable_", "metrics.save_"),
)


def asked_options(record: CellRecord) -> dict[str, Any]:
    """Return the options that the user requested, without those that every script sets."""
    own = {*SET_BY_SCRIPTS, Names.description}
    return {name: value for name, value in record.options.items() if name not in own}


def asks_same(one: CellRecord, other: CellRecord, apart_from: Collection[str] = ()) -> bool:
    """Whether two records ask for the same nodes, ranks and options."""
    first, second = (
        {name: value for name, value in asked_options(each).items() if name not in apart_from}
        for each in (one, other)
    )
    return first == second and one.nodes == other.nodes and one.world == other.world


def of_speed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested options, and other facts, that can change a step's speed."""
    return {name: asked[name] for name in asked if not name.startswith(_NOT_OF_SPEED)}


def keep_request(folder: CellFolder, asked: CellRecord, script: str) -> None:
    """Merge a new request into the cell's record, and write the record and its script.

    First copy an old record, if it differs, to the folder of the attempt that used it.
    """
    first, attempts = earlier_record(folder), folder.attempts()
    record = asked
    if first:
        record = replace(asked, **{name: getattr(first, name) for name in _OF_SWEEPS})
        layout = ("cluster", "nodes", "ranks_per_node")
        old, new = ([getattr(one, name) for name in layout] for one in (first, asked))
        if old != new or of_speed(asked_options(first)) != of_speed(asked_options(asked)):
            record = replace(record, prediction=None)
    if first and attempts and first.cluster == asked.cluster:
        is_same, is_lasting = (
            asks_same(asked, first),
            asks_same(asked, first, (*ONCE, Names.is_wandb_on)),
        )
        published = first.published_tokens_per_second_per_gpu
        record = replace(
            first,
            nodes=asked.nodes,
            ranks_per_node=asked.ranks_per_node,
            options=first.options if is_same else asked.options,
            prediction=record.prediction,
            published_tokens_per_second_per_gpu=published if is_lasting else None,
            **{name: getattr(asked, name) for name in _OF_JOBS},
        )
    if attempts and folder.record.exists() and not attempts[-1].record.exists():
        before = folder.record.read_text(encoding="utf-8")
        if before != record.as_yaml():
            write_whole(attempts[-1].record, before)
    record.write(folder.record)
    write_whole(folder.script, script, mode=0o755)
