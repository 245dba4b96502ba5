"""What a job's options mean, as typed facts: the layout, recomputation, precision, dispatch, ...

Rooms outside `config` read facts, and take an option's name from the same place for their messages:
`cell.facts.local_batch` is a number, `Facts.local_batch` the option that it came from.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from cookbook.config.dialect.names import CONVERTERS, DEGREES, Converter, Names
from cookbook.config.options import Options, options_of
from cookbook.run.record import CellRecord

# TorchTitan's default number of stages per pipeline rank, by schedule; looped schedules allow more.
STAGES_PER_RANK = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2}
STAGES_PER_RANK |= {"InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
# The operators that a save list may name; the first three are TorchTitan's default.
SAVED_OPERATORS = ("attention", "communication", "mm", "grouped_mm")


@dataclass(frozen=True)
class Layout:
    """The parallel degrees of a job; in a valid job each is at least 1."""

    world: int
    pp: int
    dp_replicate: int
    # A configured -1 means all remaining ranks; it is resolved here, to 0 if no ranks remain.
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int

    @property
    def stage_ranks(self) -> int:
        return self.world // self.pp

    @property
    def replicas(self) -> int:
        """The number of ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def has_fsdp(self) -> bool:
        return self.dp_shard * self.cp > 1


@dataclass(frozen=True)
class Exchange:
    """How tokens travel to the ranks of their experts."""

    name: str  # as YAML files and logs write it: `deepep`
    title: str  # as error messages write it: `DeepEP`
    ep_backend: str  # its file in `recipes/ep_backend/`
    sizes: tuple[int, ...] = ()  # supported EP degrees; empty for any
    ranks_per_node: int = 0  # required ranks per node if EP spans nodes; 0 for any number
    has_own_layer: bool = False  # whether the cookbook has its own MoE layer for this exchange
    sends_once_per_rank: bool = False  # whether a token is sent once per rank, not per expert
    is_quantized: bool = False  # whether tokens travel in MXFP8
    modules: tuple[str, ...] = ()  # Python modules with its kernels; empty for PyTorch's own
    kernels: str = ""  # pattern of its kernels' names in a trace; empty for NCCL's
    needs_ibgda: bool = False  # whether a GPU must ring the network card's doorbell, between nodes


STANDARD = Exchange("standard", "the all-to-all", "standard")
_MXFP8 = Exchange(
    *("mxfp8", "TorchAO's quantized all-to-all", "mxfp8_a2a"),
    is_quantized=True,
    # A Triton kernel over symmetric memory.
    kernels=r"_mxfp8_all_to_all_v_kernel",
)
# EP degrees for which the pinned DeepEP has a configuration. At any other degree its
# `Buffer.get_dispatch_config` fails an assertion.
_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_DEEPEP = Exchange(
    *("deepep", "DeepEP", "deepep", _SIZES, 8),
    has_own_layer=True,
    sends_once_per_rank=True,
    modules=("deep_ep", "deep_ep.utils"),
    needs_ibgda=True,
    # deep_ep::intranode, internode, internode_ll, layout; also NVSHMEM's barrier.
    kernels=r"\bdeep_ep::|\bnvshmem",
)
EXCHANGES = {exchange.name: exchange for exchange in (STANDARD, _DEEPEP, _MXFP8)}


@dataclass(frozen=True)
class Reader:
    """What training, or validation, reads; `options` are the options that say so."""

    dataset: str
    files: list[str]  # globs and folders of texts, for the dataset TEXT
    path: str | None  # the folder of another dataset
    workers: int  # processes of a rank's data loader
    options: tuple[str, str, str]  # of the dataset, of the files and of the folder


TEXT = "text"  # the dataset that reads a user's own files


