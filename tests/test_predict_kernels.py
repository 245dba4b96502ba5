"""The time of kernels and links, counted by hand from small shapes and one fact at a time."""

import dataclasses
from typing import Any

import pytest

from cookbook.predict.hardware import Hardware
from cookbook.predict.layer_time import Kernels, LayerTimes, exchange_wait_ms
from cookbook.predict.operators import Operator, Unit
from cookbook.predict.rank import Layer, ModelPart, describe_ranks
from cookbook.predict.shapes import Shapes, shapes_of
from cookbook.predict.traffic import Links
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus, only

BF16 = on_gpus(4)
ONE = on_gpus(1).cluster
DEEPEP = on_gpus(4, ep_backend="deepep")
TP2 = on_gpus(4, {"parallelism.tensor_parallel_degree": 2})
(RANK,) = describe_ranks(BF16)
# 8 experts over 4 ranks: two groups here. Rows of 4 numbers, a hidden size of 6.
SHAPES = dataclasses.replace(
    shapes_of(BF16),
    tokens=100,
    sequence_tokens=50,
    sent_tokens=50,
    sent_rows=100,
    rows=100,
    top_k=1,
    num_experts=8,
    ep=4,
    ranks_per_token=2.0,
    dim=4,
    expert_hidden=6,
    shared_hidden=5,
    dense_hidden=7,
    vocab=11,
    heads=3,
    nope=5,
    rope=2,
    v_head=4,
)
FLOPS = 2.0 * 100 * 6 * 4


def kernels(hardware: Hardware, cell: Any = BF16, shapes: Shapes = SHAPES) -> Kernels:
    return Kernels(cell, hardware, shapes, attended_tokens=1000.0)


@pytest.mark.parametrize(("backward", "products"), [(False, 1), (True, 2)])
def test_a_product_takes_its_flops_or_its_bytes(backward: bool, products: int) -> None:
    one = [Operator("attention.wq", (6, 4))]
    slow = kernels(only(bf16_peak_tflops=2.0, dense_gemm_share=0.5))
    assert slow.multiply(one, backward) == {"dense GEMMs": products * FLOPS / 1e9}
    read = kernels(only(memory_bandwidth_gb_per_s=2.0, memory_bandwidth_share=0.5))
    # Input, weight and output, in BF16.
    size = 2 * (100 * 4 + 6 * 4 + 100 * 6)
    assert read.multiply(one, backward) == {"dense GEMMs": pytest.approx(products * size / 1e6)}


def test_grouped_gemms_have_a_share_and_weights_of_their_own() -> None:
    slow = kernels(only(bf16_peak_tflops=1.0, grouped_gemm_share=0.25, dense_gemm_share=0.5))
    assert slow.experts(False)["grouped GEMMs"] == 4 * 3 * FLOPS / 1e9
    assert slow.experts(True)["grouped GEMMs"] == 2 * 4 * 3 * FLOPS / 1e9
    read = kernels(only(memory_bandwidth_gb_per_s=1.0))
    weights = 2 * (3 * 4 * 6)
    rows = 100 * (4 + 6) * 3
    assert read.experts(False)["grouped GEMMs"] == pytest.approx(2 * (weights + rows) / 1e6)


# In and out of the three products, and their weights in both groups.
INPUTS, OUTPUTS, WEIGHTS = 100 * (4 + 4 + 6), 100 * (6 + 6 + 4), 2 * 3 * 4 * 6


