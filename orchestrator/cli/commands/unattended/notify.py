"""kgorch notify test"""

from __future__ import annotations

from pathlib import Path

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import load_plan, open_state
from kgorch.cli.options import json_option, plan_argument, set_option
from kgorch.cli.usage import Group

TIMEOUT_S = 300.0
"""For the notification that a run was given up, retries included."""


@click.group("notify", cls=Group)
def command() -> None:
    """Test the notifications of a plan's [notify] section.

    \b
    Example:
      kgorch notify test plan.toml
    """


@command.command("test")
@plan_argument
@set_option
@json_option
def test(plan: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Send a test notification to each target of PLAN once, and show which arrived. Exits with 2 unless all did.

    \b
    Example:
      kgorch notify test plan.toml
    """
    from kgorch.errors import ExitCode, PlanError
    from kgorch.plan import user_config
    from kgorch.services import notifications

    loaded = user_config.apply_to_plan(load_plan(plan, overrides)[0], user_config.load())
    notifications.check(loaded.notify)
    results = notifications.test(loaded.notify, loaded.name, plan.absolute().parent)
    if not results:
        raise PlanError(
            f"{plan} has no target of notifications",
            next_step="give a command or urls in its [notify] section, or in your configuration",
        )
    if as_json:
        render.as_json([{"target": item.target, "arrived": item.why is None, "why": item.why} for item in results])
    else:
        rows = [[item.target, item.why or "arrived", render.duration(item.took_s)] for item in results]
        render.table(["target", "", "took"], rows)
    return int(ExitCode.MISTAKE if any(item.why for item in results) else ExitCode.DONE)


@command.command("given-up", hidden=True)
@click.argument("run_id")
def given_up(run_id: str) -> int:
    """Notify that the daemon gave a run up. A command of its own, because the daemon loads no plans."""
    from kgorch.admission import resolve_run
    from kgorch.core.session.notification_policy import failure_notice as notice
    from kgorch.db import runs
    from kgorch.services import notifications

    _, _, engine = open_state()
    if run := runs.by_id(engine, run_id):
        sender = notifications.Notifier(
            resolve_run.load_stored_plan(run).notify, run.name, Path(run.workdir), lambda kind, facts: None
        )
        sender.tell(notice(run.why))
        sender.finish(TIMEOUT_S)
    return 0
