"""The order of a DeepEP layer's work, its collectives over TP, and its counts of tokens."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.test_titan_moe import DIM, build_layer, parallelize
from tests.test_titan_recomputation import Computed
from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

EXPERTS, TOP_K, TOKENS = 4, 2, 12


def parallel_layer(tp: int, chunks: int = 1) -> Any:
    """A DeepEP layer over two ranks."""
    from torchtitan.distributed import ParallelDims

    dims = ParallelDims(
        dp_replicate=1, dp_shard=2 // tp, cp=1, tp=tp, pp=1, ep=2, etp=1, world_size=2
    )
    layer = build_layer(False, EXPERTS, TOP_K, unused=())
    parallelize(layer, dims, "deepep", num_chunks=chunks)
    return layer


def note_exchanges(done: list[str]) -> None:
    """Let DeepEP's stand-in note what is sent, and what is waited for."""
    from deep_ep import Buffer, utils

    def noted(owner: Any, name: str, word: str) -> None:
        function = getattr(owner, name)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            # An event that nothing was sent before is none that is waited for.
            if word != "wait" or self.arrivals:
                done.append(word)
            return function(self, *arguments, **options)

        setattr(owner, name, call)

    noted(Buffer, "dispatch", "dispatch")
    noted(Buffer, "combine", "combine")
    noted(utils.EventOverlap, "current_stream_wait", "wait")


def order_of_work(recomputed: bool, chunks: int = 1) -> tuple[list[str], bool]:
    """What one layer did, in order; and whether all gradients were there in the end."""
    from torch.utils.checkpoint import checkpoint

    layer = parallel_layer(1, chunks)
    done: list[str] = []
    note_exchanges(done)
    for name, half in (("w3", "first half"), ("w2", "second half")):
        linear = getattr(layer.shared_experts, name)
        linear.register_forward_hook(lambda *_, half=half: done.append(half))
        linear.weight.register_post_accumulate_grad_hook(
            lambda _, half=half: done.append(f"gradients of the {half}")
        )
    compute = layer.experts._compute
    if chunks > 1:

        def computed(*arrived: Any) -> Any:
            done.append("experts")
            out = compute(*arrived)
            out.register_hook(lambda _: done.append("backward of the experts"))
            return out

        layer.experts._compute = computed
    layer.experts.w2.register_post_accumulate_grad_hook(
        lambda _: done.append("gradients of the experts")
    )
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    done.append("backward")
    out.square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return done, all(grad is not None and bool(grad.isfinite().all()) for grad in gradients)


FORWARD = ["first half", "dispatch", "wait", "combine", "second half", "wait"]
BACKWARD = [
    "dispatch",
    "gradients of the second half",
    "wait",
    "gradients of the experts",
    "combine",
    "gradients of the first half",
    "wait",
]


# A recomputed layer sends gradients before it computes again, which ends where all is there that
# the backward reads.
RECOMPUTED = [*FORWARD, "backward", BACKWARD[0], *FORWARD[:4], *BACKWARD[1:]]
CHUNKED = [
    "first half",
    *("dispatch", "wait", "experts"),
    # The second chunk is sent before the first one goes back, both under the experts.
    *("dispatch", "wait", "combine", "experts", "combine"),
    "second half",
    *("wait", "wait"),
    "backward",
    *("dispatch", "dispatch", "gradients of the second half"),
    *("wait", "backward of the experts", "wait", "combine"),
    *("backward of the experts", "gradients of the experts", "combine"),
    "gradients of the first half",
    *("wait", "wait"),
]


@pytest.mark.parametrize(
    ("recomputed", "chunks", "expected"),
    [(False, 1, [*FORWARD, "backward", *BACKWARD]), (True, 1, RECOMPUTED), (False, 2, CHUNKED)],
    ids=["shared experts beside rows", "recomputed", "chunks"],
)
def test_layers_compute_while_rows_and_gradients_are_sent(
    recomputed: bool, chunks: int, expected: list[str]
) -> None:
    assert run_ranks(order_of_work, 2, recomputed, chunks) == [(expected, True)] * 2