@pytest.mark.parametrize(
    ("precision", "backward", "gemms", "elements"),
    [
        ("mxfp8", False, 1.0, INPUTS + WEIGHTS),
        # Gradients along both axes, inputs and weights along the other one.
        ("mxfp8", True, 2.0, 2 * OUTPUTS + INPUTS + WEIGHTS),
        ("mxfp8_wgrad_hp", False, 1.0, INPUTS + WEIGHTS),
        # The weight gradient is multiplied in BF16, at a quarter of the speed.
        ("mxfp8_wgrad_hp", True, 1.0 + 4.0, OUTPUTS + WEIGHTS),
        # A weight takes 4 times the bytes of an activation.
        ("float8", False, 1.0, INPUTS + 4 * WEIGHTS),
        ("float8", True, 2.0, 2 * OUTPUTS + INPUTS + 4 * WEIGHTS),
    ],
)
def test_quantized_gemms_are_faster_and_quantizing_takes_bytes(
    precision: str, backward: bool, gemms: float, elements: int
) -> None:
    # Emulated, it would be BF16.
    cell = dataclasses.replace(on_gpus(4, precision=precision), emulated=False)
    peaks = {"fp8_peak_tflops": 2.0, "bf16_peak_tflops": 0.25}
    fast = kernels(only(fp8_grouped_gemm_share=0.5, **peaks), cell)
    found = fast.experts(backward)
    assert found["grouped GEMMs"] == pytest.approx(gemms * 3 * FLOPS / 1e9)
    facts = {"mxfp8_quantize_bytes": 3.0, "float8_quantize_bytes": 5.0}
    facts["float8_quantize_weight_bytes"] = 20.0
    read = kernels(only(memory_bandwidth_gb_per_s=1.0, **facts), cell)
    per_element = 5 if precision == "float8" else 3
    assert read.experts(backward)["quantizing"] == pytest.approx(per_element * elements / 1e6)


def test_linear_layers_are_quantized_but_for_those_left_out() -> None:
    left_out = {"quantize.linear.float8.filter_fqns": ["router.gate"]}
    cell = on_gpus(4, left_out, precision="float8")
    fast = kernels(only(fp8_peak_tflops=1.0, bf16_peak_tflops=0.25), cell)
    for module, times in (("attention.wq", 1), ("moe.router.gate", 4)):
        found = fast.multiply([Operator(module, (6, 4))], False)
        assert found["dense GEMMs"] == pytest.approx(times * FLOPS / 1e9)
        assert ("quantizing" in found) is (times == 1)


@pytest.mark.parametrize("kind", ["flex_attention", "flash_attention_4"])
def test_attention_is_two_products_forward_and_five_backward(kind: str) -> None:
    cell = on_gpus(4, {"model.attention": kind.replace("flex_attention", "flavor")})
    facts = {f"{kind}_forward_tflops": 1.0, f"{kind}_backward_tflops": 2.0}
    found = kernels(only(**facts, **{f"{kind}_waste_tokens": 200.0}), cell)
    # 1,000 tokens attended to, 200 more for nothing; heads of 7 and values of 4.
    pairs = 2 * 100 * 3 * 1200
    assert found.attend(False) == {"attention": pytest.approx(pairs * (7 + 4) / 1e9)}
    assert found.attend(True) == {"attention": pytest.approx(pairs * (3 * 7 + 2 * 4) / 2e9)}


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({}, "sdpa_backward_tflops"),
        ({"model.attention": "flash_attention_4"}, "flash_attention_4_128_backward_tflops"),
    ],
)
def test_qwen3s_heads_of_128_have_their_own_rates(options: dict[str, Any], fact: str) -> None:
    cell = cell_of("qwen3_debug", {"parallelism.expert_parallel_degree": 1} | options, cluster=ONE)
    shapes = dataclasses.replace(SHAPES, nope=0, rope=128, v_head=128)
    found = kernels(only(**{fact: 2.0}), cell, shapes).attend(True)
    assert found == {"attention": pytest.approx(2 * 100 * 3 * 1000 * 5 * 128 / 2e9)}


@pytest.mark.parametrize(("compiled", "bytes_a_logit"), [(True, 8), (False, 20)])
def test_the_loss_passes_over_the_logits(compiled: bool, bytes_a_logit: int) -> None:
    """Four passes in BF16 where it is compiled, ten where not."""
    shapes = dataclasses.replace(SHAPES, loss_compiled=compiled)
    found = kernels(only(memory_bandwidth_gb_per_s=1.0), shapes=shapes).loss()
    assert found == {"loss": pytest.approx(bytes_a_logit * 100 * 11 / 1e6)}


