"""The time of an optimizer step, by cause, and the tokens per second that follow from it.

The slowest rank sets the pace, since ranks meet in every layer. Each millisecond is counted once,
as `submit.py profile` does: compute by kind, then what nothing hides of communication, then what
the GPU waits for. docs/time.md says how each term is counted, and shows predicted times beside
measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.predict.documents import Documents, documents_of, slowest_attended_tokens
from cookbook.predict.exchange import Links
from cookbook.predict.hardware import Hardware, hardware_of
from cookbook.predict.kernels import Kernels, Terms, add, scaled
from cookbook.predict.layer_time import LayerTimes
from cookbook.predict.pipeline import play
from cookbook.predict.rank import describe_ranks
from cookbook.predict.shapes import Shapes, shapes_of

OPTIMIZER, COPIES = "optimizer and gradient norm", "copies and casts, FSDP's packing"
FSDP, BESIDE = "FSDP, exposed", "compute beside FSDP"
BUBBLE, HOST, TEXT = "pipeline bubble", "host", "texts"


@dataclass(frozen=True)
class StepTime:
    """A predicted step of the busiest pipeline rank; milliseconds.

    Attributes:
        terms_ms: by cause; they add up to the step.
        recompute_ms: the part of them that computes or sends again what a forward had.
    """

    rank: int
    terms_ms: Mapping[str, float]
    recompute_ms: float
    tokens_per_gpu: float

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return sum(self.terms_ms.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """As TorchTitan logs it (`tps`)."""
        return 1000 * self.tokens_per_gpu / self.step_ms

    @property
    def largest(self) -> str:
        """The cause that takes most."""
        return max(self.terms_ms, key=lambda name: self.terms_ms[name])

    def as_mapping(self) -> dict[str, Any]:
        """For JSON; units are in the names."""
        return {
            "rank": self.rank,
            "step_ms": round(self.step_ms, 1),
            "tokens_per_second_per_gpu": round(self.tokens_per_second_per_gpu, 1),
            "recompute_ms": round(self.recompute_ms, 1),
            "terms_ms": {name: round(time_ms, 1) for name, time_ms in self.terms_ms.items()},
        }

    @property
    def exposed_ms(self) -> float:
        """Communication that nothing hides."""
        return sum(time for name, time in self.terms_ms.items() if name.endswith("exposed"))


def predict_step(
    cell: Cell,
    views: Sequence[Mapping[str, Any]] | None = None,
    documents: Documents | None = None,
    hardware: Hardware | None = None,
    overlapped: bool = True,
) -> StepTime:
    """The step of a cell.

    Args:
        views: of the first rank of every pipeline stage; counted where None.
        documents: those of the cell's dataset where None.
        hardware: that of the cell's GPU where None.
        overlapped: whether a DeepEP layer computes beside its exchanges, as it does today.

    Raises:
        InputError: something that the model does not know; nothing is guessed.
    """
    refuse_unmodelled(cell)
    hardware = hardware or hardware_of(cell)
    documents = documents or documents_of(cell)
    views = views or describe_ranks(cell)
    shapes = _as_it_runs(cell, shapes_of(cell, views[0]))
    layout = cell.layout
    sequences = max(shapes.tokens // cell.options["training.seq_len"], 1)
    ranks = max(layout.ep * layout.etp // layout.tp, 1) if layout.ep > 1 else layout.dp_shard
    attended = slowest_attended_tokens(
        documents, cell.options["training.seq_len"], sequences, ranks
    )
    kernels = Kernels(cell, hardware, shapes, attended)
    links = Links(cell, hardware, shapes)
    times = LayerTimes(cell, kernels, links, views[0], overlapped)
    _refuse_small(cell, times, hardware)
    rounds = views[0]["gradient_accumulation_steps"]
    worked, again, rank, bubble = _worked(views, times, links)
    view = views[rank]
    terms = scaled(worked, rounds)
    terms[BUBBLE] = rounds * bubble
    terms[FSDP], hidden_ms = _fsdp_ms(cell, view, links, times, rounds)
    terms[BESIDE] = hidden_ms * (1 - hardware.compute_beside_nccl_share)
    gathers, reduces = _rounds_of_fsdp(cell, rounds)
    terms[COPIES] = kernels.copies(view, gathers, reduces)
    if layout.pp > 1:
        terms[COPIES] += times.kept_gradients_ms(view) * view["num_microbatches"] * rounds
    terms[OPTIMIZER] = kernels.optimizer(view)
    terms[HOST] = terms.get(HOST, 0.0) + hardware.host_ms_per_step
    batch = cell.options["training.local_batch_size"] * rounds
    tokens = float(batch * cell.options["training.seq_len"])
    if not cell.options["training.dataloader.num_workers"]:
        terms[TEXT] = tokens * hardware.text_us_per_token / 1000
    return StepTime(
        rank=view["rank"],
        terms_ms={name: time for name, time in terms.items() if time > 0},
        recompute_ms=again * rounds,
        tokens_per_gpu=tokens * layout.dp_replicate * layout.dp_shard / layout.world,
    )


def _worked(
    views: Sequence[Mapping[str, Any]], times: LayerTimes, links: Links
) -> tuple[Terms, float, int, float]:
    """All microbatches of the busiest rank, what of it is done again, the rank, its bubble."""
    if views[0]["num_stages"] == 1:
        (only,) = views[0]["parts"]
        return add(*times.part(only)), times.recompute_ms(only), 0, 0.0
    parts = {
        stage: part
        for view in views
        for stage, part in zip(view["stages"], view["parts"], strict=True)
    }
    durations: dict[tuple[int, str], float] = {}
    for stage, part in parts.items():
        forward, backward = map(_total, times.part(part))
        # A backward in two halves: the gradients of inputs, and those of weights.
        halves = {"I": backward * 2 / 3, "W": backward / 3}
        for kind, time_ms in {"F": forward, "B": backward, **halves}.items():
            durations[stage, kind] = time_ms
    played = play([view["actions"] for view in views], durations, len(parts) - 1, links.stage_ms())
    view = views[played.busiest]
    count = view["num_microbatches"]
    done = [terms for part in view["parts"] for terms in times.part(part)]
    worked = scaled(add(*done), count)
    again = count * sum(times.recompute_ms(part) for part in view["parts"])
    return worked, again, played.busiest, played.bubble_ms


def _total(terms: Mapping[str, float]) -> float:
    return sum(terms.values())


def _rounds_of_fsdp(cell: Cell, rounds: int) -> tuple[int, int]:
    """How often a step gathers and reduces every unit."""
    if cell.layout.pp > 1:
        return rounds, rounds
    never = cell.options["parallelism.fsdp_reshard_after_forward"] == "never"
    return (1 if never else 2) * rounds, rounds


def _fsdp_ms(
    cell: Cell, view: Mapping[str, Any], links: Links, times: LayerTimes, rounds: int
) -> tuple[float, float]:
    """What compute does not hide, layer by layer, and what it does.

    Nothing hides the gather before the first layer, and the reduction behind the last backward.
    """
    if not view["mixed_precision"]:
        return 0.0, 0.0
    exposed = hidden = 0.0
    gathers, _ = _rounds_of_fsdp(cell, 1)
    for part in view["parts"]:
        units = {unit["name"]: unit for unit in part["units"]}
        for layer in part["layers"]:
            prefix = f"layers.{layer['id']}."
            costs = [
                links.unit_ms(unit, beside_compute=True)
                for name, unit in units.items()
                if f"{name}.".startswith(prefix)
            ]
            gather, reduce = sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)
            forward, backward = times.compute_ms(layer)
            sent = (gather, gather * (gathers - 1) + reduce)
            exposed += max(0.0, sent[0] - forward) + max(0.0, sent[1] - backward)
            hidden += min(sent[0], forward) + min(sent[1], backward)
        ends = [unit for name, unit in units.items() if not name.startswith("layers.")]
        exposed += sum(sum(links.unit_ms(unit)) for unit in ends[:1])
    return exposed * rounds, hidden * rounds


def _as_it_runs(cell: Cell, shapes: Shapes) -> Shapes:
    """DeepEP as TorchTitan released it sends, and computes, every token once for each TP rank."""
    released = cell.hooks != cell.options.stack.hooks
    if not (released and shapes.deepep and cell.layout.tp > 1):
        return shapes
    return replace(
        shapes,
        sent_tokens=shapes.tokens,
        sent_rows=shapes.sent_rows * cell.layout.tp,
        rows=shapes.rows * cell.layout.tp,
    )


def _refuse_small(cell: Cell, times: LayerTimes, hardware: Hardware) -> None:
    """Where kernels are short, the host that launches them sets the pace."""
    least_ms = hardware.host_ms_per_routed_layer
    if times.compute_ms({"moe": True, "recomputed": False})[0] < least_ms:
        raise InputError(
            cell.options.origin("training.local_batch_size"),
            f"a microbatch computes in a layer for less than {least_ms:g} ms: the host sets the "
            "pace, which is not modelled",
            "take more tokens a microbatch",
        )


def refuse_unmodelled(cell: Cell) -> None:
    """Refuse what the model does not know.

    Raises:
        InputError: its place is that of the option to change.
    """
    options = cell.options

    def refusal(name: str, found: str, remedy: str) -> InputError:
        return InputError(options.origin(name), f"{found}: its time is not modelled", remedy)

    if cell.emulated:
        raise InputError(
            f"precision {cell.precision.name}",
            "is emulated on this cluster: its time says nothing",
            "take bf16, or a cluster whose GPUs have it",
        )
    if cell.layout.cp > 1:
        raise refusal("parallelism.context_parallel_degree", "context parallelism", "set it to 1")
    if not cell.is_compiled:
        raise refusal("compile.enable", "a model that is not compiled", "compile the model")
    if options["training.enable_cpu_offload"]:
        raise refusal("training.enable_cpu_offload", "CPU offload", "set it to false")
    if options["optimizer.implementation"] != "fused":
        raise refusal("optimizer.implementation", "an optimizer that is not fused", "take fused")
