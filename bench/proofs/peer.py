"""Train Megatron-Core and the cookbook's cells in turn: docs/evidence/beside-megatron.md.

    python -m bench.proofs.peer OUT [--python PEER/bin/python]              # 16B, 8 layers, one GPU
    python -m bench.proofs.peer OUT --gpus 2 --routing random               # EP 2
    python -m bench.proofs.peer OUT --model slice --ours bf16+standard float8+standard \\
        --peers cudnn cudnn+blockwise cudnn+tensorwise

Every round trains each cell and each peer once, with the same model, batch, number formats of the
optimizer and routing. A cell is PRECISION+EP_BACKEND; the parts of a peer's name are in
bench.proofs.megatron. OUT/peer.json keeps every training and setting; a copy of it in
docs/evidence/performance/beside-megatron/ makes the tables of the page. Exit with status 1 if a
training fails or the peers in BF16 disagree on the first loss: then one of them computes something
else, however fast.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from bench.proofs.megatron import (
    MARK,
    MODELS,
    PARTS,
    SEQUENCES,
    STEPS,
    WARM_UP,
    flops_per_token,
    options_of,
)
from cookbook.base.files import json_text, write_whole
from cookbook.base.paths import LOCAL_ASSETS, ROOT
from cookbook.base.tables import markdown_table
from cookbook.install.corpus import is_made, make_corpus

# Transformer Engine 2.20.2 with a wrong window had 11.9367 where 11.9300 is right.
MOST_APART = 0.002
# Speeds within 2% are equal: one machine's rounds differ as much.
EQUAL = 0.02
# Characters of a document.
LONG = 1_300_000
# A large BF16 product on an H200.
PRODUCT_TFLOPS = 790
FP8 = {"float8", *(part for part, options in PARTS.items() if "fp8" in options)}
RECIPES = {"16b": "deepseek_v3_16b_8layers", "slice": "deepseek_v3_671b_slice"}
OURS = {1: ["bf16+standard"], 2: ["bf16+standard", "bf16+deepep"]}
PEERS = {1: ["cudnn", "flash"], 2: ["alltoall", "alltoall+overlapped", "deepep", "alltoall+flash"]}


@dataclass(frozen=True)
class Training:
    """One training of a round: the median speed a GPU after warm-up, or why it failed."""

    name: str
    ours: bool
    round: int
    tokens_per_second: float = 0.0
    memory_gib: float | None = None
    first_loss: float | None = None
    error: str = ""

    @property
    def format(self) -> str:
        return format_of(self.name)


def format_of(name: str) -> str:
    """Return the format of a training's GEMMs, by its parts."""
    return "FP8" if FP8 & set(name.split("+")) else "BF16"


@dataclass
class Run:
    """What was compared, and every training in the order in which they ran."""

    model: str
    gpus: int
    microbatches: int
    routing: str
    command: str
    versions: dict[str, str] = field(default_factory=dict)
    trainings: list[Training] = field(default_factory=list)

    @property
    def title(self) -> str:
        kind = "slice of the 671B" if self.model == "slice" else "16B, 8 layers"
        formats = {one.format for one in self.trainings}
        gpus = "one GPU" if self.gpus == 1 else f"{self.gpus} GPUs, EP {self.gpus}"
        micro = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        precision = " and ".join(sorted(formats))
        return f"{kind}, {precision}, {gpus}{micro}, routing {self.routing}"

    def tflops(self, speed: float) -> str:
        """Return the TFLOP/s of tokens/s a GPU, and their share of what a large product reaches."""
        reached = speed * flops_per_token(self.model) / 1e12
        return f"{reached:.0f} ({reached / PRODUCT_TFLOPS:.0%})"

    def speeds(self, name: str) -> dict[int, float]:
        """Return tokens/s a GPU of the rounds in which this training finished."""
        mine = [one for one in self.trainings if one.name == name and not one.error]
        return {one.round: one.tokens_per_second for one in mine}

    def best(self, *, ours: bool) -> str:
        """Return the name of the fastest side's training, by the median; empty if all failed."""
        names = {one.name for one in self.trainings if one.ours == ours and not one.error}
        return max(names, key=lambda name: median(self.speeds(name).values()), default="")

    def ratios(self, name: str) -> list[float]:
        """Return the training's speed in each round over the peer's best there in its format."""
        best: dict[int, float] = {}
        for one in self.trainings:
            if not one.ours and not one.error and one.format == format_of(name):
                best[one.round] = max(one.tokens_per_second, best.get(one.round, 0.0))
        mine = self.speeds(name).items()
        return [speed / best[number] for number, speed in mine if number in best]


def read_peer(text: str) -> dict[str, Any]:
    """Parse the output of bench.proofs.megatron; ValueError without a result or a finite loss."""
    found = [line for line in text.splitlines() if line.startswith(MARK)]
    if not found:
        raise ValueError(text.strip()[-2000:] or "the peer printed nothing")
    result: dict[str, Any] = json.loads(found[-1].removeprefix(MARK))
    if not math.isfinite(result["first_loss"]):
        raise ValueError(f"the first loss is {result['first_loss']}")
    return result


