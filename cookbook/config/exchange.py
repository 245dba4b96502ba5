"""The kinds of EP exchange that the stack has: everything that depends on which one a cell uses.

An EP backend (YAML) of a known kind needs no code. A new kind is a row here, a dispatcher in
`titan/`, and its speed in `predict/`.
"""

from __future__ import annotations

from dataclasses import dataclass

COMM_BACKEND = "parallelism.expert_parallel_comm_backend"


@dataclass(frozen=True)
class Exchange:
    """How tokens travel to the ranks of their experts.

    Attributes:
        name: as an EP backend's `expect.dispatch` and the job's log have it.
        title: for messages.
        sizes: EP degrees that it is configured for; empty for any.
        ranks_per_node: of every node, where it leaves the node; 0 for any number.
        has_etp: whether it works with expert tensor parallelism.
        has_own_layer: the cookbook's hooks bring the MoE layer that it needs, which overlaps it
            with the shared experts itself.
        sends_once_per_rank: a token with several experts on one rank is sent there once.
        uses_nccl: NCCL's SMs do its work.
        reference: the source of these facts.
    """

    name: str
    title: str
    sizes: tuple[int, ...] = ()
    ranks_per_node: int = 0
    has_etp: bool = True
    has_own_layer: bool = False
    sends_once_per_rank: bool = False
    uses_nccl: bool = True
    reference: str = ""


STANDARD = Exchange("standard", "the all-to-all")
EXCHANGES = {
    exchange.name: exchange
    for exchange in (
        STANDARD,
        Exchange("mxfp8", "TorchAO's quantized all-to-all"),
        Exchange(
            "deepep",
            "DeepEP",
            # `Buffer.get_dispatch_config` has a tuned configuration for these; others fail its
            # assertion.
            sizes=(2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160),
            ranks_per_node=8,
            has_etp=False,
            has_own_layer=True,
            sends_once_per_rank=True,
            uses_nccl=False,
            reference="https://github.com/deepseek-ai/DeepEP/blob/"
            "29d31c095796f3c8ece47ee9cdcc167051bbeed9",
        ),
    )
}
