"""The keys that a file may have, read from the fields of its pydantic model: nothing here keeps a list of its own.

A key is written dotted, without positions in lists and without names of stages: `stage.args`, `checkpoint.keep.best`.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kgorch.core.text import in_one_line
from kgorch.errors import nearest
from kgorch.plan.toml_document import KeyPath


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a model, in the order of its fields; a table comes before the keys in it."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if table := _table_of(field):
            yield from dotted_keys(table, f"{prefix}{name}.")


def table_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model of the table at `path`; None where the path leads to no table of the model."""
    table: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, str):
            table = table_below(table, part)
    return table


def table_below(model: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The model of the table that `key` holds; None for a plain value, an unknown key, or no model."""
    field = model.model_fields.get(key) if model else None
    return _table_of(field) if field else None


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model in a field's type: alone, in a list, or as one of several forms."""
    types: list[Any] = [field.annotation]
    while types:
        kind = types.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        if (
            typing.get_origin(kind) is not dict
        ):  # of a table whose keys a user names, the values are no keys of the model
            types += typing.get_args(kind)
    return None


def explain_unknown(path: KeyPath, values: Mapping[str, Any], model: type[BaseModel]) -> tuple[str, str]:
    """Say what is wrong with an unknown key, and which key was probably meant.

    The candidates, in this order: a similar key of the same table; the same key in another table; an argument of that name
    in a stage of the plan.

    Returns: the message, and the dotted key that was meant, or its table where none was.
    """
    key, above = str(path[-1]), path[:-1]
    table = table_at(model, above)
    names = list(table.model_fields) if table else []
    prefix = "".join(f"{part}." for part in above if isinstance(part, str))
    listed = f"; known here: {', '.join(names)}"
    if similar := _nearest_key(key, names):
        return f"unknown key (did you mean '{similar}'?){listed}", prefix + similar
    if elsewhere := next((other for other in dotted_keys(model) if other.split(".")[-1] == key), None):
        place = ", which goes above the first [table]" if "." not in elsewhere else ""
        return f"unknown key (did you mean '{elsewhere}'{place}?){listed}", elsewhere
    stages = values.get("stage")
    for stage in stages if isinstance(stages, list) else ():
        args = stage.get("args") if isinstance(stage, Mapping) else None
        if isinstance(args, Mapping) and key in args:
            return f"unknown key (did you mean 'stage.{stage.get('name')}.args.{key}'?){listed}", "stage.args"
    if path[:1] == ("stage",) and len(path) == 3:
        return (
            f"unknown key{listed}; an argument of the training goes into args = {{ {in_one_line(key)} = … }}",
            "stage.args",
        )
    return f"unknown key{listed}", prefix.removesuffix(".")


def _nearest_key(key: str, names: Iterable[str]) -> str:
    """The most similar of the known keys; empty for none."""
    match = re.search(r"'(.*)'", nearest(key, names))
    return match[1] if match else ""
