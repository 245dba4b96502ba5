"""Compare the verdict on random options and files with what the pinned TorchTitan does with them.

    python -m bench.stress.fate [--cases 2000] [--seed 1]       (make fate)

Each case trains DeepSeek-V3's debug model for two steps on CPU ranks, in forks of this process,
whether or not the rules accept it. Where it saves, it resumes, often with one more option, and its
last checkpoint is exported. A case disagrees if it is accepted and dies, refused and trains, raises
a traceback, or trains, resumes or exports otherwise than its options say. It is shrunk to one
command line.
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
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.stress.fate_files import FILES, write_files, write_weights
from cookbook.base.errors import InputError
from cookbook.check.check import _request
from cookbook.config.asked import keep_request
from cookbook.config.cell import Cell, train_argv
from cookbook.config.dialect.argv import argv_of, parse_argv
from cookbook.config.dialect.classes import REFUSED, class_of
from cookbook.config.dialect.names import DEGREES, OVERRIDES, TEXTS, Names, options_that
from cookbook.config.options import command_line_settings, settings_of
from cookbook.config.resolve import cell_on, this_machine
from cookbook.config.stack import Option, load_stack
from cookbook.config.validate import judge
from cookbook.run.folder import CellFolder, read_checkpoint, saved_steps
from cookbook.supervise.resume_point import note_saved, prepare

_SECONDS, _STEPS, _ENDED, _SAVED = 120, 2, "ended with status", "saved"
_OPTIONS = load_stack().options
# A model so small that a step takes no time; the options under test override these.
_BASE = {
    **{f"{OVERRIDES}{size}": "64" for size in ("dim", "vocab_size")},
    **{f"{OVERRIDES}{size}": "32" for size in ("inter_dim", "moe_inter_dim")},
    f"{OVERRIDES}n_layers": "2",
    Names.ep: "1",
    Names.seq_len: "32",
    Names.steps: str(_STEPS),
    Names.warmup_steps: "1",
    Names.profile_freq: "2",
    Names.profile_warmup: "1",
    Names.is_tensorboard_on: "false",
    Names.validation_steps: "1",
}
# Rules that refuse what TorchTitan would take: it ignores a typo, or has no use for a value.
_STRICTER = {"refused_options", "names", "bounds", "selected", "unused", "routing", "c4_test"}
_STRICTER |= {"vocabulary", "addresses", "texts", "needs_gpus", "formats", "without_workers"}
_STRICTER |= {"parse", "kept_checkpoints", "profiled_steps", "validation"}
# Options that change a rank's batches, beside those that decide the texts.
_BATCH = {Names.local_batch, Names.global_batch, Names.data_workers, *DEGREES.values()}
# What a resume sets, of the options that a user sets.
_OF_RESUMES = (Names.checkpoint_folder, Names.load_step, Names.load_excluded)
_FEW = ("model.name", "compile.", "model.overrides.vocab_size")  # slow, or another model


@dataclass(frozen=True)
class Case:
    """Options as a user writes them after `--set`, also of a resume, and a number of ranks."""

    ranks: int = 1
    options: Mapping[str, str] = field(default_factory=dict)
    later: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        first, later = (
            " ".join(f"--set {shlex.quote(f'{name}={one}')}" for name, one in options.items())
            for options in (self.options, self.later)
        )
        return f"{self.ranks} rank(s): {first}" + (f"; resumed with {later}" if later else "")

    @property
    def resumed(self) -> "Case":
        """The case as it resumes, for one more step."""
        steps = {Names.steps: str(_STEPS + 1)}
        return replace(self, options={**self.options, **steps, **self.later}, later={})


@dataclass
class Outcome:
    """What happened in a fork; `died` says why it did not reach its end."""

    died: str = ""
    rule: str = ""  # what refused it: a rule, `build`, `parse` or `TRACEBACK`
    values: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # a checksum before and after each step
    batches: list[int] = field(default_factory=list)


def draw(chance: random.Random, files: Path) -> Case:
    """Return a case of one to three options, with those that turn them on."""
    known = [one for name, one in _OPTIONS.items() if class_of(name) != REFUSED]
    known = [one for one in known if not one.name.startswith(_FEW)]
    ranks = chance.choice((1, 1, 1, 1, 1, 1, 1, 2, 2, 4))
    likely = [_OPTIONS[name] for name in (*FILES, *(DEGREES.values() if ranks > 1 else ()))]
    pool = likely if chance.random() < 0.4 else known
    chosen = chance.sample(pool, chance.choice((1, 1, 2, 2, 3)))
    options = {option.name: _value(option, chance, files) for option in chosen}
    for name in [*options]:
        switch = f"{name.partition('.')[0]}.enable"
        switch = Names.profiles if name.startswith("profiling.") else switch
        if switch in _OPTIONS and chance.random() < 0.8:
            options |= {switch: "true"}
    for files_of, dataset in (
        (Names.text_files, Names.dataset),
        (Names.validation_files, Names.validation_dataset),
    ):
        if files_of in options and chance.random() < 0.9:
            options |= {dataset: "text"}
    if "/weights/hf" in options.get(Names.initial_load_path, ""):
        options |= {Names.initial_load_in_hf: chance.choice(("true", "true", "false"))}
    if chance.random() < 0.3:
        options |= {Names.checkpoints: "true"}
    # Another layout, or another model, saves other shards.
    pool = [one for one in known if not one.name.startswith(("parallelism.", "model."))]
    later = chance.choice((chance.choice(pool), *(_OPTIONS[name] for name in FILES)))
    more = {later.name: _value(later, chance, files)} if chance.random() < 0.6 else {}
    return Case(ranks, options, more)


def _value(option: Option, chance: random.Random, files: Path) -> str:
    if option.name in FILES and chance.random() < 0.9:
        return str(files / chance.choice(FILES[option.name]))
    if option.name in DEGREES.values():
        return chance.choice(("1", "2", "4", "-1", "3"))
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
            os.write(answer, json.dumps(vars(function(*arguments))).encode())
        os._exit(0)

    def wait() -> Outcome:
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        said = os.pread(answer, os.fstat(answer).st_size, 0)
        os.close(answer)
        return Outcome(**json.loads(said)) if said else Outcome(f"{_ENDED} {status}")

    return wait


def cell_of(case: Case) -> Cell:
    """Merge the case into a cell without a verdict; raise InputError for what cannot be read."""
    words = [f"{name}={one}" for name, one in {**_BASE, **case.options}.items()]
    options = {name: one.value for name, one in command_line_settings(words).items()}
    machine = replace(this_machine(case.ranks, None), scheduler="local")
    return cell_on(machine, "debug", "bf16", "standard", options)


def verdict(case: Case, folder: Path) -> Outcome:
    """Say whether the rules and the dry build accept the case."""
    from cookbook.titan.tt_0_2_2.dry_build import _build_rank

    _quiet(folder / "verdict.log")
    try:
        cell = cell_of(case)
        if errors := judge(cell).errors:
            return Outcome(str(errors[0]), errors[0].rule)
        read = parse_argv(argv_of(load_stack(), cell.options.settings), "argv", load_stack())
        if read.values != {name: one for name, one in cell.options.values.items() if one != []}:
            return Outcome(f"argv is read back otherwise: {read.values}", "TRACEBACK")
        built = _build_rank(_request(cell), 0, folder)
        if "error" in built:
            return Outcome(built["error"], "build")
        own = CellFolder(folder)
        if (first := own.attempt(0)).metrics.exists():
            note_saved(own, first)
        asked = cell.job_record()
        asked.options[Names.checkpoint_folder] = _SAVED
        keep_request(own, asked, "")
        attempt = own.next_attempt()
        loads = prepare(own, attempt, asked)
        attempt.metrics.touch()
        return Outcome(values=loads)
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
    os.environ |= {"HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1"}
    _quiet(folder / f"rank{rank}.log")
    found, trainer = Outcome(), titan.Trainer
    step, batches = trainer.train_step, trainer.batch_generator

    def checksum(self: Any) -> float:
        tensors = [one for part in self.model_parts for one in part.parameters()]
        local = (getattr(one, "_local_tensor", one).detach() for one in tensors)
        return sum(float(getattr(one, "_data", one).double().abs().sum()) for one in local)

    def noted_step(self: Any, data: Any) -> None:
        found.steps.append(self.step)
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
        return bool(self.step < min(self.job_config.training.steps, _STEPS + 1))

    trainer.train_step, trainer.batch_generator = noted_step, noted_batches
    trainer.should_continue_training = goes_on
    vars(titan)["time"] = argparse.Namespace(**vars(time) | {"sleep": lambda seconds: None})
    titan.ConfigManager.parse_args.__defaults__ = (argv,)
    try:
        config = titan.ConfigManager().parse_args(argv)
        found.values = {n: reduce(getattr, n.split("."), config) for n in _OPTIONS}
        titan.main(trainer)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            log = (folder / f"rank{rank}.log").read_text(errors="replace").strip()
            words = log if isinstance(error, SystemExit) else " ".join(str(error).split())
            found.died = f"{type(error).__name__}: {words[-300:]}"
    return found


def truth(
    case: Case, folder: Path, loads: Mapping[str, Any] = MappingProxyType({}), again: bool = True
) -> list[Outcome]:
    """Train the case whatever the rules say; return the outcome of each rank."""
    cell, own = cell_of(case), {Names.checkpoint_folder: f"{folder}/{_SAVED}"}
    argv = [*train_argv(cell), *argv_of(load_stack(), settings_of({**loads, **own}))]
    argv += [f"--job.dump_folder={folder}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    waits = [forked(train, argv, rank, case.ranks, port, folder) for rank in range(case.ranks)]
    ranks = [wait() for wait in waits]
    # gloo aborts now and then.
    is_aborted = again and any(one.died.startswith(_ENDED) for one in ranks)
    return truth(case, folder, loads, again=False) if is_aborted else ranks


def silent(case: Case, ranks: list[Outcome], usual: list[Outcome]) -> str:
    """Return how the training differs from what the options say; empty if it does not."""
    cell = cell_of(case)
    for one, plain in zip(ranks, usual, strict=True):
        for name, value in cell.options.values.items():
            said = "inf" if name == Names.max_norm and value == 0 else value
            if name not in _OF_RESUMES and str(one.values[name]) != str(said):
                return f"{name}: TorchTitan reads {one.values[name]!r}, the cell has {value!r}"
        if any(not 0 <= rate <= cell.facts.lr * 1.000001 for rate in one.rates):
            return f"learning rates {one.rates} beside {cell.facts.lr}"
        if not all(map(math.isfinite, one.weights)):
            return "the weights are not finite"
        if max(one.rates, default=0) > 0 and one.weights[0] == one.weights[-1]:
            return "the weights do not change"
        is_same = not case.options.keys() & {*options_that(TEXTS), *_BATCH, Names.load_excluded}
        own = [plain.batches[step - 1] for step in one.steps]
        if is_same and one.batches[: len(own)] != own:
            return "the batches differ from those without the options"
        is_usual = not case.options.keys() & {*options_that(TEXTS)}
        if is_usual and len({*one.batches}) < len(one.steps):
            return "a batch is trained twice"
    return ""


def after_saving(
    case: Case, folder: Path, first: list[Outcome], usual: Mapping[int, list[Outcome]]
) -> str:
    """Resume the case's newest checkpoint as a job does, and export it; return what is wrong."""
    saved = saved_steps(folder / _SAVED)
    if not saved or (error := forked(export_newest, case, *saved[0], first)().died):
        return f"EXPORT: {error}" if saved else ""
    resumed = case.resumed
    said = forked(verdict, resumed, folder)()
    if said.died:
        return f"TRACEBACK: {said.died}" if said.rule in ("TRACEBACK", "") else ""
    ranks = truth(resumed, folder, said.values)
    if died := next((one.died for one in ranks if one.died), ""):
        return f"RESUMED, AND DIES: {died}"
    if words := silent(resumed, ranks, usual[case.ranks]):
        return f"RESUMED, SILENT: {words}"
    for one, before in zip(ranks, first, strict=True):
        is_loaded = one.steps and "model" not in said.values[Names.load_excluded]
        if is_loaded and one.steps[0] != before.steps[-1] + 1:
            return f"RESUMED, SILENT: begins with step {one.steps[0]} after {before.steps}"
        if is_loaded and one.weights[0] != before.weights[-1]:
            return "RESUMED, SILENT: the weights are not those that were saved"
    return ""


