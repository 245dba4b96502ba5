"""Qwen3-MoE trains in every EP backend and precision, and its traps are held."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cookbook.predict.layer_memory import layer_bytes
from cookbook.predict.shapes import shapes_of
from tests.check_cells import cell_of
from tests.predict_machine import on_gpus
from tests.titan_ranks import run_ranks
from tests.titan_run import (
    A2A,
    BF16,
    DEEPEP,
    EP2,
    MXFP8,
    NUM_HEADS,
    NUM_LAYERS,
    QWEN3,
    SELECTIVE,
    STANDARD,
    active,
    job,
    run,
    train,
)

pytestmark = pytest.mark.titan

FLASH = ("--model.attention=flash_attention_4", "--loss.num_chunks=4")
ROWS = ("--cookbook.row_kernels",)
# TorchTitan's list for this family lacks the all-to-all, which would be sent again.
SAVED = {"saved": "communication and mm"}


@pytest.fixture(scope="module")
def standard(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("standard")
    return run(assets, out, 2, *QWEN3, *EP2, *BF16, *STANDARD, attempt=out, steps=3)


# Losses of three steps beside the first cell's: what is rounded elsewhere, or in blocks of MXFP8.
CELLS: dict[str, tuple[tuple[str, ...], dict[str, Any], float]] = {
    "deepep": ((*BF16, *DEEPEP), {"dispatch": "deepep", "attention": "sdpa"}, 2e-4),
    "mxfp8": ((*MXFP8, *STANDARD), {"dispatch": "standard", "grouped_gemms": "mxfp8"}, 5e-3),
    "mxfp8 deepep": ((*MXFP8, *DEEPEP), {"dispatch": "deepep", "grouped_gemms": "mxfp8"}, 5e-3),
    "mxfp8_a2a": ((*MXFP8, *A2A), {"dispatch": "mxfp8", "emulated": True}, 5e-3),
    "flash, chunked loss": (
        (*BF16, *STANDARD, *FLASH),
        {"attention": "flash_attention_4_reference", "loss": "cross_entropy in 4 chunks"},
        1e-3,
    ),
    "rows": ((*BF16, *STANDARD, *ROWS, *SELECTIVE), {"rows": "kernels"} | SAVED, 2e-4),
}


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_trains_alike_and_says_what_is_active(
    name: str, assets: Path, tmp_path: Path, standard: dict[str, Any]
) -> None:
    """Among them DeepEP, which TorchTitan's own Qwen3 ignores in silence."""
    options, expected, bound = CELLS[name]
    found = run(assets, tmp_path, 2, *QWEN3, *EP2, *options, attempt=tmp_path, steps=3)
    said = active(found)
    assert {key: said[key] for key in expected} == expected
    proofs = json.loads((tmp_path / "self_check.json").read_text())["proofs"]
    attention = [proof["shape"] for proof in proofs if "heads of" in proof["shape"]]
    assert attention and all("2 heads of 128/128, 2 to a key" in shape for shape in attention)
    assert found["losses"] == pytest.approx(standard["losses"], rel=bound)
    assert found["losses"][2] < found["losses"][0]


def train_and_take_bias(argv: list[str]) -> dict[str, Any]:
    from torchtitan.train import Trainer

    ends: list[torch.Tensor] = []
    close = Trainer.close

    def take(self: Any) -> None:
        ends.extend(layer.moe.expert_bias.clone() for layer in self.model_parts[0].layers.values())
        close(self)

    Trainer.close = take
    return train(argv) | {"bias": ends}


def test_the_routing_bias_balances(assets: Path, tmp_path: Path) -> None:
    """TorchTitan's own optimizer of Qwen3 never moves it."""
    argv = job(assets, tmp_path, *QWEN3, *EP2)
    (mine, _) = run_ranks(train_and_take_bias, 2, argv)
    assert len(mine["bias"]) == 2
    for bias in mine["bias"]:
        # Two steps of TorchTitan's coefficient, one up and one down for most experts.
        assert 0 < bias.abs().max() < 4e-3