def read_report(text: str) -> dict[str, Any]:
    """Parse the one cell of `submit.py report --format json`; ValueError unless it finished."""
    try:
        (cell,) = json.loads(text)["cells"]
    except ValueError:
        raise ValueError(text.strip()[-2000:] or "the report is empty") from None
    if cell["status"] != "finished":
        raise ValueError(f"{cell['name']}: {cell['status']}: {cell['reason']}")
    speed = cell["tokens_per_second_per_gpu"]
    return {"tokens_per_second": speed, "memory_gib": cell["memory_gib"]}


def first_loss_apart(trainings: Iterable[Training]) -> float | None:
    """Return how far apart the first losses of the peers in BF16 are; None for one peer alone."""
    losses: dict[str, list[float]] = {}
    for one in trainings:
        if one.first_loss is not None and one.format == "BF16":
            losses.setdefault(one.name, []).append(one.first_loss)
    every = [loss for several in losses.values() for loss in several]
    return max(every) - min(every) if len(losses) > 1 else None


def peer_command(python: str, peer: str, run: Run) -> list[str]:
    """Return the words that train the peer, under torchrun for several GPUs."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.gpus}"]
    words = [python, *(torchrun if run.gpus > 1 else []), "-m", "bench.proofs.megatron", peer]
    words += ["--model", run.model, "--microbatches", str(run.microbatches)]
    return [*words, "--routing", run.routing]


def cell_command(
    recipe: str, name: str, run: Run, corpus: Path, settings: Iterable[str] = ()
) -> list[str]:
    """Return the words that train the cookbook's cell of that precision and EP backend."""
    precision, _, backend = name.partition("+")
    options: dict[str, Any] = {
        "training.dataset_path": corpus,
        "training.steps": WARM_UP + STEPS,
        "training.global_batch_size": SEQUENCES[run.model] * run.microbatches * run.gpus,
        "parallelism.expert_parallel_degree": run.gpus,
    }
    if run.routing == "random":
        options |= {"debug.moe_force_load_balance": False, "debug.moe_routing": "random"}
    if backend == "deepep":
        options["deepep.score_activations"] = True
    words = ["submit.py", "run", recipe, "--cluster", "local", "--precision", precision]
    words += ["--ep-backend", backend]
    for key, value in options.items():
        words.append(f"--set={key}={str(value).lower() if isinstance(value, bool) else value}")
    return [sys.executable, *words, *(f"--set={setting}" for setting in settings)]


