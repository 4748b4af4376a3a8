"""From plan.toml to a `Plan`: read, parse, apply `--set`, validate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgorch.errors import PlanError, nearest
from kgorch.plan.diagnostics import validate
from kgorch.plan.model import Plan
from kgorch.plan.overrides import apply_override
from kgorch.plan.toml_document import DocumentKind, TomlDocument, parse_toml, read_text

PLAN = DocumentKind(
    noun="plan",
    error=PlanError,
    if_unreadable="kgorch init --print    (a plan with every key explained; kgorch init writes one)",
    if_invalid="kgorch explain {key}",
)


def load(path: Path, overrides: Sequence[str] = ()) -> tuple[Plan, str]:
    """Load the plan at `path`: the plan and its text, which the run keeps.

    Args:
        overrides: as `parse` takes them.
    Raises: PlanError.
    """
    if path.suffix == ".py":  # as torchrun and python take it
        raise PlanError(
            f"{path} is a Python script, not a plan",
            'a plan is a TOML file that names the script: entry = "train.py"',
            next_step=PLAN.if_unreadable,
        )
    try:
        text = read_text(path, PLAN)
    except FileNotFoundError:
        raise PlanError(f"there is no plan {path}{_nearest_file(path)}", next_step=PLAN.if_unreadable) from None
    return parse(text, str(path), overrides, are_typed=True), text


def parse(text: str, where: str, overrides: Sequence[str] = (), *, are_typed: bool = False) -> Plan:
    """Parse a plan from TOML.

    Args:
        where: the file as errors name it.
        overrides: arguments of --set, `session.wall=30s`; later ones win.
        are_typed: a user has just typed the overrides, and can correct what is refused as a likely slip.
    Raises: PlanError.
    """
    values = parse_toml(text, where, PLAN)
    paths = {apply_override(values, override, is_typed=are_typed): override for override in overrides}
    return validate(Plan, TomlDocument(values, text, where, paths), PLAN)


def stage_names(text: str, where: str) -> list[str]:
    """The names of the stages as the file has them, without any override. Raises: PlanError for what is no TOML."""
    stages = parse_toml(text, where, PLAN).get("stage")
    names = [stage.get("name") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return [name for name in names if isinstance(name, str)]


def _nearest_file(path: Path) -> str:
    """A hint at a TOML file of a similar name in the same folder; empty for none."""
    try:
        others = [other.name for other in path.absolute().parent.glob("*.toml")]
    except OSError:
        return ""
    return nearest(path.name, others)
