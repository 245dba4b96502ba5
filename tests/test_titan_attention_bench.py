"""The benchmark of attention, tried out on the CPU, and what it would say of wrong kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_attention
from cookbook.titan.common import varlen_attention as varlen
from cookbook.titan.selftest.attention import AttentionShape, flash_attention_4, random_inputs
from cookbook.titan.selftest.attention_errors import Errors, within_bounds
from cookbook.titan.selftest.packings import PACKINGS, document_ends_of

pytestmark = [
    pytest.mark.titan,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

SHAPE = "16B-8192-b2"


def bench(tmp_path: Path, *options: str, status: int = 0) -> dict[str, Any]:
    output = tmp_path / "attention.json"
    words = ["--device=cpu", f"--only={SHAPE}", "-o", str(output), *options]
    assert gpu_attention.main(words) == status
    found: dict[str, Any] = json.loads(output.read_text())
    assert found["ok"] is (status == 0)
    return found


def test_every_packing_is_within_bounds(tmp_path: Path) -> None:
    found = bench(tmp_path, f"--flex={SHAPE}", "--deterministic")
    assert found["device"] == "cpu (tried out)"
    assert found["computed_by"] == ["flash_attention_4_reference"]
    assert [case["packing"] for case in found["cases"]] == list(PACKINGS)
    for case in found["cases"]:
        assert case["gradients_repeat"] and case["empty_documents_change_nothing"]
        for kind in ("flash_attention_4", "flex"):
            errors = case[kind]["errors"]
            # Rounding to BF16 is seen, and nothing more.
            assert all(5e-4 < errors[name]["whole"] < 5e-3 for name in ("out", "dq", "dk", "dv"))
    whole = found["cases"][-1]
    assert whole["documents"] == 2 and whole["mean_attended_length"] == 80.5


def wrong_last_rows(grads: tuple[torch.Tensor, ...]) -> None:
    grads[0][-8:] = 0  # of 320 tokens


def wrong_head(grads: tuple[torch.Tensor, ...]) -> None:
    grads[1][:, 1] *= 1.02


def not_written(grads: tuple[torch.Tensor, ...]) -> None:
    grads[2][7] = float("nan")


@pytest.mark.parametrize("fault", [wrong_last_rows, wrong_head, not_written])
def test_wrong_gradients_behind_a_right_forward_are_found(
    fault: Callable[[tuple[torch.Tensor, ...]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backward = varlen.reference_backward

    def faulty(*args: Any) -> tuple[torch.Tensor, ...]:
        grads = backward(*args)
        # The benchmark's own reference is in float32.
        if grads[0].dtype == torch.bfloat16:
            fault(grads)
        return grads

    monkeypatch.setattr(varlen, "reference_backward", faulty)
    (case,) = bench(tmp_path, "--packings=whole", "--flex", status=1)["cases"]
    assert case["flash_attention_4"]["errors"]["out"]["part"] < 5e-3
    assert "flex" not in case


@pytest.mark.parametrize(("kind", "packing"), [("sdpa", "whole"), ("flex", "edges")])
def test_torchtitans_attention_has_the_scale_and_the_documents_of_the_shape(
    kind: str, packing: str
) -> None:
    """Not the usual scale: YaRN's is another beyond 4,096 tokens."""
    from cookbook.titan.tt_0_2_2 import reference_attention

    shape = AttentionShape(batch=2, length=32, heads=2, head_dim=16, v_head_dim=16, scale=0.7)
    q, k, v, _ = random_inputs(shape, "cpu")
    ends = document_ends_of(packing, 2, 32)
    attends = (getattr(reference_attention, kind), flash_attention_4)
    found, expected = (attend(shape, ends)(q, k, v).float() for attend in attends)
    assert float((found - expected).norm() / expected.norm()) < 0.01


def test_one_wrong_document_of_one_head_is_found() -> None:
    cu_seqlens = torch.tensor([0, 1000, 1020], dtype=torch.int32)
    torch.manual_seed(0)
    expected = [torch.randn(1020, 8, 4) for _ in range(4)]
    found = [x.clone() for x in expected]
    found[2][1000:, 3] *= 1.1
    errors = Errors(cu_seqlens)
    for heads in (slice(0, 4), slice(4, 8)):
        errors.add([x[:, heads] for x in found], [x[:, heads] for x in expected])
    relative = errors.relative()
    assert relative["dk"]["whole"] < 0.01
    assert relative["dk"]["part"] == pytest.approx(0.1, rel=0.15)
    assert not within_bounds(relative, None)
    # Another kernel that is as far off would make it a matter of rounding.
    assert within_bounds(relative, relative)
    exact = Errors(cu_seqlens)
    exact.add(expected, expected)
    assert within_bounds(exact.relative(), None)


