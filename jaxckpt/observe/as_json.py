"""What the commands print for programs."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any) -> str:
    """JSON knows no infinities and no NaNs: they become texts, as does what it has no form for."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