def test_what_reads_and_writes_takes_the_memorys_time() -> None:
    found = kernels(only(memory_bandwidth_gb_per_s=1.0))
    units = (Unit("norm", 2, 10, 40, 4), Unit("output", 2, 5, 20, 4))
    rank = dataclasses.replace(RANK, parts=(ModelPart((), head=units),))
    assert found.optimizer(rank) == pytest.approx(40 * 15 / 1e6)
    # Gather: 6 bytes a stored element, 4 a gathered one; reduction: 6 and 8 the other way; sum: 10.
    gathers, reduces = 6 * 15 + 4 * 60, 6 * 60 + 8 * 15
    assert found.copies(rank, 2, 3, 1) == pytest.approx((2 * gathers + 3 * reduces + 600) / 1e6)
    plain = dataclasses.replace(SHAPES, mixed_precision=False)
    assert dataclasses.replace(found, shapes=plain).copies(rank, 2, 3, 1) == 0
    for moe in (False, True):
        forward, backward = (found.pointwise(moe, back)["pointwise"] for back in (False, True))
        assert backward == pytest.approx(forward * 5 / 3)


def test_rows_are_moved_fourteen_times_and_their_gradients_added() -> None:
    row = 2 * 100 * 4
    found = kernels(only(memory_bandwidth_gb_per_s=1.0))
    assert found.move_rows(False) == {"moving rows": pytest.approx(14 * row / 1e6)}
    slow = kernels(only(scatter_add_gb_per_s=1.0))
    assert slow.move_rows(False)["moving rows"] == pytest.approx(0)
    assert slow.move_rows(True)["moving rows"] == pytest.approx(row / 1e6)
    # Row kernels: each token is read or written twice, under autocast too; of BF16, as its rows.
    alone = dataclasses.replace(SHAPES, row_kernels=True, ep=1, autocast=True)
    tokens = 2 * alone.sent_tokens * alone.dim
    moved = kernels(only(memory_bandwidth_gb_per_s=1.0), shapes=alone).move_rows(False)
    assert moved["moving rows"] == pytest.approx(2 * (row + 2 * tokens) / 1e6)
    # DeepEP: rows, and what 50 tokens send to two ranks each, come and go.
    shapes = dataclasses.replace(SHAPES, deepep=True)
    own = kernels(only(memory_bandwidth_gb_per_s=1.0), DEEPEP, shapes)
    received = 2 * 50 * 2 * 4
    assert own.move_rows(False)["moving rows"] == pytest.approx(2 * (row + received) / 1e6)
    assert own.move_rows(True)["moving rows"] == pytest.approx((4 * row + 2 * received) / 1e6)


def links(hardware: Hardware, cell: Any = BF16, **shapes: Any) -> Links:
    return Links(cell, dataclasses.replace(SHAPES, **shapes), hardware)


def test_an_all_to_all_has_latency_and_bytes() -> None:
    found = links(only(nvlink_gb_per_s=2.0, all_to_all_nvlink_share=0.5, all_to_all_latency_ms=3.0))
    # Three quarters of 100 rows leave a rank of four; dispatch and combine, and their gradients.
    one = 3.0 + 0.75 * 100 * 4 * 2 / 1e6
    assert found.expert_exchanges_ms() == pytest.approx(2 * one)
    quantized = on_gpus(4, precision="bf16", ep_backend="mxfp8_a2a")
    found = links(only(nvlink_gb_per_s=1.0), quantized)
    # The dispatch's rows, and the gradients of the combine's, in a byte and a scale for 32.
    both = 0.75 * 100 * 4 * (2 + 1 + 1 / 32) / 1e6
    assert found.expert_exchanges_ms() == pytest.approx(both)