def peer_environment(python: str) -> dict[str, str]:
    """Return the variables by which Transformer Engine finds the cuDNN of the peer's own torch."""
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    where = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    cudnn, found = Path(where) / "nvidia/cudnn", {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
    if cudnn.is_dir():
        paths = [str(cudnn / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        found |= {"CUDNN_HOME": str(cudnn), "CUDNN_PATH": str(cudnn)}
        found["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
    return found


def join_corpus(folder: Path) -> None:
    """Write the local corpus as a few long documents: hardly any sequence has an end in it."""
    if not is_made(LOCAL_ASSETS):
        make_corpus(LOCAL_ASSETS)
    lines = (LOCAL_ASSETS / "corpus/stdlib.jsonl").read_text(encoding="utf-8").splitlines()
    text = "".join(json.loads(line)["text"] for line in lines)
    documents = [text[start : start + LONG] for start in range(0, len(text), LONG)]
    joined = "".join(json.dumps({"text": one}) + "\n" for one in documents)
    write_whole(folder / "data.jsonl", joined)


def _output(words: Sequence[str], log: Path, **environment: str) -> str:
    env = os.environ | environment
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    # torchrun ends with a summary, far below the cause.
    write_whole(log, done.stdout + done.stderr)
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def train_cell(name: str, run: Run, log: Path, words: argparse.Namespace) -> dict[str, Any]:
    """Train the cookbook's cell; return the fields of a Training."""
    out = log.parent
    runs, corpus = out / f"runs-{time.time_ns()}", out / "corpus"
    recipe = words.recipe or RECIPES[run.model]
    command = cell_command(recipe, name, run, corpus, words.set)
    said = _output(command, log, COOKBOOK_RUNS=str(runs))
    made = next(runs.glob("*/run.json"), None)
    if made is None:
        raise ValueError(said.strip()[-2000:])
    report = [sys.executable, "submit.py", "report", str(made.parent), "--format", "json"]
    return read_report(_output(report, out / "report.log"))


def render(run: Run) -> str:
    """Return the run's table, its failures and the check of first losses."""
    head = ["", "tokens/s/GPU", "TFLOP/s", "GiB", "first loss", "over the peer's best"]
    rows, failed = [], []
    for ours in (True, False):
        names = dict.fromkeys(one.name for one in run.trainings if one.ours == ours)
        for name in names:
            found = [one for one in run.trainings if one.name == name]
            failed += [f"- {name}, round {one.round}: {one.error}" for one in found if one.error]
            speeds = run.speeds(name).values()
            if not speeds:
                continue
            done = next(one for one in found if not one.error)
            shown = "; ".join(f"{speed:,.0f}" for speed in speeds)
            row = [f"{'' if ours else 'Megatron-Core, '}`{name}`", shown]
            row.append(run.tflops(median(speeds)))
            row.append(f"{done.memory_gib:.1f}" if done.memory_gib else "")
            row.append("" if done.first_loss is None else f"{done.first_loss:.4f}")
            row.append("; ".join(f"{ratio:.3f}x" for ratio in run.ratios(name)))
            rows.append(row)
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    kept = [f"**{run.title}** ({versions})" + f": `{run.command}`" * bool(run.command)]
    kept.append(markdown_table(head, rows, "lrrrrr"))
    if failed:
        kept.append("Failed:\n\n" + "\n".join(failed))
    apart = first_loss_apart(run.trainings)
    if apart is not None:
        word = "agree" if apart <= MOST_APART else "DISAGREE: attention is wrong in one of them"
        kept.append(f"First losses of the peer in BF16 {word} (within {apart:.4f}).")
    return "\n\n".join(kept)


def summary(runs: Iterable[Run]) -> str:
    """Return where the cookbook leads, equals the peer and loses: best over best in one format."""
    rows = []
    each = ((run, {one.format for one in run.trainings}) for run in runs)
    for run in (
        replace(run, trainings=[one for one in run.trainings if one.format == kind])
        for run, kinds in each
        for kind in kinds
    ):
        ours, peer = run.best(ours=True), run.best(ours=False)
        if not (ratios := run.ratios(ours)):
            continue
        middle = median(ratios)
        word = "lead" if middle > 1 + EQUAL else "lose" if middle < 1 - EQUAL else "equal"
        sides = []
        for name in (ours, peer):
            speed = median(run.speeds(name).values())
            sides += [f"`{name}`", f"{speed:,.0f}", run.tflops(speed)]
        shown = "; ".join(f"{ratio:.3f}x" for ratio in ratios)
        rows.append((-middle, [word, run.title, *sides, shown]))
    side = ["tokens/s/GPU", "TFLOP/s"]
    head = ["we", "training", "our best", *side, "Megatron-Core's best", *side, "ours over theirs"]
    return markdown_table(head, [row for _, row in sorted(rows)], "lllrrlrrr")


def read_run(path: Path) -> Run:
    """Read OUT/peer.json, or a copy of it among the page's data."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return Run(**{**kept, "trainings": [Training(**one) for one in kept["trainings"]]})


def _versions() -> dict[str, str]:
    asked = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"commit": commit} | {name: metadata.version(name) for name in ("torch", "torchtitan")}


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=sys.executable, help="of the peer's environment")
    parser.add_argument("--model", choices=MODELS, default="16b")
    parser.add_argument("--gpus", type=int, choices=OURS, default=1, help="with 2, EP 2")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step, default 1")
    parser.add_argument("--routing", choices=("round-robin", "random"), default="round-robin")
    parser.add_argument("--ours", nargs="*", metavar="PRECISION+BACKEND")
    parser.add_argument("--peers", nargs="*", metavar="PART+PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recipe", default="", help="ours; default: the model's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of ours")
    chosen = parser.parse_args(words)
    chosen.ours = OURS[chosen.gpus] if chosen.ours is None else chosen.ours
    chosen.peers = PEERS[chosen.gpus] if chosen.peers is None else chosen.peers
    try:
        for peer in chosen.peers:
            options_of(peer, chosen.model)
    except ValueError as error:
        parser.error(f"--peers: {error}")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    chosen = _arguments(words)
    out = chosen.out.resolve()
    join_corpus(out / "corpus")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(chosen.gpus))))
    command = shlex.join(["python", "-m", "bench.proofs.peer", *(words or sys.argv[1:])])
    run = Run(chosen.model, chosen.gpus, chosen.microbatches, chosen.routing, command, _versions())
    surroundings = peer_environment(chosen.python)
    order = [(name, True) for name in chosen.ours] + [(name, False) for name in chosen.peers]
    for number in range(1, chosen.rounds + 1):
        for name, ours in order:
            log = out / f"{name}-{number}.log"
            try:
                if ours:
                    fields = train_cell(name, run, log, chosen)
                else:
                    asked = peer_command(chosen.python, name, run)
                    fields = read_peer(_output(asked, log, **surroundings))
                    run.versions |= fields.pop("versions")
                one = Training(name, ours, number, **fields)
            except ValueError as error:
                one = Training(name, ours, number, error=f"{error} ({log.name})")
            run.trainings.append(one)
            write_whole(out / "peer.json", json_text(run))
            said = one.error or f"{one.tokens_per_second:,.0f} tokens/s/GPU"
            print(f"round {number}, {name}: {said}", file=sys.stderr, flush=True)
    print(render(run))
    apart = first_loss_apart(run.trainings)
    wrong = apart is not None and apart > MOST_APART
    return int(wrong or any(one.error for one in run.trainings))


if __name__ == "__main__":
    sys.exit(main())
