"""At which shapes a cell's kernels are proved: its own, counted by hand; nothing runs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.self_check_fault import DEEPEP, JOB
from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

Uses = list[tuple[str, str, bool]]


def degrees(**given: int) -> tuple[str, ...]:
    return tuple(f"--parallelism.{name}_parallel_degree={given[name]}" for name in given)


FLASH = "--model.attention=flash_attention_4"
LONG = ("--training.seq_len=8192", "--training.local_batch_size=4")
# The options, the ranks, the device, and what is proved: all of it, or of linear layers some.
CASES: dict[str, tuple[tuple[str, ...], int, str, dict[str, list[str]]]] = {
    "16B, TP 2, EP 8, on GPUs": (
        ("--model.flavor=16B", *LONG, *degrees(tensor=2, expert=8), "--loss.num_chunks=8"),
        *(8, "cuda"),
        {
            # 16 heads over two ranks; as many sequences as 2**31 scores have room for.
            "flex": [
                "4 x 8,192 tokens, 8 heads of 192/128, documents: edges, values as trained",
                "4 x 8,192 tokens, 8 heads of 192/128, documents: whole, random values",
            ],
            # 64 experts over 8 ranks, 512 rows each.
            "grouped GEMM bf16": [
                "8 experts of 1408 x 2048, about 4,096 rows",
                "8 experts of 2048 x 1408, about 4,096 rows",
                "9 experts of 384 x 256, about 700 rows",
            ],
            "loss in chunks": ["2,047 tokens of 2048, 102,400 words, 8 chunks"],
            "dispatch and combine standard": [
                "3 x 2,730 tokens of 2048 a rank, 64 experts over 8 ranks, top 6, TP 2"
            ],
        },
    ),
    "FlashAttention-4, long sequences, on GPUs": (
        ("--model.flavor=16B", FLASH, "--training.seq_len=32768", "--training.local_batch_size=4"),
        *(1, "cuda"),
        {
            # As short as the reference has room for. The kernel is told of the documents of all
            # four sequences, and beyond 256 it is another one.
            "flash_attention_4": [
                "2 x 16,384 tokens, 16 heads of 192/128, documents: edges in room for 1,024, "
                "values as trained",
                "2 x 16,384 tokens, 16 heads of 192/128, documents: whole in room for 1,024, "
                "random values",
            ],
            "grouped GEMM bf16": [
                "64 experts of 1408 x 2048, about 32,768 rows",
                "64 experts of 2048 x 1408, about 32,768 rows",
                "9 experts of 384 x 256, about 700 rows",
            ],
        },
    ),
    "Qwen3-MoE 235B, long sequences, on GPUs": (
        (*("--model.name=qwen3", "--model.flavor=235B-A22B", FLASH), "--training.seq_len=32768"),
        *(1, "cuda"),
        {
            # Shorter again: 16 query heads are compared at a time.
            "flash_attention_4": [
                "2 x 8,192 tokens, 64 heads of 128/128, 16 to a key, documents: edges in room for "
                "512, values as trained",
                "2 x 8,192 tokens, 64 heads of 128/128, 16 to a key, documents: whole in room for "
                "512, random values",
            ],
            "grouped GEMM bf16": [
                "128 experts of 1536 x 4096, about 32,768 rows",
                "128 experts of 4096 x 1536, about 32,768 rows",
                "9 experts of 384 x 256, about 700 rows",
            ],
        },
    ),
    "CP 2, TP 2, without EP, on a CPU": (
        degrees(context=2, tensor=2),
        *(8, "cpu"),
        {
            # Half of each sequence; SDPA knows no documents.
            "sdpa": ["2 x 32 tokens, 2 heads of 192/128, documents: whole, values as trained"],
            # The hidden size of 256 is cut over TP.
            "grouped GEMM bf16": [
                "8 experts of 128 x 256, about 384 rows",
                "8 experts of 256 x 128, about 384 rows",
            ],
        },
    ),
    "TP 2, EP 2, ETP 2, on a CPU": (
        degrees(tensor=2, expert=2, expert_tensor=2),
        *(4, "cpu"),
        {
            "sdpa": ["2 x 64 tokens, 2 heads of 192/128, documents: whole, values as trained"],
            # Four experts, their hidden size cut over ETP. No rank has whole rows to send.
            "grouped GEMM bf16": [
                "4 experts of 128 x 256, about 384 rows",
                "4 experts of 256 x 128, about 384 rows",
            ],
        },
    ),
    "DeepEP, TP 2, EP 2, on a CPU": (
        (*DEEPEP, *degrees(tensor=2), "--deepep.score_activations"),
        *(4, "cpu"),
        {
            "sdpa": ["2 x 64 tokens, 2 heads of 192/128, documents: whole, values as trained"],
            "grouped GEMM bf16": [
                "4 experts of 256 x 256, about 384 rows",
                "4 experts of 256 x 256, about 384 rows",
            ],
            "rows to expert groups and back": [
                "96 tokens of 256, 4 experts, top 3, scores on the activations",
            ],
            "dispatch and combine deepep": [
                "3 x 32 tokens of 256 a rank, 8 experts over 2 ranks, top 3, TP 2"
            ],
        },
    ),
}


# Of Float8 the recipe decides, and the bound of one scale for a tensor is wider.
LINEAR = {
    "rowwise": "float8",
    "rowwise_with_gw_hp": "float8",
    "tensorwise": "float8 tensorwise",
}


def float8(recipe: str) -> tuple[str, ...]:
    options = {"emulate": "", "filter_fqns": "=output,router.gate"}
    if recipe != "tensorwise":
        options["recipe_name"] = f"={recipe}"
    words = (f"--quantize.linear.float8.{name}{value}" for name, value in options.items())
    return ("--model.converters=quantize.linear.float8", *words)


def uses(cases: dict[str, tuple[tuple[str, ...], int, str]]) -> dict[str, Uses]:
    """Kernel, shape, and whether all ranks prove it together, as the first of so many ranks."""
    from cookbook.titan.tt_0_2_2.self_check_cases import kernel_cases
    from cookbook.titan.tt_0_2_2.self_check_main import cell_of

    dist.destroy_process_group()
    found = {}
    for name, (options, world, device) in cases.items():
        dist.init_process_group("fake", rank=0, world_size=world)
        cell = cell_of([*JOB, *options], device)
        found[name] = [(one.kernel, one.shape, one.collective) for one in kernel_cases(cell)]
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Uses]:
    cases = {name: case[:3] for name, case in CASES.items()}
    cases |= {recipe: (float8(recipe), 1, "cpu") for recipe in LINEAR}
    (first,) = run_ranks(uses, 1, cases)
    of_all_cases: dict[str, Uses] = first
    return of_all_cases


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_proved_at_the_cells_own_shapes(case: str, found: dict[str, Uses]) -> None:
    shapes: dict[str, list[str]] = {}
    for kernel, shape, together in found[case]:
        shapes.setdefault(kernel, []).append(shape)
        # What sends something waits for other ranks; a loss over TP ranks does.
        assert together == (kernel.startswith("dispatch") or kernel == "loss in chunks")
    assert shapes.pop("linear layer bf16")
    assert shapes == CASES[case][3]


@pytest.mark.parametrize("recipe", LINEAR)
def test_float8_is_held_to_the_bound_of_its_recipe(recipe: str, found: dict[str, Uses]) -> None:
    kinds = {kernel for kernel, _, _ in found[recipe] if "linear" in kernel}
    assert kinds == {"linear layer bf16", f"linear layer {LINEAR[recipe]}"}


def test_every_kind_of_linear_layer_is_proved(found: dict[str, Uses]) -> None:
    """Of the 16B: attention, the dense layer, shared experts, the router; not the output."""
    of_16b = [shape for kernel, shape, _ in found["16B, TP 2, EP 8, on GPUs"] if "linear" in kernel]
    assert [shape.removeprefix("4,096 rows, ") for shape in of_16b] == [
        *("64 x 2048", "576 x 2048", "4096 x 512", "2048 x 2048", "2816 x 2048", "2048 x 2816"),
        *("3072 x 2048", "10944 x 2048", "2048 x 10944"),
    ]
    # A CPU proves the smallest, for the code around it.
    on_a_cpu = [
        shape for kernel, shape, _ in found["TP 2, EP 2, ETP 2, on a CPU"] if "linear" in kernel
    ]
    assert on_a_cpu == ["96 rows, 8 x 256"]
