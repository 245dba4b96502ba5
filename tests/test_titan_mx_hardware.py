"""Which GPUs the MX converters take, and what emulation sets in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.titan_refusal import refusal

pytestmark = pytest.mark.titan

CONVERTERS = ("grouped_mm", "linear")


def convert(kind: str, emulate: bool) -> Any:
    from cookbook.titan.tt_0_2_2 import mxfp8

    grouped = SimpleNamespace(fqns=["experts"], recipe_name="mxfp8", emulate=emulate)
    linear = SimpleNamespace(
        recipe_name="mxfp8_cublas",
        emulate=emulate,
        mxfp8_dim1_cast_kernel_choice="cuda",
        filter_fqns=["output"],
    )
    config: Any = SimpleNamespace(
        model=SimpleNamespace(converters=[f"quantize.{kind}.mx"]),
        compile=SimpleNamespace(enable=True, components=["model"]),
        quantize=SimpleNamespace(
            grouped_mm=SimpleNamespace(mx=grouped), linear=SimpleNamespace(mx=linear)
        ),
    )
    dims: Any = SimpleNamespace(tp_enabled=False)
    converter = {"grouped_mm": mxfp8.MXGroupedMMConverter, "linear": mxfp8.MXLinearConverter}[kind]
    return converter(config, dims)


def pretend(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2 import mxfp8

    monkeypatch.setattr(mxfp8, "has_cuda_capability", lambda *wanted: capability >= wanted)


@pytest.fixture(autouse=True)
def alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.models.moe.utils as utils
    from torchao.prototype.moe_training import scaled_grouped_mm

    monkeypatch.setattr(utils, "TOKEN_GROUP_ALIGN_SIZE_M", 8)
    name = "_emulated_mxfp8_scaled_grouped_mm_2d_2d"
    monkeypatch.setattr(scaled_grouped_mm, name, getattr(scaled_grouped_mm, name))


@pytest.mark.parametrize("kind", CONVERTERS)
@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_gpus_before_blackwell_are_refused_without_emulation(
    kind: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    pretend(capability, monkeypatch)
    reason = refusal(lambda: convert(kind, emulate=False), caplog)
    # The option is that of this converter.
    assert reason.startswith("MXFP8 needs a GPU of SM100 (B200) or later")
    assert reason.endswith(f"--quantize.{kind}.mx.emulate")
    convert(kind, emulate=True)


@pytest.mark.parametrize("kind", CONVERTERS)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell_is_taken(
    kind: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(capability, monkeypatch)
    converter = convert(kind, emulate=False)
    assert converter.emulate is False
    if kind == "linear":
        assert converter.config.mxfp8_dim1_cast_kernel_choice.name == "CUDA"


def test_emulated_linear_layers_use_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend((9, 0), monkeypatch)
    config = convert("linear", emulate=True).config
    assert config.kernel_preference.name == "EMULATED"
    assert config.mxfp8_dim1_cast_kernel_choice.name == "TORCH"


@pytest.mark.parametrize(("capability", "emulates"), [((9, 0), True), ((10, 0), False)])
def test_the_exchange_casts_with_operations_below_blackwell(
    capability: tuple[int, int], emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchao.prototype.moe_training.ep import a2a_combine, a2a_dispatch

    from cookbook.titan.tt_0_2_2 import quantized_a2a

    modules: Any = (a2a_dispatch, a2a_combine)
    kernel = object()
    for module in modules:
        for name in ("triton_to_mxfp8_dim0", "all_to_all_single"):
            monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quantized_a2a, "has_cuda_capability", lambda *wanted: capability >= wanted)
    quantized_a2a.prepare_quantized_a2a()
    for module in modules:
        assert (module.triton_to_mxfp8_dim0 is not kernel) is emulates
        # NCCL knows the type.
        assert module.all_to_all_single is kernel


def test_groups_are_padded_to_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.models.moe.utils as utils

    pretend((10, 0), monkeypatch)
    convert("linear", emulate=False)
    assert utils.TOKEN_GROUP_ALIGN_SIZE_M == 8
    convert("grouped_mm", emulate=False)
    assert utils.TOKEN_GROUP_ALIGN_SIZE_M == 32
