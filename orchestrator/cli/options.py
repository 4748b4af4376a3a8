"""Arguments and options that several verbs have, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from kgorch.cli import completion
from kgorch.core.limits import time_parsing
from kgorch.errors import PlanError

FC = TypeVar("FC", bound=Callable[..., Any])
"""A function that click decorates."""


def _plan_path(ctx: click.Context, parameter: click.Parameter, typed: str | None) -> Path | None:
    return None if typed is None and ctx.resilient_parsing else plan_path(ctx, typed)


def plan_path(ctx: click.Context, typed: str | None) -> Path:
    """The plan that was typed, else plan.toml of the working folder. Raises: PlanError."""
    if typed is None and not os.path.lexists("plan.toml"):
        raise PlanError(
            "no plan was named, and there is no plan.toml in this folder",
            next_step=f"{ctx.command_path} PLAN; or kgorch init, which writes a plan.toml and a train.py",
        )
    return Path(typed or "plan.toml")


def parse_instant(ctx: click.Context, parameter: click.Parameter, typed: str | None) -> datetime | None:
    """A time of day or a date, as an instant in UTC. Raises: click.BadParameter."""
    try:
        return None if typed is None else time_parsing.parse_future_time(typed, datetime.now(UTC))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


run_argument = click.argument("run", required=False, metavar="[RUN]", shell_complete=completion.runs)
"""RUN: a name, or NAME/NUMBER; the newest run where it is left out."""

plan_argument = click.argument(
    "plan", required=False, metavar="[PLAN]", callback=_plan_path, shell_complete=completion.plans
)
"""PLAN: plan.toml where it is left out."""

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completion.settings,
    help="Override a value of the plan; stages by name: stage.train.args.epochs=3.",
)

on_option = click.option(
    "--on",
    "place",
    metavar="PLACE",
    shell_complete=completion.places,
    help="Where: kaggle, or local; default: the plan's [remote] on.",
)

until_option = click.option(
    "--until",
    metavar="TIME",
    callback=parse_instant,
    help="Time limit of this session: 18:30 (the next one), or 2026-11-22T03:00+01:00.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; its fields are stable (docs/json.md).")


def output_option(example: str) -> Callable[[FC], FC]:
    """`-o FILE` of a verb that writes a page."""
    return click.option(
        "-o",
        "--output",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f"Where to write: {example}.",
    )
