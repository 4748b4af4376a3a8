"""kgorch notify test"""

from __future__ import annotations

import time
from pathlib import Path

import click

from orchestrator.cli import render
from orchestrator.cli.common import json_option, load_plan, plan_argument, set_option, state
from orchestrator.cli.usage import Group

PATIENCE_S = 300.0


@click.group("notify", cls=Group)
def command() -> None:
    """Notices of a plan's [notify] part.

    \b
    Example:
      kgorch notify test plan.toml
    """


@command.command("test")
@plan_argument
@set_option
@json_option
def test(plan: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Send a test notice to each target of PLAN, once, and tell which arrived. Exits 2 when one did not, or there is none.

    \b
    Example:
      kgorch notify test plan.toml
    """
    from orchestrator.errors import ExitCode, PlanError
    from orchestrator.plan import user_config
    from orchestrator.services import notifications

    loaded = user_config.apply_to_plan(load_plan(plan, overrides)[0], user_config.load())
    notifications.check(loaded.notify)
    found = notifications.test(loaded.notify, loaded.name, plan.absolute().parent)
    if not found:
        raise PlanError(
            f"{plan} tells nobody", next_step="give its [notify] part, or your configuration's, a command or urls"
        )
    if as_json:
        render.as_json([{"target": item.target, "arrived": item.why is None, "why": item.why} for item in found])
    else:
        rows = [[item.target, item.why or "arrived", render.duration(item.took_s)] for item in found]
        render.table(["target", "", "took"], rows)
    return int(ExitCode.MISTAKE if any(item.why for item in found) else ExitCode.DONE)


@command.command("given-up", hidden=True)
@click.argument("run_id")
def given_up(run_id: str) -> int:
    """What the daemon has said when it gives a run up: it reads no plans itself."""
    from db import runs
    from orchestrator.admission import resolve_run
    from orchestrator.core.notification_policy import given_up as notice
    from orchestrator.services import notifications

    _, _, engine = state()
    if run := runs.by_id(engine, run_id):
        told = notifications.Notices(resolve_run.plan_of(run).notify, run.name, Path(run.workdir))
        told.tell(notice(run.why))
        until_s = time.monotonic() + PATIENCE_S
        while told.is_busy and time.monotonic() < until_s:
            time.sleep(0.1)
        told.stop()
    return 0
