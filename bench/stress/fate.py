"""Compare the verdict on random options and files with what the pinned TorchTitan does with them.

    python -m bench.stress.fate [--cases 2000] [--seed 1]       (make fate)

Each case trains DeepSeek-V3's debug model for two steps on CPU ranks, in forks of this process,
whether or not the rules accept it. A case disagrees if it is accepted and dies, refused and trains,
raises a traceback, or trains otherwise than its options say. It is shrunk to one command line.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import shlex
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.stress.fate_files import FILES, write_files
from cookbook.base.errors import InputError
from cookbook.check.check import _request
from cookbook.config.cell import Cell, train_argv
from cookbook.config.dialect.argv import argv_of, parse_argv
from cookbook.config.dialect.names import OVERRIDES, SET_BY_SCRIPTS, TEXTS, Names, options_that
from cookbook.config.options import command_line_settings
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe
from cookbook.config.resolve import merge_config, this_machine
from cookbook.config.stack import Option, load_stack
from cookbook.config.validate import judge

_SECONDS, _STEPS = 60, 2
# A model so small that a step takes no time; the options under test override these.
_BASE = {
    **{
        f"{OVERRIDES}{size}": str(n)
        for size, n in {"n_layers": 2, "dim": 64, "vocab_size": 64}.items()
    },
    **{f"{OVERRIDES}{size}": "32" for size in ("inter_dim", "moe_inter_dim")},
    Names.steps: str(_STEPS),
    Names.seq_len: "32",
    Names.warmup_steps: "1",
    "metrics.enable_tensorboard": "false",
}
# Stricter than TorchTitan on purpose, by rule.
_ON_PURPOSE = {
    "refused_options",
    "texts",
    "names",
    "unused",
    "routing",
    "c4_test",
    "vocabulary",
    "addresses",
}
_BATCH = {Names.local_batch, Names.global_batch, Names.seq_len, Names.dp_shard, Names.data_workers}


@dataclass(frozen=True)
class Case:
    """Options as a user writes them after `--set`, on some ranks."""

    ranks: int
    options: Mapping[str, str]

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.options.items()]
        return f"{self.ranks} rank(s): " + " ".join(f"--set {shlex.quote(word)}" for word in words)


@dataclass
class Outcome:
    """What happened in a fork: `died` says why it did not reach its end."""

    died: str = ""
    rule: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # a checksum before and after each step
    batches: list[int] = field(default_factory=list)


def draw(chance: random.Random, files: Path) -> Case:
    """Return a case with one to three options that the base does not need."""
    known = [
        option
        for name, option in load_stack().options.items()
        if name not in SET_BY_SCRIPTS
        and not name.startswith(("model.name", "compile.", "comm.", "fault_", "memory_"))
    ]
    chosen = chance.sample(known, chance.choice((1, 1, 2, 2, 3)))
    options = {option.name: _value(option, chance, files) for option in chosen}
    for name, other in _TOGETHER.items():
        if name in options and chance.random() < 0.8:
            options |= {other: "true"}
    if Names.text_files in options and chance.random() < 0.9:
        options[Names.dataset] = "text"
    return Case(chance.choice((1, 1, 1, 2)), options)


# Options without effect unless another one is on.
_TOGETHER = {
    name: f"{name.partition('.')[0]}.{'enable_profiling' if 'profiling' in name else 'enable'}"
    for name in load_stack().options
    if name.startswith(("profiling.", "validation.", "checkpoint."))
}


def _value(option: Option, chance: random.Random, files: Path) -> str:
    if option.name in FILES and chance.random() < 0.9:
        return str(files / chance.choice(FILES[option.name]))
    pools = {
        "bool": ["true", "false", "yes", ""],
        "int": ["0", "1", "-1", "2", "3", "4", "100", "null", "1e3", ""],
        "float": ["0", "1", "-1", "0.5", "1e-8", "inf", "nan", "null", "2", "x"],
        "str": ["", "null", "x", "\u00fcn\u00ef", "a b", "default", str(option.default)],
        "choice": [*option.choices, "x", "null"],
        "list": ["", "x", "a,b", "model", "output", "null"],
        "lists": ["[]", '[["a"]]', "x", "null"],
    }
    return chance.choice(pools[option.kind])


def forked(function: Callable[..., Outcome], *arguments: Any) -> Callable[[], Outcome]:
    """Start `function` in a fork, and return a function that waits for its outcome."""
    answer = os.memfd_create("outcome")
    child = os.fork()
    if not child:
        os.setsid()
        signal.alarm(_SECONDS)
        with contextlib.suppress(BaseException):
            found = function(*arguments)
            os.write(answer, json.dumps(vars(found)).encode())
        os._exit(0)

    def wait() -> Outcome:
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        size = os.fstat(answer).st_size
        said = os.pread(answer, size, 0)
        os.close(answer)
        return Outcome(**json.loads(said)) if said else Outcome(f"ended with status {status}")

    return wait


def cell_of(case: Case) -> Cell:
    """Merge the case into a cell without a verdict; raise InputError for what cannot be read."""
    cluster = this_machine(case.ranks, None)
    given = command_line_settings([f"{name}={one}" for name, one in case.options.items()])
    base = command_line_settings([f"{name}={one}" for name, one in _BASE.items()])
    ep = command_line_settings([f"{Names.ep}=1"])
    overlays = load_precision("bf16"), load_ep_backend("standard")
    return merge_config(load_recipe("debug"), *overlays, cluster, overrides={**base, **ep, **given})


def verdict(case: Case, folder: Path) -> Outcome:
    """Say whether the rules and the dry build accept the case."""
    from cookbook.titan.tt_0_2_2.dry_build import _build_rank

    _quiet(folder / "verdict.log")
    try:
        cell = cell_of(case)
        if errors := judge(cell).errors:
            return Outcome(str(errors[0]), errors[0].rule)
        read = parse_argv(argv_of(cell.options.stack, cell.options.settings), "x", load_stack())
        if read.values != {n: v for n, v in cell.options.values.items() if v != []}:
            return Outcome(f"argv is read back otherwise: {read.values}", "TRACEBACK")
        built = _build_rank(_request(cell), 0, folder)
        return Outcome(built.get("error", ""), "build" if "error" in built else "")
    except InputError as error:
        return Outcome(str(error), "parse")
    except Exception:
        return Outcome(traceback.format_exc(), "TRACEBACK")


def _quiet(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def train(argv: list[str], rank: int, ranks: int, port: int, folder: Path) -> Outcome:
    """Train two steps in this fork, as rank `rank`, and note what was trained."""
    from torchtitan import train as titan

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    _quiet(folder / f"rank{rank}.log")
    found, trainer = Outcome(), titan.Trainer
    step, batches = trainer.train_step, trainer.batch_generator

    def checksum(self: Any) -> float:
        tensors = [one for part in self.model_parts for one in part.parameters()]
        local = (getattr(one, "_local_tensor", one).detach() for one in tensors)
        return sum(float(one.double().abs().sum()) for one in local)

    def noted_step(self: Any, data: Any) -> None:
        found.weights.append(checksum(self))
        found.rates.append(self.lr_schedulers.schedulers[0].get_last_lr()[0])
        step(self, data)
        found.weights.append(checksum(self))

    def noted_batches(self: Any, data: Any) -> Any:
        for inputs, labels in batches(self, data):
            rows = [*inputs["input"].tolist(), *labels.tolist()]
            found.batches.append(hash(tuple(map(tuple, rows))))
            yield inputs, labels

    def goes_on(self: Any) -> bool:
        return bool(self.step < min(self.job_config.training.steps, _STEPS))

    trainer.train_step, trainer.batch_generator = noted_step, noted_batches
    trainer.should_continue_training = goes_on
    titan.time = argparse.Namespace(**vars(time) | {"sleep": lambda seconds: None})
    titan.ConfigManager.parse_args.__defaults__ = (argv,)
    try:
        config = titan.ConfigManager().parse_args(argv)
        found.values = {name: _at(config, name) for name in load_stack().options}
        titan.main(trainer)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            log = (folder / f"rank{rank}.log").read_text(errors="replace").strip()
            words = " ".join(str(error).split()) or log.rpartition("\n")[2]
            found.died = f"{type(error).__name__}: {words[:300]}"
    return found


def _at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def truth(case: Case, folder: Path) -> list[Outcome]:
    """Train the case whatever the rules say; return the outcome of each rank."""
    try:
        argv = train_argv(cell_of(case))
    except InputError:
        own = [f"--{name}={value}" for name, value in case.options.items()]
        argv = [*train_argv(cell_of(Case(case.ranks, {}))), *own]
    argv = [*argv, f"--job.dump_folder={folder}", f"--checkpoint.folder={folder}/saved"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    waits = [forked(train, argv, rank, case.ranks, port, folder) for rank in range(case.ranks)]
    return [wait() for wait in waits]


def silent(case: Case, ranks: list[Outcome], usual: list[Outcome]) -> str:
    """Return how the training differs from what the options say; empty if it does not."""
    cell = cell_of(case)
    for one, plain in zip(ranks, usual, strict=True):
        for name, value in cell.options.values.items():
            said = "inf" if name == Names.max_norm and value == 0 else value
            if name not in (Names.checkpoint_folder,) and str(one.values[name]) != str(said):
                return f"{name}: TorchTitan reads {one.values[name]!r}, the cell has {value!r}"
        top, trains = cell.facts.lr, one.rates and max(one.rates) > 0
        if any(not 0 <= rate <= top * 1.000001 for rate in one.rates):
            return f"learning rates {one.rates} beside {top}"
        if not all(map(math.isfinite, one.weights)):
            return "the weights are not finite"
        if trains and one.weights[0] == one.weights[-1]:
            return "the weights do not change"
        if len({*one.batches}) < len(one.batches):
            return "a batch is trained twice"
        is_same = not case.options.keys() & {*options_that(TEXTS), *_BATCH}
        if is_same and one.batches[:1] != plain.batches[:1]:
            return "the batches differ from those without the options"
    return ""


def disagreement(case: Case, usual: Mapping[int, list[Outcome]]) -> str:
    """Return what is wrong with the verdict; empty if it is right."""
    with tempfile.TemporaryDirectory(prefix="fate-") as name:
        said = forked(verdict, case, Path(name))()
        if said.rule == "TRACEBACK" or (said.died and not said.rule):
            return f"TRACEBACK: {said.died}"
        if said.rule in _ON_PURPOSE:
            return ""
        ranks = truth(case, Path(name))
    died = next((one.died for one in ranks if one.died), "")
    if died and not said.died:
        return f"ACCEPTED, AND DIES: {died}"
    if said.died and not died:
        words = silent_words(case, ranks, usual)
        return "" if words else f"REFUSED, AND TRAINS: {said.rule}: {said.died}"
    if not died and (words := silent(case, ranks, usual[case.ranks])):
        return f"SILENT: {words}"
    return ""


def silent_words(case: Case, ranks: list[Outcome], usual: Mapping[int, list[Outcome]]) -> str:
    """As `silent`, for a case whose cell may not exist."""
    with contextlib.suppress(InputError):
        return silent(case, ranks, usual[case.ranks])
    return ""


def shrink(case: Case, words: str, usual: Mapping[int, list[Outcome]]) -> tuple[Case, str]:
    """Leave out options, and ranks, without which the case disagrees in the same way."""
    smaller = [Case(1, case.options)] if case.ranks > 1 else []
    smaller += [
        Case(case.ranks, {k: v for k, v in case.options.items() if k != name})
        for name in case.options
        if len(case.options) > 1
    ]
    for one in smaller:
        found = disagreement(one, usual)
        if found.partition(":")[0] == words.partition(":")[0]:
            return shrink(one, found, usual)
    return case, words


def fate(cases: int, seed: int) -> list[str]:
    """Return the disagreements of `cases` random cases, each shrunk."""
    import torch

    from cookbook.titan.tt_0_2_2 import dry_build, job_config  # noqa: F401

    torch.set_num_threads(1)
    dry_build.warm_up()
    gc.collect()
    gc.freeze()
    chance, found = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory(prefix="fate-files-") as name:
        files = Path(name)
        write_files(files)
        _BASE[Names.assets] = str(files / "tokenizer/good")
        _BASE[Names.dataset_path] = str(files / "texts/good")
        usual = {}
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                usual[ranks] = truth(Case(ranks, {}), Path(folder))
            assert not any(one.died for one in usual[ranks]), usual
        for number in range(cases):
            case = draw(chance, files)
            if words := disagreement(case, usual):
                case, words = shrink(case, words, usual)
                found.append(f"{case}\n    {words}")
                print(f"{number}: {found[-1]}", flush=True)
    return found


def main() -> int:
    """Print the disagreements; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m bench.stress.fate", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    found = fate(arguments.cases, arguments.seed)
    took = time.monotonic() - began
    print(f"{len(found)} of {arguments.cases} cases disagree, seed {arguments.seed}, {took:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