def test_flavors_are_the_published_models() -> None:
    """Of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B; the differences are TorchTitan's."""
    from cookbook.titan.tt_0_2_2.families.qwen3 import QWEN3

    shared: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8}
    shared |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    shared |= {"norm_topk_prob": True, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
    shared |= {"attention_bias": False, "decoder_sparse_step": 1, "rope_theta": 1e6}
    shared |= {"max_position_embeddings": 40960, "mlp_only_layers": [], "model_type": "qwen3_moe"}
    sizes = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    sizes.append("moe_intermediate_size")
    published = {"30B-A3B": (2048, 48, 32, 6144, 768), "235B-A22B": (4096, 94, 64, 12288, 1536)}
    differences = {}
    for name, own in published.items():
        config = QWEN3.config_json(QWEN3.flavors[name], 8192, "bfloat16")
        for key, value in (shared | dict(zip(sizes, own, strict=True))).items():
            if config[key] != value:
                differences[name, key] = config[key]
        moe = QWEN3.flavors[name].moe_args
        assert (moe.score_func, moe.num_shared_experts, moe.route_scale) == ("softmax", 0, 1.0)
    assert differences == {
        # Of the checkpoints of July 2025 (2507); a job takes its own sequence length.
        ("30B-A3B", "max_position_embeddings"): 262144,
        ("235B-A22B", "rope_theta"): 5e6,
        # A placeholder of TorchTitan's.
        ("235B-A22B", "max_position_embeddings"): 8192,
    }


def test_weights_go_out_and_in_unchanged_but_for_the_routing_bias(
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Out to transformers, which computes the same logits, and back into a job on two ranks."""
    import torch.distributed.checkpoint as dcp
    import transformers

    from cookbook.titan.tt_0_2_2.export import Request, export
    from cookbook.titan.tt_0_2_2.families import FAMILIES, qwen3

    args = copy.deepcopy(qwen3.QWEN3.flavors["debugmodel_moe"])
    args.n_layers, args.n_heads, args.n_kv_heads = NUM_LAYERS // 2, NUM_HEADS, NUM_HEADS // 2
    # As `titan_run` makes the job's; grouped GEMMs would compute in BF16.
    args.moe_args.num_experts, args.moe_args.use_grouped_mm = 16, False
    parts = dataclasses.replace(FAMILIES["qwen3"], flavors={"debugmodel_moe": args})
    monkeypatch.setitem(FAMILIES, "qwen3", parts)

    def exported(checkpoint: Path, to: Path) -> dict[str, torch.Tensor]:
        words = str(checkpoint), str(to), "qwen3", "debugmodel_moe", 64, "float32"
        export(Request(*words, file_bytes=30_000_000))
        files = [load_file(file) for file in to.glob("*.safetensors")]
        assert len(files) > 2
        return {name: one for tensors in files for name, one in tensors.items()}

    torch.manual_seed(1)
    model = qwen3.ModelWithAttention(dataclasses.replace(args, max_seq_len=64))
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        biases = [layer.moe.expert_bias for layer in model.layers.values()]
        for weight in model.parameters():
            weight.mul_(3)
        for bias in biases:
            bias.uniform_(-0.5, 0.5)
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "step-1"), no_dist=True)
    out = exported(tmp_path / "step-1", tmp_path / "out")
    assert "left out 2 routing biases of at most 0.49: the format has no" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    tokens = torch.randint(0, 2048, (2, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found, biased = theirs(tokens).logits, model(tokens)
        for bias in biases:
            bias.zero_()
        expected = model(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # As the export warns: the bias selects other experts.
    assert (biased - expected).abs().max() > 0.1
    path = f"--checkpoint.initial_load_path={tmp_path / 'out'}"
    load = ("--checkpoint.enable", "--checkpoint.initial_load_in_hf", path, "--optimizer.lr=0.0")
    run(assets, tmp_path / "run", 2, *QWEN3, *EP2, *BF16, *STANDARD, *load, steps=1)
    back = exported(tmp_path / "run/checkpoint/step-1", tmp_path / "back")
    # It began with zeros; a step moves it by at most twice 1e-3.
    assert "left out 2 routing biases of at most 0.00" in capsys.readouterr().out
    torch.testing.assert_close(back, out, rtol=0, atol=0)


def test_grouped_query_heads_attend_as_repeated_ones() -> None:
    """The CPU's reference of FlashAttention-4, forward and backward, against PyTorch's SDPA."""
    from cookbook.titan.common.varlen_attention import varlen_attention

    torch.manual_seed(0)
    q = torch.randn(24, NUM_HEADS, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(24, 2, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    ends = torch.tensor([0, 10, 24], dtype=torch.int32)
    out = varlen_attention(q, k, v, ends, 24, 0.3)
    parts = []
    for some in (slice(0, 10), slice(10, 24)):
        heads = (x[some].transpose(0, 1) for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        parts.append(attention(*heads, is_causal=True, scale=0.3, enable_gqa=True).transpose(0, 1))
    exact = torch.cat(parts)
    torch.testing.assert_close(out, exact)
    grad = torch.randn_like(out)
    found, expected = (torch.autograd.grad(one, (q, k, v), grad) for one in (out, exact))
    torch.testing.assert_close(found, expected)


def bytes_saved(length: int) -> int:
    """The bytes that autograd holds for a layer of the debug model with autocast."""
    import torchtitan.models.qwen3.model.model as titan

    from cookbook.titan.tt_0_2_2.cpu import prepare_cpu
    from cookbook.titan.tt_0_2_2.families import qwen3

    prepare_cpu()
    args = copy.deepcopy(qwen3.QWEN3.flavors["debugmodel_moe"])
    # With fewer key heads, the CPU's SDPA materializes the scores.
    args.n_kv_heads = args.n_heads
    block = titan.TransformerBlock(0, args)
    rope = titan.precompute_rope_cache(args.head_dim, length)
    hidden = torch.randn(1, length, args.dim, requires_grad=True)
    known = {one.untyped_storage().data_ptr() for one in (*block.parameters(), rope)}
    held: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        block(hidden, rope, None)
    return sum(one.untyped_storage().nbytes() for one in held.values())


def test_a_layer_of_a_rank_alone_saves_what_is_predicted() -> None:
    one_rank = {"parallelism.expert_parallel_degree": 1, "training.local_batch_size": 1}
    cell = cell_of("qwen3_debug", one_rank | {"training.seq_len": 2048}, cluster=on_gpus(1).cluster)
    shapes = shapes_of(cell)
    counted = layer_bytes(dataclasses.replace(shapes, kv_heads=shapes.heads), moe=True)
    (measured,) = run_ranks(bytes_saved, 1, 2048)
    # Unlike a GPU, the CPU copies attention's output and saves the outputs of both norms in FP32.
    measured -= 2048 * (2 * 16 * 128 + 2 * 4 * 256)
    # Autocast copies the input.
    assert 2 * shapes.hidden_bytes + counted.saved == pytest.approx(measured, rel=0.01)
