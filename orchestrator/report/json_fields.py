"""Values as the JSON output of kgorch has them (docs/json.md): times in UTC, null for what is not known, no NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

View = dict[str, Any]
"""Fields of a JSON object."""


def stamp(at: datetime | None) -> str | None:
    """ISO 8601 with milliseconds and Z."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics with null for NaN and infinities, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
