"""A cell (one recipe x precision x EP backend on a cluster) and the findings about it."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cookbook.base.errors import nearest
from cookbook.base.yamlfile import Words
from cookbook.config.cluster import Cluster
from cookbook.config.dialect.argv import argv_of, launch_options
from cookbook.config.dialect.names import Names
from cookbook.config.facts import Facts, Layout
from cookbook.config.options import Options, exported, settings_of
from cookbook.config.recipe import Overlay, Recipe, reference
from cookbook.run.record import CellRecord

# Fields of `Cell` that are read from files, and the folder of those files, relative to `recipes/`.
PARTS = {"recipe": "", "precision": "precision", "ep_backend": "ep_backend", "cluster": "cluster"}


@dataclass(frozen=True, eq=False)
class Cell:
    """One combination of recipe, precision and EP backend on a cluster."""

    name: str
    recipe: Recipe
    precision: Overlay
    ep_backend: Overlay
    cluster: Cluster
    nodes: int
    options: Options
    emulated: bool  # whether software emulates the precision or EP backend on this cluster
    stand_in_for: str | None = None  # the recipe asked for, if a small one replaces it
    refused: str | None = None  # why the cell cannot run
    published: float | None = None  # tokens/s/GPU published for exactly this cell
    baseline: str | None = None
    prediction: str | None = None  # text from the sweep: expected speed, and what a deviation means
    left_out: tuple[str, ...] = ()  # options of the sweep, unused because a small recipe is trained
    repeat_of: str | None = None  # name of the cell that this one repeats
    repeat: int = 1  # number of the repeat, from 1
    resumes: bool = False  # whether training continues from a checkpoint

    @property
    def world(self) -> int:
        return self.nodes * self.cluster.ranks_per_node

    @property
    def spare_nodes(self) -> int:
        return self.recipe.spare_nodes if self.cluster.scheduler == "slurm" else 0

    @functools.cached_property
    def facts(self) -> Facts:
        return Facts(self.options, self.world)

    @property
    def layout(self) -> Layout:
        return self.facts.layout

    @property
    def steps(self) -> int:
        return self.facts.steps

    @property
    def description(self) -> str:
        """One line with the cell's name, the recipe's title, and the numbers of steps and nodes."""
        title = self.recipe.description.partition(":")[0]
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.name}: {title}, {self.steps} steps on {nodes} x {self.cluster.ranks}"

    @property
    def pair(self) -> str:
        return f"{self.precision.name}+{self.ep_backend.name}"

    @property
    def emulated_parts(self) -> tuple[Overlay, ...]:
        parts = (self.precision, self.ep_backend)
        return tuple(one for one in parts if self.emulated and one.emulated is not None)

    @property
    def own_pair(self) -> str:
        """The pair that the recipe was written for; empty if it is this cell's or the default."""
        own = "+".join(overlay.name for overlay in self.recipe.pair)
        return "" if own in (self.pair, "bf16+standard") else own

    @property
    def attends_by_reference(self) -> bool:
        """Whether attention runs on the CPU, in FlashAttention-4's reference implementation."""
        return self.facts.uses_flash_attention and self.cluster.gpu is None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that cluster, EP backend and precision set; later ones win."""
        parts = (self.cluster, self.ep_backend, self.precision)
        return exported(Words(itertools.chain(*(part.environment.items() for part in parts))))

    @property
    def max_restarts(self) -> int:
        own = self.recipe.max_restarts
        return self.cluster.max_restarts if own is None else own

    def record(self) -> CellRecord:
        parts = {key: getattr(self, key) for key in PARTS}
        names = {key: reference(kind, parts[key].path) for key, kind in PARTS.items()}
        published = self.recipe.published if self.published else None
        same = ("name", "nodes", "emulated", "stand_in_for", "refused", "baseline", "prediction")
        return CellRecord(
            **{key: one.name for key, one in parts.items()},
            **{key: getattr(self, key) for key in (*same, "repeat_of", "repeat", "max_restarts")},
            stack=self.options.stack.name,
            ranks_per_node=self.cluster.ranks_per_node,
            device=self.cluster.device,
            published_tokens_per_second_per_gpu=self.published,
            published_source=published.source if published else None,
            environment=Words(self.environment),
            options=self.options.values,
            # Parts read from the user's own files instead of `recipes/`.
            files={key: name for key, name in names.items() if name != parts[key].path.stem},
        )

    def job_record(self) -> CellRecord:
        """Return the cell's record, with all that a job needs from recipe, overlays and cluster."""
        # With numbers as the profile spells them: `3.10` stays `3.10`.
        profile = {**self.cluster.content, "environment": exported(self.cluster.environment)}
        copied = (self.ep_backend, self.precision)
        return replace(
            self.record(),
            environment_from=Words(
                itertools.chain(*(one.environment_from.items() for one in copied))
            ),
            options={**self.script_options, **self.options.values},
            spare_nodes=self.spare_nodes,
            too_few_nodes=self.recipe.too_few_nodes,
            profile=profile,
        )

    @property
    def script_options(self) -> dict[str, Any]:
        """The options that make TorchTitan load the cookbook, and that describe the cell to it."""
        values = launch_options(self.description)
        for name, overlay in (
            (Names.precision, self.precision),
            (Names.ep_backend, self.ep_backend),
        ):
            values[name] = overlay.name
            values |= {option: setting.value for option, setting in overlay.expect.items()}
        return values | ({Names.emulated: True} if self.emulated else {})


