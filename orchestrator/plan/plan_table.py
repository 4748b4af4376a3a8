"""The base of all tables of a plan and of the user's configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PlanTable(BaseModel):
    """A table of a TOML file. Unknown keys are errors, and no value is converted: `ranks = "2"` is a mistake, not 2."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
