"""kgorch daemon [status | stop]"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import open_state
from kgorch.cli.options import json_option
from kgorch.cli.usage import Group
from kgorch.errors import KgorchError


def _seconds(ctx: click.Context, parameter: click.Parameter, typed: str) -> float:
    """`10m`, `90s`. The plan package reads durations, too, but it loads pydantic, which the daemon does not need."""
    number, unit = typed.rstrip("smh"), typed[len(typed.rstrip("smh")) :]
    try:
        return float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]
    except (ValueError, KeyError):
        raise click.BadParameter('expected a duration such as "90s" or "10m"') from None


def _open_when_reachable() -> tuple[Path, Any]:
    """The state folder and its database. Waits for a fleet's server: after a power cut it may come up later than this machine."""
    from kgorch.core.backoff import Backoff
    from kgorch.db.postgres import ServerAway
    from kgorch.system import sd_notify

    pauses, failures = Backoff(1.0, longest_s=30.0), 0
    while True:
        try:
            _, home, engine = open_state()
            return home, engine
        except ServerAway as error:
            failures += 1
            pause_s = pauses.after(failures)
            render.echo(f"{'; '.join((error.what, *error.facts))}; the daemon tries again in {pause_s:.0f} s", err=True)
            sd_notify.status("waits for the database")
            sd_notify.extend_start(pause_s + 60)
            time.sleep(pause_s)


@click.group("daemon", cls=Group, invoke_without_command=True)
@click.option("--at-once", type=click.IntRange(1), metavar="N", help="Sessions at the same time; default: one a GPU.")
@click.option(
    "--stop-timeout",
    "stop_timeout_s",
    default="10m",
    show_default=True,
    metavar="DURATION",
    callback=_seconds,
    help="Time for sessions to save when the daemon is stopped.",
)
@click.pass_context
def command(ctx: click.Context, at_once: int | None, stop_timeout_s: float) -> int:
    """Start each queued run when it is due, resume what a kill or a reboot interrupted, and adopt what still trains.

    SIGTERM (or `kgorch daemon stop`) saves and ends the sessions that the daemon started; the next daemon continues them.
    SIGKILL does not affect training: the next daemon adopts it. SIGHUP reads the queue and the GPUs again.

    \b
    Example:
      kgorch daemon --at-once 1
    """
    if ctx.invoked_subcommand:
        return 0
    from kgorch.scheduler.daemon import Daemon
    from kgorch.system import log_handlers, process_protection

    home, engine = _open_when_reachable()
    # the database was migrated: start again without Alembic in memory, for a process that lives for months
    if "alembic" in sys.modules:
        os.execv(sys.executable, [sys.executable, "-m", "kgorch.cli", *sys.argv[1:]])
    process_protection.protect()
    log_handlers.configure(home)
    if not log_handlers.is_journal():  # systemd's journal shows the same line of the log
        render.echo(f"the daemon runs as pid {os.getpid()}, for the queue in {home}; Ctrl-C stops it", err=True)
    Daemon(engine, home, at_once=at_once, stop_timeout_s=stop_timeout_s).run()
    return 0


@command.command("status")
@json_option
def status(as_json: bool) -> int:
    """Show whether a daemon is running, its sessions and its queue.

    \b
    Example:
      kgorch daemon status --json
    """
    _, home, _ = open_state()
    answer = _ask(home, "status")
    if answer and not answer["ok"]:
        raise KgorchError(
            "the daemon is running, but cannot read its database",
            str(answer.get("error")),
            next_step="check that its disk is not full or read-only, and that no other program locks it; then try again",
            error_code="KG602",
        )
    if as_json:
        fields = ("pid", "at_once", "gpus", "running", "due", "waiting", "next_due_at", "trouble")
        render.as_json(None if answer is None else {name: answer.get(name) for name in fields})
        return 0
    if answer is None:
        render.echo("no daemon is running\nnext: kgorch daemon, or kgorch systemd install to start it at boot")
        return 0
    next_due = f", the next at {render.clock(answer['next_due_at'])}" if answer["next_due_at"] else ""
    for label, value in (
        ("daemon", f"pid {answer['pid']}, at most {answer['at_once']} sessions at a time"),
        ("gpus", ", ".join(answer["gpus"]) or "none"),
        ("running", ", ".join(answer["running"]) or "nothing"),
        ("queue", f"{answer['due']} due of {answer['waiting']}{next_due}"),
        *([("trouble", answer["trouble"])] if answer["trouble"] else []),
    ):
        render.echo(f"{label:<8} {value}")
    return 0


@command.command("stop")
@click.option("--wait/--no-wait", default=True, help="Return when it has ended (default), or at once.")
def stop(wait: bool) -> int:
    """Save and end the sessions that the daemon started, then end the daemon.

    \b
    Example:
      kgorch daemon stop
    """
    from kgorch.system.process_identity import start_ticks

    _, home, _ = open_state()
    answer = _ask(home, "stop")
    if answer is None:
        render.echo("no daemon is running")
        return 0
    ticks = start_ticks(answer["pid"])  # the pid alone may be another process by then
    while wait and ticks is not None and start_ticks(answer["pid"]) == ticks:
        time.sleep(0.1)
    render.echo(f"the daemon (pid {answer['pid']}) {'has stopped' if wait else 'was asked to stop'}")
    return 0


def _ask(home: Path, question: str) -> dict[str, Any] | None:
    """The daemon's answer; None when no daemon is running."""
    from kgorch.scheduler import daemon_api

    return daemon_api.ask(home, question)