def test_deepep_takes_the_slower_of_its_two_networks() -> None:
    cell = dataclasses.replace(on_gpus(8, ep_backend="deepep"), nodes=2)
    two_nodes = with_options(cell, {"parallelism.expert_parallel_degree": 16})
    shapes = {"deepep": True, "ep": 16, "ranks_per_token": 1.0, "nodes_per_token": 1.0}
    # 50 tokens of 8 bytes: seven of eight go on over NVLink, every second one to the other node.
    nvlink, infiniband = 50 * 8 * 7 / 8 / 1e6, 50 * 8 / 2 / 1e6
    for own, other, longer in ((1.0, 1.0, nvlink), (1.0, 0.1, infiniband / 0.1)):
        facts = {"deepep_nvlink_gb_per_s": own, "infiniband_gb_per_s": other}
        found = links(only(**facts, deepep_latency_ms=3.0), two_nodes, **shapes)
        assert found.expert_exchanges_ms() == pytest.approx(2 * (3.0 + longer))


def test_fsdp_gathers_and_reduces_over_shards_and_replicas() -> None:
    replicated = on_gpus(
        4,
        {"parallelism.data_parallel_replicate_degree": 2, "parallelism.expert_parallel_degree": 1},
    )
    found = links(only(nvlink_gb_per_s=4.0, nccl_nvlink_share=0.25), replicated, grad=4)
    unit = Unit("layers.0", 2, 500, 1000, 4)
    gather, reduce = found.unit_ms(unit)
    assert gather == pytest.approx(1000 * 2 / 2 / 1e6)
    # The reduction, and an all-reduce of what is left: a reduction and a gather over the replicas.
    assert reduce == pytest.approx((1000 * 4 / 2 + 2 * 500 * 4 / 2) / 1e6)


def layers(hardware: Hardware, cell: Any = BF16, **shapes: Any) -> LayerTimes:
    own = dataclasses.replace(SHAPES, **shapes)
    return LayerTimes(Kernels(cell, hardware, own, 1000.0), Links(cell, own, hardware))


def part(*moe: bool, recomputed: bool = False, ends: bool = False) -> ModelPart:
    found = tuple(Layer(index, one, recomputed) for index, one in enumerate(moe))
    one = (Unit("output", 1, 1, 1, 4),) if ends else ()
    return ModelPart(found, one, one)


def test_hidden_states_are_exchanged_in_each_layer_and_around_both_ends() -> None:
    times = layers(only(nvlink_gb_per_s=1.0), TP2)
    one = 100 * 4 * 2 / 2 / 1e6
    forward, backward = times.part(part(False))
    assert (forward["TP, exposed"], backward["TP, exposed"]) == pytest.approx((4 * one, 5 * one))
    forward, backward = times.part(part(False, recomputed=True, ends=True))
    # The head's and the embedding's; and the layer's forward once more.
    assert (forward["TP, exposed"], backward["TP, exposed"]) == pytest.approx((6 * one, 11 * one))


SELECTIVE = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
LIST = "activation_checkpoint.op_sac_save_list"
EVERY = {"attention", "EP, exposed", "TP, exposed", "host", "grouped GEMMs"}


@pytest.mark.parametrize(
    ("saved", "again"),
    [
        (["mm"], EVERY),
        (["attention"], EVERY - {"attention"}),
        (["communication"], {"attention", "grouped GEMMs", "TP, exposed"}),
        (["grouped_mm"], EVERY - {"grouped GEMMs"}),
        (["attention", "communication", "grouped_mm"], {"TP, exposed"}),
    ],
)
def test_what_is_saved_is_not_done_again(saved: list[str], again: set[str]) -> None:
    options = {**SELECTIVE, LIST: saved, "model.attention": "flash_attention_4"}
    cell = on_gpus(4, {**options, "parallelism.tensor_parallel_degree": 2})
    times = layers(only(all_to_all_latency_ms=1.0, host_ms_per_routed_layer=1.0), cell)
    found = times.again(True, recomputed=True).keys() & EVERY
    assert found == again
    assert times.again(True, recomputed=False) == {}
    # Compiled attention gathers its input again in any case: one of four exchanges.
    forward, _ = times.part(part(True))
    whole = 1 if "communication" not in saved else 1 / 4
    sent = times.again(True, recomputed=True)["TP, exposed"]
    assert sent == pytest.approx(whole * forward["TP, exposed"])


