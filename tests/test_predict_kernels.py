"""The time of kernels and links, by hand from small shapes, one fact at a time; more is golden."""

import dataclasses
from typing import Any

import pytest

from cookbook.predict.hardware import Hardware
from cookbook.predict.layer_time import Kernels, exchange_wait_ms
from cookbook.predict.operators import Operator
from cookbook.predict.shapes import Shapes, shapes_of
from cookbook.predict.traffic import Links
from tests.check_cells import with_options
from tests.predict_machine import on_gpus, only

BF16 = on_gpus(4)
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
    return Kernels(cell, shapes, hardware, attended_tokens=1000.0)


@pytest.mark.parametrize(("backward", "products"), [(False, 1), (True, 2)])
def test_a_product_takes_its_flops_or_its_bytes(backward: bool, products: int) -> None:
    one = [Operator("attention.wq", (6, 4))]
    slow = kernels(only(bf16_peak_tflops=2.0, dense_gemm_share=0.5))
    assert slow.multiply(one, backward) == {"dense GEMMs": products * FLOPS / 1e9}
    read = kernels(only(memory_bandwidth_gb_per_s=2.0, memory_bandwidth_share=0.5))
    # Input, weight and output, in BF16.
    size = 2 * (100 * 4 + 6 * 4 + 100 * 6)
    assert read.multiply(one, backward) == {"dense GEMMs": pytest.approx(products * size / 1e6)}


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


@pytest.mark.parametrize("kind", ["flex_attention", "flash_attention_4"])
def test_attention_is_two_products_forward_and_five_backward(kind: str) -> None:
    cell = on_gpus(4, {"model.attention": kind.replace("flex_attention", "flavor")})
    facts = {f"{kind}_forward_tflops": 1.0, f"{kind}_backward_tflops": 2.0}
    found = kernels(only(**facts, **{f"{kind}_waste_tokens": 200.0}), cell)
    # 1,000 tokens attended to, 200 more for nothing; heads of 7 and values of 4.
    pairs = 2 * 100 * 3 * 1200
    assert found.attend(False) == {"attention": pytest.approx(pairs * (7 + 4) / 1e9)}
    assert found.attend(True) == {"attention": pytest.approx(pairs * (3 * 7 + 2 * 4) / 2e9)}


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
