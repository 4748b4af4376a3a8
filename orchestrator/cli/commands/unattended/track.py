"""kgorch track"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import run_argument

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RunInfo


@click.command("track")
@run_argument
@click.option(
    "--to",
    "names",
    multiple=True,
    type=click.Choice(("tensorboard", "wandb", "mlflow")),
    help="Send to this tracker; may be repeated. Default: those of the run's plan.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its fields are stable (docs/json.md).")
def command(run: str | None, names: tuple[str, ...], as_json: bool) -> int:
    """Send the metrics of RUN to its experiment trackers now: what sessions without a network could not send.

    Also of a run that is over, and of one that had no trackers. Exits with 2 unless all got everything.

    \b
    Example:
      kgorch track surface-demo --to tensorboard
    """
    from kgorch.admission import resolve_run
    from kgorch.errors import ExitCode, PlanError
    from kgorch.services import trackers

    _, _, engine = open_state()
    info = find_run(engine, run)
    section = resolve_run.load_stored_plan(info).track
    if names:
        section = section.model_copy(update={"to": list(names)})
    if not section.to:
        raise PlanError(
            f"the plan of {info.name} names no trackers",
            next_step=f"kgorch track {info.name} --to tensorboard; or give its plan a [track] section (kgorch explain track)",
        )
    trackers.check(section)
    results = trackers.send_now(info, section)
    _note_sent(engine, info, {item.name for item in results if item.why is None})
    if as_json:
        render.as_json(
            [{"tracker": item.name, "sent": item.sent, "url": item.url or None, "why": item.why} for item in results]
        )
    else:
        for item in results:
            steps = ", ".join(f"{stage} {step}" for stage, step in item.sent.items()) or "nothing yet"
            render.echo(f"{item.name}: {item.why or f'up to {steps}'}" + (f"  {item.url}" if item.url else ""))
    return int(ExitCode.MISTAKE if any(item.why for item in results) else ExitCode.DONE)


def _note_sent(engine: Engine, run: RunInfo, names: set[str]) -> None:
    """Trackers that the newest session could not send, and that have everything now, are no longer failing."""
    from kgorch.core.codes import EventKind
    from kgorch.db import sessions

    session = sessions.newest_of_runs(engine, [run.id]).get(run.id)
    kinds = (EventKind.TRACKED, EventKind.TRACKING_FAILED)
    event = session and sessions.newest_event(engine, run.id, kinds, session_id=session.id)
    failing = event.facts.get("failing", {}) if event else {}
    left = {name: why for name, why in failing.items() if name not in names}
    if session and event and left != failing:
        kind = EventKind.TRACKING_FAILED if left else EventKind.TRACKED
        sessions.add_event(engine, run.id, kind, {**event.facts, "failing": left}, session.id)