def export_newest(case: Case, step: int, path: Path, ranks: list[Outcome]) -> Outcome:
    """Export a checkpoint as `submit.py export` does, and compare it with what was trained."""
    from safetensors.torch import load_file

    from cookbook.titan.tt_0_2_2.export import Request, export

    _quiet(path.with_name("export.log"))
    options, to = cell_of(case).options, path.with_name("exported")
    assert options.family and options.model
    if read_checkpoint(step, path).is_exported or options.family.unpublished(options.model):
        return Outcome()
    flavor, length = options[Names.flavor], options[Names.seq_len]
    request = Request(str(path), str(to), options[Names.model_name], flavor, length, "float32")
    try:
        export(replace(request, overrides=options.overrides))
    except Exception:
        return Outcome(traceback.format_exc())
    tensors = [one for file in to.glob("*.safetensors") for one in load_file(file).items()]
    weights = sum(float(t.double().abs().sum()) for name, t in tensors if "bias" not in name)
    if len(ranks) == 1 and not math.isclose(weights, ranks[0].weights[-1], rel_tol=1e-5):
        return Outcome(f"the weights sum to {weights}, and {ranks[0].weights[-1]} was trained")
    return Outcome()


def disagreement(case: Case, usual: Mapping[int, list[Outcome]]) -> str:
    """Return what is wrong with the verdict; empty if it is right."""
    with tempfile.TemporaryDirectory(prefix="fate-") as name:
        said = forked(verdict, case, Path(name))()
        if said.rule == "TRACEBACK" or (said.died and not said.rule):
            return f"TRACEBACK: {said.died}"
        # No model may have the sizes that the layout's rule refuses, though some are ignored.
        if said.rule in _STRICTER or said.died.startswith(OVERRIDES):
            return ""
        ranks = truth(case, Path(name))
        died = next((one.died for one in ranks if one.died), "")
        if died:
            return "" if said.died else f"ACCEPTED, AND DIES: {died}"
        words = silent(case, ranks, usual[case.ranks])
        if said.died:
            return "" if words else f"REFUSED, AND TRAINS: {said.rule}: {said.died}"
        return f"SILENT: {words}" if words else after_saving(case, Path(name), ranks, usual)


