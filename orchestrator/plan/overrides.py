"""`--set KEY=VALUE`: values of a plan that are given on the command line. They are stored with the run, beside its plan."""

from __future__ import annotations

import tomllib
from typing import Any

from kgorch.errors import PlanError, nearest
from kgorch.plan.toml_document import Key, KeyPath

EXAMPLES = "for example --set session.wall=30s --set stage.train.args.epochs=3"


def apply_override(values: dict[str, Any], override: str) -> KeyPath:
    """Change one value of an unvalidated plan in place. Missing tables are created; a wrong key is left to validation.

    Args:
        override: `KEY=VALUE`, the key dotted, a stage by its name. The value is TOML, or else a string: `30s` needs no quotes.
    Returns: the path of the value.
    Raises: PlanError.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise PlanError(f"--set {override!r}: expected KEY=VALUE", next_step=EXAMPLES)
    value = _parsed_value(text, override)
    *tables, name = key.strip().split(".")
    table: Any = values
    path: tuple[Key, ...] = ()
    for number, part in enumerate(tables):
        if isinstance(table, list):
            index = _stage_index(table, part, override)
            table, path = table[index], (*path, index)
        else:
            table, path = table.setdefault(part, {}), (*path, part)
        if not isinstance(table, dict | list):
            above = ".".join(tables[: number + 1])
            raise PlanError(
                f"--set {override!r}: {above} is a value, not a table", next_step=f"--set {above}=VALUE, or another key"
            )
    if isinstance(table, list):
        raise PlanError(f"--set {override!r}: name the stage", next_step="--set stage.NAME.args.epochs=3")
    table[name] = value
    return (*path, name)


def _parsed_value(text: str, override: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # a bare word or `30s`: the shell has taken the quotes
        return text
    except RecursionError:
        raise PlanError(f"--set {override:.200}: nested too deeply", next_step="give a plain value") from None
    except ValueError:  # Python converts no more than 4300 digits
        raise PlanError(f"--set {override:.200}: too many digits", next_step="give a smaller number") from None


def _stage_index(stages: list[Any], name: str, override: str) -> int:
    """The position of the stage `name`. Raises: PlanError."""
    names = [stage.get("name") if isinstance(stage, dict) else None for stage in stages]
    if name not in names:
        listed = ", ".join(str(other) for other in names if other) or "none"
        raise PlanError(
            f"--set {override!r}: there is no stage {name!r}{nearest(name, [str(other) for other in names])}",
            next_step=f"name a stage of the plan: {listed}",
        )
    return names.index(name)