@dataclass(frozen=True, eq=False)
class Facts(Names):
    """The facts of a job on `world` ranks: those that are options (`Names`), and what follows."""

    options: Options
    world: int

    @functools.cached_property
    def layout(self) -> Layout:
        degrees = {short: self.options[name] for short, name in DEGREES.items()}
        if degrees["dp_shard"] == -1:
            others = degrees["dp_replicate"] * degrees["cp"] * degrees["tp"] * degrees["pp"]
            degrees["dp_shard"] = self.world // max(others, 1)
        return Layout(world=self.world, **degrees)

    @property
    def less_layers(self) -> tuple[int, int]:
        """How many fewer layers the first and last stages get, due to embedding and output."""
        return self.first_stage_less, self.last_stage_less

    @property
    def known_schedule(self) -> str | None:
        """The schedule as PyTorch spells it; None if its stages are not known."""
        known = {name.lower(): name for name in STAGES_PER_RANK}
        return known.get(self.schedule.lower())

    def num_stages(self, num_layers: int) -> int:
        """Return how many pipeline stages `num_layers` layers make; raise KeyError if unknown."""
        if self.layout.pp == 1:
            return 1
        if self.layers_per_stage:
            return math.ceil((num_layers + sum(self.less_layers)) / self.layers_per_stage)
        return self.layout.pp * STAGES_PER_RANK[self.known_schedule or ""]

    @property
    def microbatches(self) -> int | None:
        """Microbatches per step in a valid layout; None without a pipeline."""
        return self.local_batch // self.microbatch if self.layout.pp > 1 else None

    @property
    def accumulation_steps(self) -> int:
        return max(self.global_batch // (self.local_batch * self.layout.replicas), 1)

    @property
    def param_dtype(self) -> str:
        """The dtype in which forward and backward compute."""
        layout = self.layout
        # FSDP casts the parameters. Without FSDP, TorchTitan uses autocast, but not with TP or PP.
        casts = layout.has_fsdp or layout.tp * layout.pp == 1
        return self.mixed_precision_param if casts else self.dtype

    @property
    def is_compiled(self) -> bool:
        return self.is_compile_on and "model" in self.compiled_components

    @property
    def is_loss_compiled(self) -> bool:
        return self.is_compile_on and "loss" in self.compiled_components

    @property
    def uses_flash_attention(self) -> bool:
        """Whether FlashAttention-4, or its reference on the CPU, computes attention."""
        return self.attention == "flash_attention_4"

    @property
    def saves(self) -> frozenset[str]:
        """The operators whose outputs selective recomputation saves; empty if that mode is off."""
        is_on = self.ac_mode == "selective" and self.ac_selective == "op"
        return frozenset(self.ac_save_list or SAVED_OPERATORS[:3]) if is_on else frozenset()

    @property
    def budget(self) -> float | None:
        """The share of activations that stay in memory; None in other modes of recomputation."""
        return self.ac_budget if self.ac_mode == "memory_budget" else None

    def recomputes(self, place: int, count: int, number: int) -> bool:
        """Return whether the backward recomputes a layer as a whole, or all but saved operators.

        The layer has place `place` of `count` on its stage and is its rank's layer number `number`.
        """
        by_layer = self.ac_mode == "selective" and not self.saves
        every = (int(self.ac_selective) or 1) if by_layer else 1
        is_chosen = place < count - self.ac_layers_kept and number % every == 0
        return is_chosen and self.ac_mode in ("full", "selective")

    @property
    def readers(self) -> list[Reader]:
        """What training reads and, if it is on, validation."""
        own = Facts.dataset, Facts.text_files, Facts.dataset_path
        found = [Reader(self.dataset, self.text_files, self.dataset_path, self.data_workers, own)]
        if self.validates:
            named, files = self.validation_dataset, self.validation_files
            own = Facts.validation_dataset, Facts.validation_files, Facts.validation_path
            workers = self.validation_workers
            found.append(Reader(named, files, self.validation_path, workers, own))
        return found

    @property
    def quantizes(self) -> list[Converter]:
        return [CONVERTERS[name] for name in self.converters if name in CONVERTERS]

    @functools.cached_property
    def active(self) -> Mapping[str, str]:
        """The GEMM formats and the token dispatch that the options select."""
        found = dict[str, str]()
        for gemms in ("grouped_gemms", "linear_layers"):
            own = [one for one in self.quantizes if one.gemms == gemms]
            formats = [one.format_of(self.options) for one in own]
            found[gemms] = " and ".join(formats) or "bf16"
        dispatch = self.comm_backend
        quantized = {self.dispatch_precision, self.combine_precision}
        if dispatch == STANDARD.name and quantized != {"default"}:
            dispatch = "mxfp8" if quantized == {"mxfp8"} else "mxfp8 in one exchange of two"
        return found | {"dispatch": dispatch}

    @property
    def exchange(self) -> Exchange:
        """The implementation of MoE token dispatch and combine that the options select."""
        return EXCHANGES.get(self.active["dispatch"], STANDARD)

    @property
    def routing(self) -> str:
        """The routing of tokens to experts: `trained`, `random` or `round_robin`."""
        return "round_robin" if self.is_balance_forced else self.moe_routing


def facts_of(record: CellRecord) -> Facts:
    """Return the facts of a recorded job; options that it does not name have their defaults."""
    return Facts(options_of(record), record.world)