def count(tp: int) -> tuple[list[float], list[str]]:
    """How many tokens one and two forwards of the layer count, and the corrections they name."""
    from cookbook.titan.tt_0_2_2 import activity

    layer, counts = parallel_layer(tp), []
    for _ in range(2):
        layer(torch.randn(1, TOKENS // tp, DIM, dtype=torch.float64))
        counts.append(float(layer.tokens_per_expert.sum()))
    return counts, sorted(activity.patches_applied)


def test_tokens_are_counted_from_forward_to_forward_and_corrections_have_their_names() -> None:
    patches = ["deepep-padded-groups"]
    over_tp = ["deepep-tokens-split-over-tp", "router-gradients-summed-over-tp"]
    over_tp += ["shared-expert-gradients-not-summed-over-tp"]
    for tp, names in ((1, patches), (2, patches + over_tp)):
        # TorchTitan sets the counts back after each step; gradient accumulation adds to them.
        sums = [TOKENS * TOP_K, 2 * TOKENS * TOP_K]
        assert run_ranks(count, 2, tp) == [(sums, names)] * 2


def send_with_zero_scores() -> tuple[list[int], dict[str, Any]]:
    """The copies for each local expert, and how the layout was asked for."""
    from deep_ep import Buffer

    from cookbook.titan.tt_0_2_2.deepep import dispatch, leave

    group: Any = dist.group.WORLD
    asked: dict[str, Any] = {}
    layout = Buffer.get_dispatch_layout

    def noted(self: Any, topk_idx: Any, num_experts: int, **options: Any) -> Any:
        asked.update(options, previous_event=options.get("previous_event") is not None)
        return layout(self, topk_idx, num_experts, **options)

    changed: Any = Buffer
    changed.get_dispatch_layout = noted
    experts = torch.tensor([[0, 2], [1, 3], [0, 3]])
    scores = torch.tensor([[0.5, 0.0], [0.0, 0.5], [0.5, 0.5]])
    rows, routing = leave(torch.ones(3, DIM, dtype=torch.bfloat16), scores, experts, EXPERTS)
    return dispatch(rows, routing, group)[3], asked


def test_a_copy_without_a_score_is_not_sent_and_counts_lie_on_deepeps_own_stream() -> None:
    (first, asked), (second, _) = run_ranks(send_with_zero_scores, 2)
    # Of each rank's six copies two count for nothing: one for expert 2, one for expert 1.
    assert (first, second) == ([2 * 2, 0], [0, 2 * 2])
    # Where deterministic fills cannot overwrite them.
    on_its_stream = {"async_finish": True, "allocate_on_comm_stream": True}
    assert asked == {"previous_event": True, **on_its_stream}


TP, BATCH = 2, 2
WHOLE = BATCH * TOKENS * DIM
SCORES = BATCH * TOKENS * TOP_K
Collectives = Counter[tuple[str, int]]


class Sent(Computed):
    """The collectives over TP, by name and how many numbers each rank puts in."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.collectives: Collectives = Counter()
        self.order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.tensor import DTensor

        # What these send and wait for is seen where they compute with their local tensors.
        if any(issubclass(kind, (AsyncCollectiveTensor, DTensor)) for kind in types):
            return NotImplemented
        namespace, _, name = str(func).removesuffix(".default").partition(".")
        if namespace in ("c10d", "_c10d_functional") and "alltoall" not in name:
            values = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            name = {"allreduce_": "all_reduce"}.get(name, name)
            # The maxima by which FP8 scales rows are fewer.
            if values.numel() >= SCORES:
                self.order.append(name)
                if name != "wait_tensor":
                    self.collectives[name, values.numel()] += 1
        return func(*args, **(kwargs or {}))


def sent_in_backward() -> tuple[Collectives, list[str]]:
    """The collectives of one backward, and the order of what was sent and waited for."""
    done: list[str] = []
    note_exchanges(done)
    layer = parallel_layer(TP)
    for name in ("router", "shared_experts"):
        # As TorchTitan's apply_compile: every child but the experts, as one graph each.
        child = torch.compile(getattr(layer, name), backend="aot_eager", fullgraph=True)
        setattr(layer, name, child)
    x = torch.randn(BATCH, TOKENS // TP, DIM, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    done.clear()
    with Sent(done) as sent:
        out.square().sum().backward()
    return sent.collectives, done


def test_backward_sums_the_whole_once_and_while_rows_are_on_their_way() -> None:
    for collectives, order in run_ranks(sent_in_backward, TP):
        assert collectives == {
            # The gradient of the output, for the shared experts.
            ("all_gather_into_tensor", WHOLE // TP): 1,
            ("reduce_scatter_tensor", WHOLE): 1,
            ("all_reduce", SCORES): 1,
        }
        # It starts before the layer waits for the gradients of what it had dispatched, and nobody
        # waits for it before that.
        behind = order[order.index("combine") :]
        assert behind[:4] == ["combine", "reduce_scatter_tensor", "wait", "wait_tensor"]