@pytest.mark.parametrize("ep_backend", ["standard", "deepep"])
@pytest.mark.parametrize(
    ("saved", "moe", "compiled", "again"),
    [
        # wkv_b alone has less than the hidden size to multiply over: 3 for each of 3 x (5 + 4).
        (["mm"], True, True, 81 / (81 + 21 * 4 + 5 * 4 + 4 * 12 + 8 * 4 + 3 * 5 * 4)),
        (["attention"], True, True, 1),
        (["mm"], False, True, 1),
        (["mm"], True, False, 1),
    ],
)
def test_dense_gemms_that_are_worth_it_are_saved_in_compiled_code(
    saved: list[str], moe: bool, compiled: bool, again: float, ep_backend: str
) -> None:
    options = {**SELECTIVE, LIST: saved, "model.attention": "flash_attention_4"}
    cell = on_gpus(4, options, ep_backend=ep_backend)
    times = layers(only(bf16_peak_tflops=1.0), cell, kv_lora=3, compiled=compiled)
    forward, _ = times.part(part(moe))
    found = times.again(moe, recomputed=True)["dense GEMMs"]
    assert found == pytest.approx(again * forward["dense GEMMs"])


def test_a_memory_budget_computes_again_what_it_does_not_keep() -> None:
    budget = {
        "activation_checkpoint.mode": "memory_budget",
        "activation_checkpoint.memory_budget": 0.25,
    }
    facts = only(flex_attention_forward_tflops=1.0, bf16_peak_tflops=1.0, all_to_all_latency_ms=1.0)
    times = layers(facts, on_gpus(4, budget))
    forward, _ = times.part(part(True))
    again = times.again(True, recomputed=False)
    assert again["attention"] == pytest.approx(0.75 * forward["attention"])
    # No gradient needs the last of the experts' three products, and nothing is sent again.
    assert again["grouped GEMMs"] == pytest.approx(0.75 * 2 / 3 * forward["grouped GEMMs"])
    assert "EP, exposed" in forward and "EP, exposed" not in again


def test_the_host_is_waited_for_where_tokens_are_sent() -> None:
    facts = only(host_ms_per_routed_layer=2.0)
    forward, backward = layers(facts).part(part(False, True, True))
    assert (forward["host"], backward.get("host")) == (4.0, None)
    alone = on_gpus(4, {"parallelism.expert_parallel_degree": 1})
    assert layers(facts, alone).part(part(True))[0]["host"] == 0


@pytest.mark.parametrize(
    ("experts_ms", "chunks", "before_ms", "after_ms", "queued", "waits_ms"),
    [
        # One chunk: each exchange has one half of the shared experts beside it.
        (10, 1, 2, 1, 2, 3 + 4),
        (10, 1, 6, 7, 2, 0),
        # Two: the first arrives after 5, the second after 10 as the first one's experts end; the
        # first is back at 15, when the second can leave, which comes at 20.
        (10, 2, 0, 0, 2, 5 + 5),
        (10, 2, 5, 5, 2, 0),
        # Links that are slower than the experts: all four exchanges, one behind another.
        (4, 2, 0, 0, 2, 20 - 4),
        # Three: the third leaves after the first is back, at 22, unless all left before.
        (3, 3, 16, 0, 2, 22 + 3 * 5 - 16 - 3),
        (3, 3, 16, 0, 3, 22 + 2 * 5 - 16 - 3),
        # A backward: recomputation hides the first gradients.
        (10, 1, 3 + 1, 2, 1, 1 + 3),
        (10, 1, 30 + 1, 2, 1, 3),
    ],
)
def test_what_a_routed_layer_waits_for_by_hand(
    experts_ms: float, chunks: int, before_ms: float, after_ms: float, queued: int, waits_ms: float
) -> None:
    found = exchange_wait_ms(5, experts_ms, chunks, before_ms, after_ms, queued)
    assert found == pytest.approx(waits_ms)