def shrink(case: Case, words: str, usual: Mapping[int, list[Outcome]]) -> tuple[Case, str]:
    """Leave out options and ranks without which the case disagrees in the same way."""
    smaller = [replace(case, ranks=1)] if case.ranks > 1 else []
    smaller += [replace(case, later={})] if case.later else []
    for name in case.options:
        rest = {key: one for key, one in case.options.items() if key != name}
        smaller += [replace(case, options=rest)] if rest else []
    for one in smaller:
        found = disagreement(one, usual)
        if found.partition(":")[0] == words.partition(":")[0]:
            return shrink(one, found, usual)
    return case, words


@contextlib.contextmanager
def prepared() -> Any:
    """Import TorchTitan, write the files, and yield their folder and the usual outcomes."""
    import torch

    from cookbook.titan.tt_0_2_2 import dry_build

    torch.set_num_threads(1)
    dry_build.warm_up()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="fate-files-") as name:
        files = Path(name)
        write_files(files)
        _BASE[Names.assets] = str(files / "tokenizer/good")
        for option in (Names.dataset_path, Names.validation_path):
            _BASE[option] = str(files / "texts/good")
        _BASE[Names.validation_dataset] = "c4_test"
        write_weights(files, lambda options, to: truth(Case(options=options), to))
        usual = {}
        for ranks in (1, 2, 4):
            (files / f"{ranks}").mkdir()
            usual[ranks] = truth(Case(ranks).resumed, files / f"{ranks}")
            assert not any(one.died for one in usual[ranks]), usual
        yield files, usual


def fate(cases: int, seed: int) -> list[str]:
    """Return the disagreements of `cases` random cases, each shrunk."""
    chance, found = random.Random(seed), list[str]()
    with prepared() as (files, usual):
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
    began, cases, seed = time.monotonic(), arguments.cases, arguments.seed
    found = fate(cases, seed)
    took = time.monotonic() - began
    print(f"{len(found)} of {cases} cases disagree, seed {seed}, {took:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
