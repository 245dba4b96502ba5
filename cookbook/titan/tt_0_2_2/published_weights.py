"""Load published weights that have no routing bias: those of models trained with a balance loss.

DeepSeek-V2-Lite is one. TorchTitan balances experts by a bias and asks a checkpoint for it, so the
load would fail. Here the bias stays zero, as initialized. A checkpoint that lacks the bias of some
layers is damaged, and so is one without any whose scores are a sigmoid, as DeepSeek-V3's.
"""

from __future__ import annotations

from typing import Any

_BIAS = "e_score_correction_bias"


def without_missing_bias(adapter: Any) -> Any:
    """Return a class that asks no routing bias of a softmax model's checkpoint that has none.

    Args:
        adapter: TorchTitan's state-dict adapter of a model family.
    """

    class Adapter(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            self._asked: dict[str, Any] = super().to_hf(state_dict)
            return self._asked

        def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
            # TorchTitan loads into the last result of `to_hf`.
            reader = super().get_hf_storage_reader(path, from_quantized)
            if self.model_args.moe_args.score_func == "softmax":
                saved = reader.read_metadata().state_dict_metadata
                if not any(name.endswith(_BIAS) for name in saved):
                    for name in [name for name in self._asked if name.endswith(_BIAS)]:
                        del self._asked[name]
            return reader

    return Adapter
