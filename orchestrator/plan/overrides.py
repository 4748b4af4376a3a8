"""`--set KEY=VALUE`: values of a plan that are given on the command line. They are stored with the run, beside its plan."""

from __future__ import annotations

import ast
import contextlib
import shlex
import tomllib
from collections.abc import Iterable
from typing import Any

from kgorch.errors import PlanError, nearest
from kgorch.plan.toml_document import Key, KeyPath
from kgorch.plan.toml_values import format_value, toml_literal

EXAMPLES = "for example --set session.wall=30s --set stage.train.args.epochs=3"

_NESTED = """a list is like [1, 2.5, "text"], a table like {size = 1, name = "text"}; the shell needs single quotes around it"""


class NoSuchStage(PlanError):
    """An override names a stage that the plan does not have."""


def apply_override(values: dict[str, Any], override: str, *, is_typed: bool = False) -> KeyPath:
    """Change one value of an unvalidated plan in place. Missing tables are created; a wrong key is left to validation.

    Args:
        override: `KEY=VALUE`, the key dotted, a stage by its name, in quotes where that has a dot. The value is TOML, or else a
            string: `30s` needs no quotes.
        is_typed: also refuse text for an argument of the script where another value was meant.
    Returns: the path of the value.
    Raises: PlanError.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise PlanError(f"--set {override!r}: expected KEY=VALUE", next_step=EXAMPLES)
    value = _parsed_value(text, override)
    *tables, name = _key_parts(key.strip(), override)
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
    if is_typed and "args" in path and value == text:
        _refuse_likely_slip(key.strip(), text.strip(), table.get(name))
    table[name] = value
    return (*path, name)


def of_missing_stages(stages: Iterable[str], overrides: Iterable[str]) -> list[str]:
    """Those of the overrides that name a stage which is not among `stages`, and so would keep a plan from being read."""
    values: dict[str, Any] = {"stage": [{"name": name} for name in stages]}
    missing = []
    for override in overrides:
        try:
            apply_override(values, override)
        except NoSuchStage:
            missing.append(override)
        except PlanError:  # reported when the plan itself is read
            continue
    return missing


def _key_parts(key: str, override: str) -> list[str]:
    """The parts of a dotted key. Raises: PlanError for quotes that do not fit."""
    if '"' not in key and "'" not in key:
        return key.split(".")
    parts: list[str] = []
    try:
        table: Any = tomllib.loads(f"{key} = 0")
        while isinstance(table, dict):
            [(part, table)] = table.items()
            parts.append(part)
    except (ValueError, RecursionError):
        raise PlanError(
            f"--set {override!r:.200}: expected a dotted key, with a part in quotes where it has a dot",
            next_step=EXAMPLES,
        ) from None
    return parts


def _parsed_value(text: str, override: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # a bare word or `30s`: the shell has taken the quotes
        return text
    except RecursionError:
        raise PlanError(f"--set {override:.200}: nested too deeply", next_step="give a plain value") from None
    except ValueError:  # Python converts no more than 4300 digits
        raise PlanError(f"--set {override:.200}: too many digits", next_step="give a smaller number") from None


def _refuse_likely_slip(key: str, text: str, before: Any) -> None:
    """Refuse bare text that was meant as a bool, a number, a list, a table or None: as text, `False` is true in Python.

    Args:
        before: the value that it replaces.
    Raises: PlanError, with what to type.
    """
    forms: list[str] = []
    is_nested = isinstance(before, list | dict) or text.startswith(("[", "{"))
    if isinstance(before, bool) or text in ("True", "False"):
        forms = [text.lower()] if text in ("True", "False") else ["true", "false"]
    elif number := _number(text):
        forms = [number]
    elif is_nested:
        forms = _nested(text)
    elif text != "None" and not isinstance(before, int | float):
        return
    typed = [f"--set {shlex.quote(f'{key}={form}')}" for form in [*forms, toml_literal(text)]]
    raise PlanError(
        f"--set {key}={text}: this is text, since it is no value of TOML",
        *(
            [f"the value in the plan is {format_value(before)}"]
            if isinstance(before, int | float | list | dict)
            else []
        ),
        *(["TOML has no None: leave the argument out, if the script's default is that"] if text == "None" else []),
        *([_NESTED] if is_nested and not forms else []),
        next_step=", or ".join([*typed[:-1], f"{typed[-1]} where text is meant"]),
    )


def _nested(text: str) -> list[str]:
    """The list or table that the text is in Python or JSON, as TOML; empty for none."""
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = ast.literal_eval(text)
        return [toml_literal(value)] if isinstance(value, list | tuple | dict) else []
    return []


def _number(text: str) -> str:
    """The number that the text is in Python, as TOML; empty for none."""
    for number_type in (int, float):
        with contextlib.suppress(ValueError):
            return str(number_type(text))
    return ""


def _stage_index(stages: list[Any], name: str, override: str) -> int:
    """The position of the stage `name`. Raises: NoSuchStage."""
    names = [stage.get("name") if isinstance(stage, dict) else None for stage in stages]
    if name not in names:
        listed = ", ".join(f'"{other}"' if "." in str(other) else str(other) for other in names if other) or "none"
        raise NoSuchStage(
            f"--set {override!r}: there is no stage {name!r}{nearest(name, [str(other) for other in names])}",
            next_step=f"name a stage of the plan: {listed}",
        )
    return names.index(name)
