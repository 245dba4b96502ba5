"""TorchTitan's Trainer on CPU ranks: the losses of FlexAttention, however the model is split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.titan_ranks import run_ranks
from tests.titan_run import (
    CHARACTERS,
    EP2,
    NUM_LAYERS,
    SEQ_LEN,
    active,
    job,
    train,
    write_assets,
)

pytestmark = [pytest.mark.titan, pytest.mark.nightly]


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
    """Train in this rank; how often attention was computed, beside what training returned."""
    import torchtitan.models.deepseek_v3.model.model as deepseek_model
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.models.attention import FlexAttentionWrapper

    from cookbook.titan.common import varlen_attention

    if eager:
        FlexAttentionWrapper._compiled_flex_attn = staticmethod(flex_attention)
        deepseek_model.create_attention_mask = lambda *args: create_block_mask(*args, device="cpu")

    calls: list[str] = []

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        setattr(module, name, counted)

    count(varlen_attention, "reference_forward")
    count(varlen_attention, "attended_keys")
    found = train(arguments)
    names = {"calls": "reference_forward", "counted_batches": "attended_keys"}
    return found | {key: calls.count(name) for key, name in names.items()}


def run(
    assets: Path,
    out: Path,
    ranks: int,
    *options: str,
    batch: int = 2,
    eager: bool = False,
) -> list[dict[str, Any]]:
    """What each rank returned, with what the job said of its attention."""
    argv = job(
        assets,
        out,
        "--model.flavor=debugmodel_flex_attn",
        # It computes attention too, and training's is counted.
        "--cookbook.no_self_check",
        # In BF16 both attentions round, at different places.
        "--training.mixed_precision_param=float32",
        *options,
        data="short",
        batch=batch,
        steps=STEPS,
    )
    results = run_ranks(train_with_attention, ranks, argv, eager, seconds=400)
    said = active({"said": [text for result in results for text in result["said"]]})
    seen = {"kind": said["attention"], "mean": said["mean_attended_length"]}
    return [result | seen for result in results]


FLASH = ("--model.attention=flash_attention_4",)
FULL = ("--activation_checkpoint.mode=full",)
SELECTIVE = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
COMPILED = ("--compile.enable", "--compile.backend=aot_eager", "--compile.components=model")
STEPS = 2


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-6)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=2e-5)


def test_losses_are_those_of_flex_attention_with_recomputation(
    assets: Path, tmp_path: Path
) -> None:
    flex = run(assets, tmp_path / "a", 2, *EP2, eager=True)[0]
    assert flex["kind"] == "flex" and flex["calls"] == 0
    # The mask of the first step's batch, and of no other.
    assert flex["counted_batches"] == 1
    for name, options, times in (("b", FULL, 2), ("c", (*SELECTIVE, *COMPILED), 1)):
        flash = run(assets, tmp_path / name, 2, *EP2, *FLASH, *options)[0]
        assert_same(flash, flex)
        assert flash["kind"] == "flash_attention_4_reference"
        # Selective recomputation has kept what attention returned.
        assert flash["calls"] == STEPS * NUM_LAYERS * times, name
        assert flash["mean"] == flex["mean"] < SEQ_LEN / 4
        assert flash["counted_batches"] == 1


def test_a_flavor_keeps_its_own_attention_where_none_is_chosen(
    assets: Path, tmp_path: Path
) -> None:
    own = run(assets, tmp_path / "a", 2, *EP2, "--model.flavor=debugmodel")[0]
    assert own["kind"] == "sdpa" and own["calls"] == own["counted_batches"] == 0
    # Its mask does not know documents.
    assert own["mean"] == (SEQ_LEN + 1) / 2
    flash = run(assets, tmp_path / "b", 2, *EP2, "--model.flavor=debugmodel", *FLASH)[0]
    assert_same(flash, own)
    assert flash["mean"] == (SEQ_LEN + 1) / 2