def test_documents_that_see_one_another_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = varlen.reference_forward

    def faulty(q: torch.Tensor, *args: Any) -> Any:
        k, v, cu_seqlens, scale = args
        if q.dtype == torch.bfloat16:
            cu_seqlens = torch.cat([cu_seqlens[:1], cu_seqlens[2:]])
        return forward(q, k, v, cu_seqlens, scale)

    monkeypatch.setattr(varlen, "reference_forward", faulty)
    bench(tmp_path, "--packings=edges", "--flex", status=1)


def test_a_kernel_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("expects the M-mode to be 64, but got 96")

    monkeypatch.setattr(varlen, "reference_backward", fails)
    cases = bench(tmp_path, "--packings", "short", "whole", "--flex", status=1)["cases"]
    assert [case["packing"] for case in cases] == ["short", "whole"]
    assert all("M-mode" in case["error"] for case in cases)


def test_every_shape_of_the_recipes_is_there() -> None:
    shapes = [gpu_attention.Shape.of_recipe(*recipe) for recipe in gpu_attention.RECIPES]
    names = [shape.name for shape in shapes]
    assert len(set(names)) == len(names)
    assert {(shape.head_dim, shape.v_head_dim) for shape in shapes} == {(192, 128)}
    found = {shape.name: shape for shape in shapes}
    assert found["16B-8192-b4"].heads == 16
    assert found["671B-4096-b1"].heads == 128
    assert found["671B-8192-b1-tp2"].heads == 64
    # YaRN scales the scores of sequences that are longer than 4096.
    assert found["671B-4096-b1"].scale == pytest.approx(192**-0.5)
    assert found["671B-8192-b1"].scale > 1.5 * 192**-0.5


def test_packings_have_the_lengths_that_they_say() -> None:
    def mean(packing: str) -> float:
        ends = document_ends_of(packing, 200, 8192)
        assert ends.shape == (200, 8192) and ends[:, -1].all()
        return float(ends.numel() / int(ends.sum()))

    assert 380 < mean("short") < 480
    # Cut where a sequence ends; 5,500 otherwise.
    assert 2500 < mean("long") < 4000
    assert mean("whole") == 8192
    edges = document_ends_of("edges", 1, 8192)[0].nonzero().flatten()
    assert set(edges.diff().tolist()) >= {1, 63, 64, 65, 127, 128, 129, 383, 384, 385}


def test_a_shape_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_attention.main(["--device=cpu", "--only=17B"])
    assert "17B" in capsys.readouterr().err


def test_activations_are_kept_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.keep_attention import keep_calls

    monkeypatch.setattr(varlen, "varlen_attention", varlen.varlen_attention)
    keep_calls(tmp_path / "kept.pt", {2})
    # Two sequences of 20 tokens, with documents of 5, 15 and 20, and room for one more.
    cu_seqlens = torch.tensor([0, 5, 20, 40, 40], dtype=torch.int32)
    torch.manual_seed(0)
    dims = (192, 192, 128, 128)
    first, second = ([torch.randn(40, 2, dim).bfloat16() for dim in dims] for _ in range(2))
    for q, k, v, grad in (first, second):
        out = varlen.varlen_attention(q.requires_grad_(), k, v, cu_seqlens, 20, 0.1)
        out.backward(grad)
    assert [path.name for path in tmp_path.iterdir()] == ["kept-2.pt"]

    shape, ends, inputs = gpu_attention.kept_case(tmp_path / "kept-2.pt", "cpu")
    assert (shape.batch, shape.length, shape.heads, shape.scale) == (2, 20, 2, 0.1)
    assert ends.nonzero().tolist() == [[0, 4], [0, 19], [1, 19]]
    assert all(torch.equal(one, other) for one, other in zip(inputs, second, strict=True))
    found = bench(tmp_path, "--packings=whole", f"--activations={tmp_path / 'kept-2.pt'}")
    assert found["cases"][-1]["inputs"] == "kept-2.pt"
