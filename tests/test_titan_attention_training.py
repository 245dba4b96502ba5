"""TorchTitan's Trainer on CPU ranks: the losses of FlexAttention, however the model is split."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_titan_train import CHARACTERS, SEQ_LEN, train, write_assets
from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 3 to 42 tokens: every sequence has other ones."""
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    lines = []
    for number in range(400):
        text = (CHARACTERS[(i * i * number + number) % 26] for i in range(1 + number**2 * 7 % 40))
        lines.append(json.dumps({"text": "".join(text)}) + "\n")
    (folder / "short").mkdir()
    (folder / "short" / "data.jsonl").write_text("".join(lines))
    return folder


def train_with_attention(arguments: list[str], eager: bool) -> dict[str, Any]:
    """Train in this rank with the model class registered; what ran, and how often, beside it."""
    import torchtitan.models.deepseek_v3.model.model as deepseek_model
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.models import deepseek_v3
    from torchtitan.models.attention import FlexAttentionWrapper
    from torchtitan.protocols.train_spec import register_train_spec

    import cookbook.titan.stack_2026_02  # noqa: F401
    from cookbook.titan.any_stack import varlen_attention
    from cookbook.titan.stack_2026_02 import attention

    class Args(deepseek_v3.DeepSeekV3ModelArgs):
        def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
            attention.choose_attention(self, job_config)
            super().update_from_config(job_config, **kwargs)

    flavors = {
        name: Args(**{part.name: getattr(args, part.name) for part in fields(args)})
        for name, args in deepseek_v3.deepseekv3_args.items()
    }
    model_cls = attention.DeepSeekV3ModelWithAttention
    spec = replace(deepseek_v3.get_train_spec(), model_cls=model_cls, model_args=flavors)
    register_train_spec("deepseek_v3", spec)
    if eager:
        FlexAttentionWrapper._compiled_flex_attn = staticmethod(flex_attention)
        deepseek_model.create_attention_mask = lambda *args: create_block_mask(*args, device="cpu")

    calls: list[None] = []
    reference = varlen_attention.reference_forward

    def counted(*args: Any) -> Any:
        calls.append(None)
        return reference(*args)

    varlen_attention.reference_forward = counted  # type: ignore[assignment]
    found = train(arguments, None)
    seen = attention.observe_attention()
    return found | {"kinds": seen.kinds, "mean": seen.mean_attended_length, "calls": len(calls)}


def run(
    assets: Path,
    out: Path,
    ranks: int,
    *options: str,
    batch: int = 2,
    eager: bool = False,
) -> list[dict[str, Any]]:
    arguments = [
        "--job.custom_config_module=cookbook.titan.stack_2026_02.job_config",
        "--experimental.custom_import=cookbook.titan.stack_2026_02",
        f"--job.dump_folder={out}",
        "--model.name=deepseek_v3",
        "--model.flavor=debugmodel_flex_attn",
        f"--model.hf_assets_path={assets / 'tokenizer'}",
        "--training.dataset=c4_test",
        f"--training.dataset_path={assets / 'short'}",
        f"--training.seq_len={SEQ_LEN}",
        f"--training.local_batch_size={batch}",
        # In BF16 both attentions round, at different places.
        "--training.mixed_precision_param=float32",
        "--training.steps=2",
        "--lr_scheduler.warmup_steps=1",
        "--activation_checkpoint.mode=none",
        "--metrics.log_freq=1",
        "--comm.trace_buf_size=0",
        "--debug.seed=42",
        *options,
    ]
    return run_ranks(train_with_attention, ranks, arguments, eager, seconds=400)


FLASH = ("--model.attention=flash_attention_4",)
EP2 = ("--parallelism.expert_parallel_degree=2",)
FULL = ("--activation_checkpoint.mode=full",)
SELECTIVE = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
COMPILED = ("--compile.enable", "--compile.backend=aot_eager", "--compile.components=model")
STEPS, LAYERS = 2, 6


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-6)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=2e-5)


def test_losses_are_those_of_flex_attention_with_and_without_recomputation(
    assets: Path, tmp_path: Path
) -> None:
    flex = run(assets, tmp_path / "a", 2, *EP2, eager=True)[0]
    assert flex["kinds"] == {"flex"} and flex["calls"] == 0
    for name, options, times in (("b", (), 1), ("c", FULL, 2), ("d", (*SELECTIVE, *COMPILED), 1)):
        flash = run(assets, tmp_path / name, 2, *EP2, *FLASH, *options)[0]
        assert_same(flash, flex)
        assert flash["kinds"] == {"flash_attention_4_reference"}
        # Selective recomputation has kept what attention returned.
        assert flash["calls"] == STEPS * LAYERS * times, name
        assert flash["mean"] == flex["mean"] < SEQ_LEN / 4


def test_tensor_parallel_ranks_have_the_losses_of_flex_attention(
    assets: Path, tmp_path: Path
) -> None:
    split = ("--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=4")
    flex = run(assets, tmp_path / "a", 4, *split, eager=True)[0]
    flash = run(assets, tmp_path / "b", 4, *split, *FLASH, *SELECTIVE, *COMPILED)[0]
    assert_same(flash, flex)


def test_microbatches_of_a_pipeline_have_the_losses_of_flex_attention(
    assets: Path, tmp_path: Path
) -> None:
    """Four sequences, a microbatch each; the loss is on the last stage."""
    split = ("--parallelism.pipeline_parallel_degree=2",)
    _, flex = run(assets, tmp_path / "a", 2, *split, batch=4, eager=True)
    _, flash = run(assets, tmp_path / "b", 2, *split, *FLASH, *FULL, batch=4)
    assert_same(flash, flex)


def test_a_flavor_keeps_its_own_attention_where_none_is_chosen(
    assets: Path, tmp_path: Path
) -> None:
    own = run(assets, tmp_path / "a", 2, *EP2, "--model.flavor=debugmodel")[0]
    assert own["kinds"] == {"sdpa"} and own["calls"] == 0
    # Its mask does not know documents.
    assert own["mean"] == (SEQ_LEN + 1) / 2
    flash = run(assets, tmp_path / "b", 2, *EP2, "--model.flavor=debugmodel", *FLASH)[0]
    assert_same(flash, own)
    assert flash["mean"] == (SEQ_LEN + 1) / 2
