"""kgorch daemon [status | stop]"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from orchestrator.cli import render
from orchestrator.cli.common import json_option, state
from orchestrator.cli.usage import Group
from orchestrator.errors import KgorchError


def _seconds(ctx: click.Context, parameter: click.Parameter, typed: str) -> float:
    """`10m`, `90s`; the plan's own reader of durations is not loaded for it."""
    number, unit = typed.rstrip("smh"), typed[len(typed.rstrip("smh")) :]
    try:
        return float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]
    except (ValueError, KeyError):
        raise click.BadParameter('expected a duration such as "90s" or "10m"') from None


@click.group("daemon", cls=Group, invoke_without_command=True)
@click.option("--at-once", type=click.IntRange(1), metavar="N", help="Sessions beside one another; default: one a GPU.")
@click.option(
    "--stop-timeout",
    "stop_timeout_s",
    default="10m",
    show_default=True,
    metavar="DURATION",
    callback=_seconds,
    help="How long sessions may take to save when the daemon is stopped.",
)
@click.pass_context
def command(ctx: click.Context, at_once: int | None, stop_timeout_s: float) -> int:
    """Go on with every run when it is due, with what a kill or a reboot has cut off, and take over what still trains.

    SIGTERM (or `kgorch daemon stop`) has every session saved that it has begun, and leaves it due for the next daemon.
    A kill -9 leaves training alone: the next daemon takes it over. SIGHUP looks at queue and GPUs anew.

    \b
    Example:
      kgorch daemon --at-once 1
    """
    if ctx.invoked_subcommand:
        return 0
    from orchestrator.scheduler.daemon import Daemon
    from orchestrator.system import log_handlers, process_protection

    _, home, engine = state()
    if "alembic" in sys.modules:  # the database was brought up to date: what did that is not kept in memory for months
        os.execv(sys.executable, [sys.executable, "-m", "orchestrator.cli", *sys.argv[1:]])
    process_protection.protect()
    log_handlers.configure(home)
    if not log_handlers.is_journal():  # there the log's own line is read
        render.echo(f"pid {os.getpid()} takes what is due in {home}", err=True)
    Daemon(engine, home, at_once=at_once, stop_timeout_s=stop_timeout_s).run()
    return 0


@command.command("status")
@json_option
def status(as_json: bool) -> int:
    """Whether a daemon lives, what runs, what is due.

    \b
    Example:
      kgorch daemon status --json
    """
    _, home, _ = state()
    found = _ask(home, "status")
    if found and not found["ok"]:
        raise KgorchError(
            "the daemon lives and cannot read its database just now",
            str(found.get("error")),
            next_step="see that its disk is neither full nor read-only, and that no other program holds it; then try again",
        )
    if as_json:
        fields = ("pid", "at_once", "gpus", "running", "due", "waiting", "next_due_at", "trouble")
        render.as_json(None if found is None else {name: found.get(name) for name in fields})
        return 0
    if found is None:
        render.echo("no daemon lives; `kgorch daemon` starts one, `kgorch systemd install` has it started")
        return 0
    next_due = f", the next at {render.clock(found['next_due_at'])}" if found["next_due_at"] else ""
    for label, value in (
        ("daemon", f"pid {found['pid']}, {found['at_once']} at once"),
        ("gpus", ", ".join(found["gpus"]) or "none"),
        ("running", ", ".join(found["running"]) or "nothing"),
        ("queue", f"{found['due']} due of {found['waiting']}{next_due}"),
        *([("trouble", found["trouble"])] if found["trouble"] else []),
    ):
        render.echo(f"{label:<8} {value}")
    return 0


@command.command("stop")
@click.option("--wait/--no-wait", default=True, help="Return when it has ended (default), or at once.")
def stop(wait: bool) -> int:
    """Have the daemon save what it has begun, and end.

    \b
    Example:
      kgorch daemon stop
    """
    from orchestrator.system.process_identity import start_ticks

    _, home, _ = state()
    found = _ask(home, "stop")
    if found is None:
        render.echo("no daemon lives")
        return 0
    ticks = start_ticks(found["pid"])
    while wait and ticks is not None and start_ticks(found["pid"]) == ticks:
        time.sleep(0.1)
    render.echo(f"the daemon, pid {found['pid']}, {'has stopped' if wait else 'is asked to stop'}")
    return 0


def _ask(home: Any, what: str) -> dict[str, Any] | None:
    from orchestrator.scheduler import daemon_api

    return daemon_api.ask(home, what)
