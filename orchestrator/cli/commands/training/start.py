"""kgorch start"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from kgorch.cli.display.import_progress import ImportProgress
from kgorch.cli.display.progress import progress_option
from kgorch.cli.foreground import report_nothing, run_session
from kgorch.cli.lookup import load_plan, open_state
from kgorch.cli.options import json_option, plan_argument, set_option, until_option


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The words of `kgorch start`; click's names of the options below are the fields.

    Attributes:
        overrides: `KEY=VALUE` of each --set.
        required: --continue.
        new_id: --new-id, which the session of a remote run gives: its driver has chosen the id.
        queued: --queue.
        until: an instant in UTC.
    """

    plan: Path
    overrides: tuple[str, ...]
    fresh: bool
    extend: bool
    required: bool
    run_id: str | None
    new_id: str | None
    accept_changes: bool
    accept_plan: bool
    detach: bool
    queued: bool
    until: datetime | None
    progress: str
    as_json: bool

    def check(self) -> None:
        """Raises: click.UsageError: options that contradict each other."""
        if self.fresh and self.extend:
            raise click.UsageError("--fresh starts a new run, --extend continues a finished one: give one of them")
        if self.fresh and self.run_id:
            raise click.UsageError("--fresh starts a new run, --run continues one: give one of them")
        if self.fresh and self.required:
            raise click.UsageError("--fresh starts a new run, --continue never does: give one of them")
        if self.queued and (self.until or self.detach):
            raise click.UsageError("--queue starts no session: leave out --until and --detach, which are about one")

    def detached_words(self) -> list[str]:
        """The words of the same start in the background. The plan is absolute, and --until a date, which stays the same."""
        flags = {
            "--fresh": self.fresh,
            "--extend": self.extend,
            "--continue": self.required,
            "--accept-changes": self.accept_changes,
            "--accept-plan": self.accept_plan,
        }
        return [
            str(self.plan.absolute()),
            *(flag for flag, is_set in flags.items() if is_set),
            *(["--run", self.run_id] if self.run_id else []),
            *(["--new-id", self.new_id] if self.new_id else []),
            *(["--until", self.until.isoformat()] if self.until else []),
            *(word for override in self.overrides for word in ("--set", override)),
        ]


def checked_new_id(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Raises: click.BadParameter for what is none of our ids: it becomes a key of the database and a part of paths."""
    if value is not None and not re.fullmatch(r"[0-9a-f]{12}", value):
        raise click.BadParameter("expected 12 hexadecimal digits")
    return value


@click.command("start")
@plan_argument
@set_option
@click.option("--fresh", is_flag=True, help="Start a new run, even if one of this name is not finished.")
@click.option("--extend", is_flag=True, help="Continue a finished run whose plan now trains longer.")
@click.option("--continue", "required", is_flag=True, help="Only continue: an error if no state of the run is found.")
@click.option("--run", "run_id", metavar="RUN_ID", help="Which run, if the sources hold several of this name.")
@click.option("--new-id", metavar="RUN_ID", hidden=True, callback=checked_new_id, help="The id of a run that begins.")
@click.option("--accept-changes", is_flag=True, help="Continue also by a plan whose changes would be refused.")
@click.option(
    "--accept-plan",
    is_flag=True,
    help="Trust the settings of a run that is found in a source: they decide what code runs.",
)
@click.option("--detach", is_flag=True, help="Supervise in the background; return once the session is open.")
@click.option("--queue", "queued", is_flag=True, help="Start no session: put the run into the daemon's queue.")
@until_option
@progress_option
@json_option
def command(**values: Any) -> int:
    """Start the run of PLAN (default: plan.toml). If it was saved before, here or in the plan's sources, continue it.

    Trains until the run is finished or the session's time limit is near; then saves, verifies the checkpoint and queues a
    resume. Adopts a training that still runs without a supervisor. Ctrl-C saves and stops. Values of --set are stored with
    the run.

    Exit codes: 0 finished, 10 session over and a resume queued, 11 the same because the quota is exhausted, 12 the database
    cannot be used now, 20 failed, 2 a mistake in the plan or the options.

    \b
    Example:
      kgorch start --set session.wall=30m --set stage.train.args.epochs=3
    """
    options = StartOptions(**values)
    options.check()
    if not (options.queued or options.detach):
        from kgorch.launch import standby
        from kgorch.system import process_protection

        # before the state folder is opened: its files must be readable by their owner alone (umask)
        process_protection.protect()
        standby.prepare()  # its import of PyTorch runs beside ours
    from kgorch.admission import resolve_run, session_start
    from kgorch.admission.requests import Consent, LocalState, StartRequest

    # the text goes on beside the plan: the run stores it as it was written, comments included
    plan, text = load_plan(options.plan, options.overrides)
    consent = Consent(changes=options.accept_changes, plan=options.accept_plan, extend=options.extend)
    request = StartRequest(
        text, options.plan, options.overrides, options.fresh, options.run_id, consent, options.required, options.new_id
    )
    if options.queued:
        from kgorch.cli.commands.unattended.queue import add_plan

        return add_plan(request, as_json=options.as_json)
    if options.detach:
        from kgorch.cli import detached

        # the plan was loaded here, so a mistake in it is reported at once and not in the log of the child
        return detached.start(options.detached_words(), plan.name, as_json=options.as_json)
    standby.prepare(plan.launchers)
    profile, home, engine = open_state()
    with ImportProgress() as watcher:
        result = session_start.start(LocalState(engine, home, profile), request, watcher=watcher, until=options.until)
    if isinstance(result, resolve_run.NoSession):
        return report_nothing(engine, result, as_json=options.as_json)
    return run_session(engine, result, as_json=options.as_json, progress=options.progress)
