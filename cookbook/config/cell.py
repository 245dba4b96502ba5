"""A cell: one point of recipe x precision x EP backend on a cluster, fully resolved."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from cookbook.base.schema import Unchecked, Words
from cookbook.config.cluster import Cluster
from cookbook.config.options import Layout, Options, argv_of, exported, layout_of
from cookbook.config.recipe import (
    EXCHANGES,
    STANDARD,
    Exchange,
    Overlay,
    Recipe,
    implied,
    reference,
)
from cookbook.config.stack import Stack
from cookbook.run.record import CellRecord

# Options of the cookbook's own.
ATTENTION = "model.attention"
NUM_CHUNKS = "loss.num_chunks"
EP_CHUNKS = "deepep.num_chunks"
SCORE_ACTIVATIONS = "deepep.score_activations"
ROW_KERNELS = "cookbook.row_kernels"
SAVE_LIST = "activation_checkpoint.op_sac_save_list"
LAYERS_KEPT = "activation_checkpoint.num_layers_kept"
# The operators that SAVE_LIST may name; the first three are TorchTitan's own list.
SAVED_OPERATORS = ("attention", "communication", "mm", "grouped_mm")


@dataclass(frozen=True, eq=False)
class Cell:
    """One point of recipe x precision x EP backend on a cluster.

    Attributes:
        hooks: the module that TorchTitan imports in every training process.
        emulated: its precision or EP backend is computed, not accelerated, on this cluster.
        stand_in_for: the requested recipe, where another takes its place here.
        refused: why the cell cannot run.
        published: tokens/s/GPU published for exactly this cell.
        prediction: the sweep's text: expected speed, and the meaning of any other.
        left_out: options of the sweep that are made for the requested recipe.
        repeat_of: the cell that this one repeats, None for the first of them; the `repeat`-th.
    """

    name: str
    recipe: Recipe
    precision: Overlay
    ep_backend: Overlay
    cluster: Cluster
    nodes: int
    options: Options
    hooks: str
    emulated: bool
    stand_in_for: str | None = None
    refused: str | None = None
    published: float | None = None
    baseline: str | None = None
    prediction: str | None = None
    left_out: tuple[str, ...] = ()
    repeat_of: str | None = None
    repeat: int = 1

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.cluster.ranks_per_node

    @property
    def spare_nodes(self) -> int:
        """Nodes of the job beyond those that train."""
        return self.recipe.spare_nodes if self.cluster.scheduler == "slurm" else 0

    @functools.cached_property
    def layout(self) -> Layout:
        """How the ranks are divided."""
        return layout_of(self.options, self.world)

    @property
    def steps(self) -> int:
        """Training steps."""
        return int(self.options["training.steps"])

    @property
    def description(self) -> str:
        """One line for headers; steps and nodes are the cell's, not the recipe's."""
        title = self.recipe.description.partition(":")[0]
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.name}: {title}, {self.steps} steps on {nodes} x {self.cluster.ranks}"

    @property
    def pair(self) -> str:
        """`mxfp8+deepep`."""
        return f"{self.precision.name}+{self.ep_backend.name}"

    @property
    def emulated_parts(self) -> tuple[Overlay, ...]:
        """The overlays that are emulated here."""
        parts = (self.precision, self.ep_backend)
        return tuple(one for one in parts if self.emulated and one.emulated is not None)

    @functools.cached_property
    def exchange(self) -> Exchange:
        """How tokens travel to their experts; the all-to-all where the options mix two kinds."""
        return EXCHANGES.get(implied(self.options)["dispatch"], STANDARD)

    @property
    def uses_deepep(self) -> bool:
        """Whether tokens travel by DeepEP."""
        return self.exchange.has_own_layer

    @property
    def own_pair(self) -> str:
        """The pair that the recipe is made for, where the cell has another; else empty."""
        own = "+".join(overlay.name for overlay in self.recipe.pair)
        # A recipe that names neither is for all.
        return "" if own in (self.pair, "bf16+standard") else own

    @property
    def uses_flash_attention(self) -> bool:
        """Whether FlashAttention-4 computes attention; on the CPU its reference does."""
        return bool(self.options[ATTENTION] == "flash_attention_4")

    @property
    def attends_by_reference(self) -> bool:
        """Whether that reference runs: the same numbers at a meaningless speed."""
        return self.uses_flash_attention and self.cluster.gpu is None

    @property
    def saves(self) -> frozenset[str]:
        """The operators whose outputs selective recomputation saves; empty in other modes."""
        mode = self.options["activation_checkpoint.mode"]
        if mode != "selective" or self.options["activation_checkpoint.selective_ac_option"] != "op":
            return frozenset()
        return frozenset(self.options[SAVE_LIST] or SAVED_OPERATORS[:3])

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile sees the model's layers."""
        components = self.options["compile.components"]
        return bool(self.options["compile.enable"] and "model" in components)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the job exports; cluster, EP backend, precision: the later wins."""
        return {
            **exported(self.cluster.environment),
            **exported(self.ep_backend.environment),
            **exported(self.precision.environment),
        }

    @property
    def max_restarts(self) -> int:
        """Restarts of a job after failures."""
        own = self.recipe.max_restarts
        return self.cluster.max_restarts if own is None else own

    def record(self) -> CellRecord:
        """Return the record that a run's folder keeps of the cell."""
        source = self.recipe.published.source if self.recipe.published else None
        return CellRecord(
            name=self.name,
            recipe=self.recipe.name,
            precision=self.precision.name,
            ep_backend=self.ep_backend.name,
            cluster=self.cluster.name,
            stack=self.options.stack.name,
            nodes=self.nodes,
            ranks_per_node=self.cluster.ranks_per_node,
            device=self.cluster.device,
            emulated=self.emulated,
            stand_in_for=self.stand_in_for,
            refused=self.refused,
            published_tokens_per_second_per_gpu=self.published,
            published_source=source if self.published else None,
            baseline=self.baseline,
            prediction=self.prediction,
            repeat_of=self.repeat_of,
            repeat=self.repeat,
            max_restarts=self.max_restarts,
            environment=Words(self.environment),
            options=Unchecked(self.options.values),
            files=self._own_files(),
        )

    def job_record(self) -> CellRecord:
        """Return the record with all that a job needs, so that it reads no recipe again."""
        return replace(
            self.record(),
            too_few_nodes=self.recipe.too_few_nodes,
            profile=Unchecked(self.cluster.content),
        )

    def _own_files(self) -> Words:
        """The paths of the parts that are the user's own files."""
        paths = {"precision": self.precision.path, "ep_backend": self.ep_backend.path}
        paths |= {"recipe": self.recipe.path, "cluster": self.cluster.path}
        names = {key: reference(key.replace("recipe", ""), path) for key, path in paths.items()}
        return {key: name for key, name in names.items() if name != paths[key].stem}


def train_argv(cell: Cell) -> list[str]:
    """Return all of the cell's arguments but the folders of the run."""
    stack = cell.options.stack
    return [
        *launch_argv(stack, cell.description),
        *overlay_argv(stack, cell.precision),
        *overlay_argv(stack, cell.ep_backend),
        *(["--cookbook.emulated"] if cell.emulated else []),
        *argv_of(stack, cell.options.settings),
    ]


def launch_argv(stack: Stack, description: str) -> list[str]:
    """Return the arguments of every job of the stack: the cookbook's options and hooks."""
    return [
        f"--job.custom_config_module={stack.hooks}.job_config",
        f"--experimental.custom_import={stack.hooks}",
        f"--job.description={description}",
    ]


def overlay_argv(stack: Stack, overlay: Overlay) -> list[str]:
    """Return the overlay's name, for log and report, and its `expect` block for the job."""
    return [f"--cookbook.{overlay.kind}={overlay.name}", *argv_of(stack, overlay.expect)]
