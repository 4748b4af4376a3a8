"""A session that is supervised from this terminal: `start` and `resume` end here, with a message and an exit code."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgorch.cli import USUAL_GC
from kgorch.cli.display import render
from kgorch.cli.display.progress import mode_of
from kgorch.cli.display.session_messages import SessionMessages
from kgorch.core.codes import NotStarted, Phase
from kgorch.errors import ExitCode, KgorchError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.admission.open_session import ReadySession
    from kgorch.admission.resolve_run import NoSession

EXIT_CODES = {
    Phase.FINISHED: ExitCode.DONE,
    Phase.SUSPENDED: ExitCode.SUSPENDED,
    Phase.CUT_OFF: ExitCode.SUSPENDED,
    Phase.FAILED: ExitCode.FAILED,
}
_NOTHING_CODES = {NotStarted.QUOTA: ExitCode.QUOTA_SPENT, NotStarted.FAILED: ExitCode.FAILED}


def run_session(engine: Engine, ready: ReadySession, *, as_json: bool, progress: str = "auto") -> int:
    """Supervise a session until it is over, print how it ended, and return the exit code."""
    from sqlalchemy.exc import SQLAlchemyError

    from kgorch.db import runs
    from kgorch.report import run_view

    gc.set_threshold(*USUAL_GC)  # the thresholds of the imports would let garbage pile up for hours
    with SessionMessages(engine, ready, mode_of(progress, sys.stderr)) as messages:
        messages.begin()
        _signal_ready()
        session = ready.supervise(engine, messages.show, messages.hear)
    try:
        view = run_view.of_run(engine, runs.by_id(engine, ready.run.id) or ready.run)
        if as_json:
            render.as_json(view)
        _print_end(view, session.phase)
    except SQLAlchemyError as error:  # no reason to call the session anything else than what it was
        what = f"{ready.run.name}: session {render.words(session.phase)}; the database cannot be read now"
        render.echo(f"{what}: {getattr(error, 'orig', None) or error}", err=True)
    is_quota = session.phase in (Phase.SUSPENDED, Phase.CUT_OFF) and session.ends_on_quota
    return int(ExitCode.QUOTA_SPENT if is_quota else EXIT_CODES[session.phase])


def report_nothing(engine: Engine, nothing: NoSession, *, as_json: bool) -> int:
    """Print why no session was started, and return the exit code."""
    from kgorch.report import run_view

    view = run_view.of_run(engine, nothing.run)
    name = nothing.run.name
    if as_json:
        render.as_json(view)
    elif nothing.why is NotStarted.LIVE:
        pid = view["session"]["supervisor"]["pid"] if view["session"] else "?"
        render.echo(
            f"{name} is live: pid {pid} supervises it, {render.words(view['phase'])}, step {view['step']}; nothing was started"
        )
        render.echo(f"next: kgorch status {name}")
    elif nothing.why is NotStarted.QUOTA:
        render.echo(f"{name}: the quota is exhausted; {_renewal(nothing.due_at)}")
        render.echo("next: kgorch quota")
    elif nothing.why is NotStarted.STOPPED:
        render.echo(f"{name} was stopped by the user; nothing was started")
        render.echo(f"next: kgorch resume {name}")
    elif nothing.why is NotStarted.FAILED:
        render.echo(f"{name} has failed; nothing was started")
        render.echo(f"next: kgorch logs {name}; then kgorch resume {name}")
    else:
        render.echo(f"{name} is finished; nothing was started")
        for difference in nothing.plan_differences:
            render.echo(f"  the plan has changed since: {difference}")
        if nothing.plan_differences:
            render.echo(
                "next: kgorch start PLAN --extend    (continues from the final checkpoint; --fresh starts a new run)"
            )
        else:
            render.echo("next: kgorch start PLAN --fresh    (starts a new run of this plan)")
    return int(_NOTHING_CODES.get(nothing.why, ExitCode.DONE))


def _renewal(due_at: datetime | None) -> str:
    """When the run continues, in local time and in UTC: the quota of a platform is renewed by its clock, not by this one."""
    if due_at is None:
        return "it is never renewed (kgorch quota set --used 0h corrects it; or give the plan more hours)"
    local = due_at.astimezone()
    return f"the run continues at {local:%Y-%m-%d %H:%M:%S %Z} ({due_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC)"


def _print_end(view: dict[str, Any], phase: Phase) -> None:
    name, checkpoint = view["run"], view["checkpoint"]
    position = f"step {checkpoint['step']}, verified" if isinstance(checkpoint, dict) else "no checkpoint yet"
    if phase is Phase.FINISHED:
        outputs, best = Path(str(view["folder"])) / "outputs", " --best" if view["best"] else ""
        text = f"{name} is finished" + (f": {outputs}" if outputs.is_dir() and any(outputs.iterdir()) else "")
        if checkpoint:
            from kgorch.checkpoint.export import name_of_export  # no part of a supervisor

            out = shlex.quote(name_of_export(Path(checkpoint["path"])))
            text += f"\nnext: kgorch checkpoints export {name} {out}{best}"
    elif phase is Phase.FAILED:
        text = _failure(view, position).render()
    else:
        how = "saved" if phase is Phase.SUSPENDED else "the newest checkpoint"
        text = f"{name}: session {render.words(phase)}: {view['why']}; {how}: {position}\nnext: {_next_step(name, view['next'])}"
    for topic in ("untracked", "training"):
        if phase is not Phase.FAILED and (lost := (view.get("exactness") or {}).get(topic)):
            text = f"warning: {lost}\n{text}"
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk; the exit code still tells how it ended
        render.echo(text, err=True)


def _failure(view: dict[str, Any], position: str) -> KgorchError:
    """With the traceback, which a notebook would need another cell to show."""
    from kgorch.report.failure import next_step  # loads what judges attempts

    name, failure = view["run"], view["failure"] or {"where": None, "traceback": [], "code": None}
    where = f" ({failure['where']})" if failure["where"] else ""
    return KgorchError(
        f"{name} failed and will not be retried",
        f"{view['why']}{where}",
        *(f"  {line}" for line in failure["traceback"]),
        f"newest checkpoint: {position}",
        next_step=next_step(view, first=f"kgorch logs {name};"),
        error_code=failure["code"] or "KG401",
    )


def _next_step(name: str, following: dict[str, Any]) -> str:
    """What to type for the next session."""
    from kgorch.platforms.detect import next_session

    # on such a platform the machine is deleted with the session: its state comes back as an input of the next one
    if what := next_session(name):
        return f"{what}. Then: kgorch start PLAN"
    return f"kgorch resume {name}{_queued(following)}"


def _queued(following: dict[str, Any]) -> str:
    """Who starts the queued session: a daemon, or nobody."""
    if not following["at"]:
        return ""
    if following["daemon_alive"]:
        return f"    (or leave it to the daemon: due {render.clock(following['at'])})"
    return "    (a resume is queued, but no daemon is running that would start it)"


def _signal_ready() -> None:
    """Tell the `kgorch start --detach` that started this process that a session is open."""
    from kgorch.admission.background_start import READY_FD

    if descriptor := os.environ.pop(READY_FD, None):
        os.write(int(descriptor), b"ready")
        os.close(int(descriptor))
