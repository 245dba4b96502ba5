"""What TorchTitan's options turn on in training, in the words of an overlay's `active` block.

The training process compares the same words with what it finds (`titan/tt_0_2_2/activity.py`);
here they follow from the options, so that a difference is known before the job.
"""

from __future__ import annotations

from collections.abc import Iterable

from cookbook.config.options import Options

# By what an overlay may say of it.
OF_PRECISION = ("grouped_gemms", "linear_layers")
OF_EP_BACKEND = ("dispatch",)
_A2A = "parallelism.expert_parallel_a2a_"


def implied(options: Options) -> dict[str, str]:
    """`grouped_gemms`, `linear_layers` and `dispatch` as the options would have them."""
    converters = options["model.converters"]
    grouped = {
        "quantize.grouped_mm.mx": options["quantize.grouped_mm.mx.recipe_name"],
        "quantize.grouped_mm.float8": "fp8_rowwise",
    }
    linear = {"quantize.linear.mx": "mx", "quantize.linear.float8": "float8"}
    return {
        "grouped_gemms": _join(grouped[name] for name in converters if name in grouped),
        "linear_layers": _join(linear[name] for name in converters if name in linear),
        "dispatch": _dispatch(options),
    }


def _join(found: Iterable[str]) -> str:
    return " and ".join(found) or "bf16"


def _dispatch(options: Options) -> str:
    if options["parallelism.expert_parallel_comm_backend"] == "deepep":
        return "deepep"
    quantized = [
        options[f"{_A2A}{part}"] for part in ("dispatch_fwd_precision", "combine_bwd_precision")
    ]
    if quantized == ["mxfp8", "mxfp8"]:
        return "mxfp8"
    return "standard" if quantized == ["default", "default"] else "mxfp8 in one exchange of two"
