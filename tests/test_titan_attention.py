"""DeepSeek-V3 with FlashAttention-4's mask and operator, against TorchTitan's FlexAttention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention_batches import EOS, LENGTH, PACKINGS, block_mask, tokens_of
from tests.titan_run import refusal

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


@pytest.mark.parametrize(
    ("name", "changes", "of_flavor"),
    [
        *((name, {"q_lora_rank": 24 * (len(PACKINGS[name]) > 1)}, {}) for name in PACKINGS),
        # Scores beyond the length that RoPE was made for; the 16B and 671B at 8192 tokens are.
        ("batch of 3", {"original_seq_len": LENGTH // 2, "mscale": 3.0}, {}),
        # A flavor without documents attends to the whole sequence.
        ("batch of 3", {"attn_mask_type": "causal"}, {"attn_type": "sdpa"}),
    ],
)
def test_loss_and_gradients_are_those_of_the_flavors_own_attention(
    name: str, changes: dict[str, Any], of_flavor: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.models.attention import FlexAttentionWrapper

    # Compiled, it needs a GPU.
    monkeypatch.setattr(FlexAttentionWrapper, "_compiled_flex_attn", staticmethod(flex_attention))
    tokens = tokens_of(PACKINGS[name])
    own = build_model(small_args("flavor", **changes, **of_flavor))
    model = build_model(small_args(**changes))
    assert model.state_dict().keys() == own.state_dict().keys()
    assert (model.layers["0"].attention.softmax_scale > 2 * 192**-0.5) == ("mscale" in changes)
    found = loss_and_gradients(model, tokens, model.get_attention_masks(tokens, TOKENIZER))
    expected = loss_and_gradients(own, tokens, None if of_flavor else block_mask(tokens))
    tolerance = 1e-6 if of_flavor else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize(
    ("v_head_dim", "why_not", "reason"),
    [
        (128, None, ""),
        (128, "this one is SM80", "this one is SM80"),
        (64, None, "heads of 192/128 or 128/128 (queries and keys/values), this model has"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_built(
    v_head_dim: int, why_not: str, reason: str, monkeypatch: Any, caplog: Any
) -> None:
    from cookbook.titan.common import varlen_attention
    from cookbook.titan.tt_0_2_2.families.parts import choose_attention

    monkeypatch.setattr(varlen_attention, "why_not", lambda: why_not)

    def chosen(attention: str) -> str:
        job = SimpleNamespace(model=SimpleNamespace(attention=attention))
        sizes = SimpleNamespace(head_dims=(192, v_head_dim))
        args = SimpleNamespace(attn_type="sdpa", sizes=lambda: sizes)
        choose_attention(args, job)
        return str(args.attn_type)

    assert chosen("flavor") == "sdpa"
    if reason:
        assert reason in refusal(lambda: chosen("flash_attention_4"), caplog)
    else:
        # TorchTitan makes masks for this type alone.
        assert chosen("flash_attention_4") == "flex"
