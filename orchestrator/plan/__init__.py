"""The plan (plan.toml) and the user's configuration: read, validated, and handed on as plain values.

May import core, platforms and errors, and pydantic.
"""

from __future__ import annotations

from orchestrator.plan.model import Plan, Stage, check_entries, load, parse, seconds, size

__all__ = ["Plan", "Stage", "check_entries", "load", "parse", "seconds", "size"]
