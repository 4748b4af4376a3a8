"""The plan (plan.toml) and the user's configuration: read within bounds, validated, and passed on as immutable values.

May import core, platforms and errors, and pydantic; a command that needs no plan must not import this package, for pydantic
takes longer to load than such a command to run.
"""

from __future__ import annotations

from kgorch.plan.entries import check_entries
from kgorch.plan.keys import dotted_keys
from kgorch.plan.model import Plan
from kgorch.plan.overrides import of_missing_stages
from kgorch.plan.plan_file import load, parse, stage_names
from kgorch.plan.quantities import parse_size_bytes
from kgorch.plan.sections import DataSection, NotifySection
from kgorch.plan.stages import StageSection
from kgorch.plan.track import TrackSection

__all__ = [
    "DataSection",
    "NotifySection",
    "Plan",
    "StageSection",
    "TrackSection",
    "check_entries",
    "dotted_keys",
    "load",
    "of_missing_stages",
    "parse",
    "parse_size_bytes",
    "stage_names",
]
