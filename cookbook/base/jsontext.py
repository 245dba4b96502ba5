"""Values as JSON text that every reader takes: what is NaN or infinite becomes null."""

from __future__ import annotations

import json
import math


def json_text(value: object) -> str:
    """`value` as indented JSON with a line break at its end."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
