"""DeepSeek-V3 with FlashAttention-4's mask and operator, against TorchTitan's FlexAttention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention_batches import EOS, LENGTH, PACKINGS, block_mask, tokens_of
from tests.titan_refusal import refusal

pytestmark = [
    pytest.mark.titan,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

TOKENIZER = SimpleNamespace(eos_id=EOS)


def small_args(attention: str = "flash_attention_4", **changes: Any) -> Any:
    from cookbook.titan.tt_0_2_2.families.deepseek_v3 import ModelArgs

    args = ModelArgs(
        **{
            "vocab_size": LENGTH + 1,
            "dim": 32,
            "inter_dim": 64,
            "n_layers": 2,
            "n_dense_layers": 2,
            "n_heads": 2,
            "kv_lora_rank": 16,
            "max_seq_len": LENGTH,
            "attn_type": "flex",
            "attn_mask_type": "block_causal",
            **changes,
        }
    )
    args.attention = attention
    return args


def build_model(args: Any) -> Any:
    from cookbook.titan.tt_0_2_2.families.deepseek_v3 import ModelWithAttention

    model = ModelWithAttention(args)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return model.double()


def loss_and_gradients(model: Any, tokens: torch.Tensor, masks: Any) -> list[torch.Tensor]:
    logits = model(tokens, attention_masks=masks).log_softmax(-1)
    loss = -logits[:, :-1].gather(2, tokens[:, 1:, None]).sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_same(
    tokens: torch.Tensor,
    mask: Any,
    changes: dict[str, Any],
    of_flavor: dict[str, Any] | None = None,
    tolerance: float = 1e-9,
) -> Any:
    """Loss and gradients with FlashAttention-4 are those of the flavor's own attention."""
    own = build_model(small_args("flavor", **changes, **of_flavor or {}))
    model = build_model(small_args(**changes))
    assert model.state_dict().keys() == own.state_dict().keys()
    found = loss_and_gradients(model, tokens, model.get_attention_masks(tokens, TOKENIZER))
    expected = loss_and_gradients(own, tokens, mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return model


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as PyTorch computes it where nothing is compiled; compiled, it needs a GPU."""
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.models.attention import FlexAttentionWrapper

    monkeypatch.setattr(FlexAttentionWrapper, "_compiled_flex_attn", staticmethod(flex_attention))


@pytest.mark.parametrize("q_lora_rank", [0, 24])
@pytest.mark.parametrize("name", PACKINGS)
def test_model_is_the_same_as_with_flex_attention(
    name: str, q_lora_rank: int, eager_flex: None
) -> None:
    tokens = tokens_of(PACKINGS[name])
    assert_same(tokens, block_mask(tokens), {"q_lora_rank": q_lora_rank})


def test_scores_of_long_sequences_are_scaled_as_with_flex_attention(eager_flex: None) -> None:
    """Beyond the length that RoPE was made for; the 16B and 671B at 8192 tokens are."""
    tokens = tokens_of(PACKINGS["batch of 3"])
    changes: dict[str, Any] = {"original_seq_len": LENGTH // 2, "mscale": 3.0}
    model = assert_same(tokens, block_mask(tokens), changes)
    assert model.layers["0"].attention.softmax_scale > 2 * 192**-0.5


def test_a_flavor_without_documents_attends_to_the_whole_sequence() -> None:
    tokens = tokens_of(PACKINGS["batch of 3"])
    changes = {"attn_mask_type": "causal"}
    assert_same(tokens, None, changes, {"attn_type": "sdpa"}, tolerance=1e-6)


def test_a_pipeline_gives_each_microbatch_its_own_documents() -> None:
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

    tokens = tokens_of(PACKINGS["batch of 4"])
    model = build_model(small_args())
    masks = model.get_attention_masks(tokens, TOKENIZER)
    whole = loss_and_gradients(model, tokens, masks)
    _, chunks = split_args_kwargs_into_chunks((tokens,), {"attention_masks": masks}, 4)
    parts = [
        loss_and_gradients(model, tokens[i : i + 1], chunk["attention_masks"])
        for i, chunk in enumerate(chunks)
    ]
    for one, *others in zip(whole, *parts, strict=True):
        torch.testing.assert_close(one, sum(others), rtol=1e-9, atol=1e-9)


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    model = build_model(small_args())
    with pytest.raises(AssertionError):
        model.get_attention_masks(tokens_of(PACKINGS["no end"]), SimpleNamespace(eos_id=None))


def config(
    attention: str = "flash_attention_4", context_parallel_degree: int = 1, v_head_dim: int = 128
) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(attention=attention),
        parallelism=SimpleNamespace(context_parallel_degree=context_parallel_degree),
        v_head_dim=v_head_dim,
    )


@pytest.mark.parametrize(
    ("job", "why_not", "reason"),
    [
        (config(context_parallel_degree=2), None, "set it to 1"),
        (config(), "this one is SM80", "this one is SM80"),
        (
            config(v_head_dim=64),
            None,
            "heads of 192/128 or 128/128 (queries and keys/values), this model has",
        ),
        (config("flavor", v_head_dim=64), None, None),
        (config("flavor"), "this one is SM80", None),
        (config("flavor", context_parallel_degree=2), None, None),
        (config(), None, None),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_built(
    job: Any, why_not: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from cookbook.titan.common import varlen_attention
    from cookbook.titan.tt_0_2_2.families.parts import choose_attention

    monkeypatch.setattr(varlen_attention, "why_not", lambda: why_not)
    args = SimpleNamespace(attn_type="sdpa", head_dims=(192, job.v_head_dim))
    if reason is None:
        choose_attention(args, job)
        # TorchTitan makes masks for this type alone.
        assert args.attn_type == ("sdpa" if job.model.attention == "flavor" else "flex")
    else:
        assert reason in refusal(lambda: choose_attention(args, job), caplog)