def train_argv(cell: Cell) -> list[str]:
    """Return the cell's arguments for TorchTitan, except those that name the run's folders."""
    own = settings_of(cell.script_options)
    return argv_of(cell.options.stack, {**own, **cell.options.settings})


ERROR, WARNING, HINT = "error", "warning", "hint"


@dataclass(frozen=True)
class Finding:
    """An error, warning or hint from checking a cell; only an error keeps it from running."""

    level: str
    rule: str
    option: str  # the TorchTitan option at fault; empty if none is
    reason: str
    remedy: str = ""
    reference: str = ""  # URL of the code or documentation that the finding is based on
    is_input: bool = False  # whether the user's input is wrong, which gives exit status 2

    def as_mapping(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if key != "is_input"}

    def __str__(self) -> str:
        place = f"{self.option}: " if self.option else ""
        return f"{place}{self.reason}" + (f"; {self.remedy}" if self.remedy else "")


# What the body of a rule yields: tuples of option, reason and remedy.
Problems = Iterator[tuple[str, str, str]]
CellRule = Callable[..., Iterator[Finding]]


def rule(
    rules: list[CellRule], *, level: str = ERROR, reference: str = "", is_input: bool = False
) -> Callable[[Callable[..., Problems]], CellRule]:
    """Return a decorator that turns a generator of problems into a rule and adds it to `rules`."""

    def register(problems: Callable[..., Problems]) -> CellRule:
        def findings(*arguments: Any) -> Iterator[Finding]:
            for problem in problems(*arguments):
                yield Finding(level, problems.__name__, *problem, reference, is_input)

        rules.append(findings)
        return findings

    return register


def unknown(option: str, found: str, known: Collection[str]) -> tuple[str, str, str]:
    """Return (option, reason, remedy) for a value that is not in `known`."""
    close = nearest(found, known)
    remedy = f"did you mean {close[0]!r}?" if close else "choose one of these"
    return option, f"found {found!r}, allowed: {', '.join(known)}", remedy


@dataclass(frozen=True)
class Verdict:
    """The findings about a cell, in three parts; `built` is None if its model was not built."""

    rules: tuple[Finding, ...]  # broken rules, which are always errors
    # Packages and files that this machine lacks: warnings if the job would run elsewhere.
    here: tuple[Finding, ...]
    # Errors from building the model, or from checking the built model's memory and precision.
    built: tuple[Finding, ...] | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.rules, *(self.built or ()), *self.here)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == ERROR]

    @property
    def refused(self) -> str | None:
        """Why the cell cannot run; None if it can."""
        return str(self.errors[0]) if self.errors else None

    @property
    def parts(self) -> str:
        """Which kinds of checks were made, and which were not, in words."""
        if self.built is None:
            return "checked: the rules, this environment; not checked: TorchTitan's build"
        return "checked: the rules, TorchTitan's build, this environment"
