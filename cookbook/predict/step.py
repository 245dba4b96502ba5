"""The time of an optimizer step by cause, and the tokens per second that follow from it.

The slowest rank sets the pace, since ranks synchronize in every layer. As in `submit.py profile`,
every millisecond counts once: as compute by kind, exposed communication or idle time.
docs/reference/models.md explains the terms; docs/evidence/prediction.md compares with measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.config.facts import Facts
from cookbook.predict.hardware import (
    Documents,
    Hardware,
    documents_of,
    hardware_of,
    slowest_attended_tokens,
)
from cookbook.predict.layer_time import HOST, Kernels, LayerTimes, add, scaled
from cookbook.predict.rank import Layer, Rank, describe_ranks, play
from cookbook.predict.shapes import shapes_of
from cookbook.predict.traffic import Links

OPTIMIZER, COPIES = "optimizer and gradient norm", "copies and casts, FSDP's packing"
FSDP, BESIDE = "FSDP, exposed", "compute beside FSDP"
BUBBLE, TEXT = "pipeline bubble", "texts"


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step on the busiest pipeline rank, in milliseconds."""

    rank: int
    terms_ms: Mapping[str, float]  # times by cause, which sum to the step time
    recompute_ms: float  # the part of the step spent on recomputation
    tokens_per_gpu: float
    documents: Documents | None  # document lengths; None if attention crosses documents

    @property
    def step_ms(self) -> float:
        return sum(self.terms_ms.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The throughput that TorchTitan logs as `tps`."""
        return 1000 * self.tokens_per_gpu / self.step_ms

    @property
    def largest(self) -> str:
        return max(self.terms_ms, key=lambda name: self.terms_ms[name])

    @property
    def exposed_ms(self) -> float:
        """The communication time that no compute overlaps."""
        return sum(time for name, time in self.terms_ms.items() if name.endswith("exposed"))

    def as_mapping(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "step_ms": round(self.step_ms, 1),
            "tokens_per_second_per_gpu": round(self.tokens_per_second_per_gpu, 1),
            "recompute_ms": round(self.recompute_ms, 1),
            "terms_ms": {name: round(time_ms, 1) for name, time_ms in self.terms_ms.items()},
        }


def predict_step(
    cell: Cell,
    ranks: Sequence[Rank] | None = None,
    documents: Documents | None = None,
    hardware: Hardware | None = None,
    overlapped: bool = True,
    released: bool = False,
) -> StepTime:
    """Predict the time of a cell's step; raise InputError if part of the cell is not modelled.

    `ranks`, `documents` and `hardware` override the cell's own. `overlapped`: whether DeepEP's
    dispatch and combine may overlap compute. `released`: whether TorchTitan runs without the
    cookbook's patches.
    """
    refuse_unmodelled(cell)
    hardware = hardware or hardware_of(cell)
    documents = documents_of(cell, documents)
    ranks = ranks or describe_ranks(cell)
    facts, layout = cell.facts, cell.layout
    shapes, seq_len = shapes_of(cell), facts.seq_len
    if released and shapes.deepep:
        # TorchTitan as released dispatches every token once per TP rank.
        sent_rows, rows = shapes.sent_rows * layout.tp, shapes.rows * layout.tp
        shapes = replace(shapes, sent_tokens=shapes.tokens, sent_rows=sent_rows, rows=rows)
    meeting = max(layout.ep * layout.etp // layout.tp, 1) if layout.ep > 1 else layout.dp_shard
    sequences = max(shapes.tokens // seq_len, 1)
    attended = (seq_len + 1) / 2
    if documents:
        attended = slowest_attended_tokens(documents, seq_len, sequences, meeting)
    kernels = Kernels(cell, shapes, hardware, attended, released)
    times = LayerTimes(kernels, overlapped)
    least_ms = hardware.host_ms_per_routed_layer
    if times.compute_ms(Layer(0, moe=True, recomputed=False))[0] < least_ms:
        found = f"a microbatch computes in a layer for less than {least_ms:g} ms: the host sets "
        found += "the pace, which is not modelled"
        place = cell.options.origin(Facts.local_batch)
        raise InputError(place, found, "use more tokens per microbatch")
    rounds = ranks[0].gradient_accumulation_steps
    busiest, bubble_ms = _busiest(ranks, times, kernels)
    microbatches = busiest.num_microbatches * rounds
    done = [terms for part in busiest.parts for terms in times.part(part)]
    exposed_ms, hidden_ms = _fsdp_ms(busiest, kernels, times)
    sums = microbatches if layout.pp > 1 else 0
    tokens = float(facts.local_batch * rounds * seq_len)
    terms = add(
        scaled(add(*done), microbatches),
        {
            BUBBLE: rounds * bubble_ms,
            FSDP: rounds * exposed_ms,
            BESIDE: rounds * hidden_ms * (1 - hardware.compute_beside_nccl_share),
            COPIES: kernels.copies(busiest, rounds, sums),
            OPTIMIZER: kernels.optimizer(busiest),
            HOST: hardware.host_ms_per_step,
            TEXT: 0.0 if facts.data_workers > 0 else tokens * hardware.text_us_per_token / 1000,
        },
    )
    recomputed = (times.again(layer.moe, layer.recomputed) for layer in busiest.layers)
    return StepTime(
        rank=busiest.rank,
        terms_ms={name: time for name, time in terms.items() if time > 0},
        recompute_ms=microbatches * sum(sum(one.values()) for one in recomputed),
        tokens_per_gpu=tokens * layout.replicas / layout.world,
        documents=documents,
    )


def _busiest(ranks: Sequence[Rank], times: LayerTimes, links: Links) -> tuple[Rank, float]:
    if ranks[0].num_stages == 1:
        return ranks[0], 0.0
    durations: dict[tuple[int, str], float] = {}
    for rank in ranks:
        for stage, part in zip(rank.stages, rank.parts, strict=True):
            forward, backward = (sum(terms.values()) for terms in times.part(part))
            durations |= {(stage, "I"): backward * 2 / 3, (stage, "W"): backward / 3}
            durations |= {(stage, "F"): forward, (stage, "B"): backward}
    end_ms, busy_ms = play([rank.actions for rank in ranks], durations, links.stage_ms)
    busiest_ms = max(busy_ms)
    return ranks[busy_ms.index(busiest_ms)], end_ms - busiest_ms


def _fsdp_ms(rank: Rank, links: Links, times: LayerTimes) -> tuple[float, float]:
    """Return the exposed and the hidden time of FSDP's communication for one microbatch."""
    if not links.shapes.mixed_precision:
        return 0.0, 0.0
    exposed = hidden = 0.0
    for part in rank.parts:
        for layer in part.layers:
            costs = [links.unit_ms(unit, beside_compute=True) for unit in layer.units]
            gather, reduce = (sum(some) for some in zip(*costs, strict=True))
            sent = (gather, gather * (links.gathers - 1) + reduce)
            for sent_ms, compute_ms in zip(sent, times.compute_ms(layer), strict=True):
                exposed += max(0.0, sent_ms - compute_ms)
                hidden += min(sent_ms, compute_ms)
        exposed += sum(sum(links.unit_ms(unit)) for unit in (*part.embedding, *part.head)[:1])
    return exposed, hidden


def refuse_unmodelled(cell: Cell) -> None:
    """Raise InputError, naming the option to change, if a cell's time is not modelled."""
    if cell.emulated:
        found = "is emulated on this cluster: its time says nothing"
        remedy = "use bf16 and standard, or a cluster whose GPUs support it"
        raise InputError(cell.emulated_parts[0].name, found, remedy)
    facts = cell.facts
    param, is_fp32 = Facts.mixed_precision_param, facts.param_dtype == "float32"
    is_eager, is_unfused = not facts.is_compiled, facts.optimizer != "fused"
    reshards = facts.pp > 1 and facts.fsdp_reshard == "always"
    for name, is_found, found, remedy in (
        (Facts.fsdp_reshard, reshards, "gathering for each microbatch", "use default"),
        (param, is_fp32, "FP32, as with TP or PP and no FSDP", "use bfloat16 and FSDP"),
        (Facts.is_compile_on, is_eager, "a model that is not compiled", "compile the model"),
        (Facts.cpu_offload, facts.cpu_offload, "CPU offload", "set it to false"),
        (Facts.optimizer, is_unfused, "an optimizer that is not fused", "use fused"),
    ):
        if is_found:
            place = cell.options.origin(name)
            raise InputError(place, f"{found}: its time is not modelled", remedy)
