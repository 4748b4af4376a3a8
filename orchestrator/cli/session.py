"""What start and resume share: a session in the foreground, its line of progress, and how it ends in words."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import USUAL_GC, render
from orchestrator.core.session import Phase
from orchestrator.errors import ExitCode
from orchestrator.wire import boottime_s

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import SessionInfo
    from orchestrator.manifest import Manifest
    from orchestrator.runtime.choosing import Nothing
    from orchestrator.runtime.opening import Opened

EXIT = {
    Phase.FINISHED: ExitCode.DONE,
    Phase.SUSPENDED: ExitCode.SUSPENDED,
    Phase.CUT_OFF: ExitCode.SUSPENDED,
    Phase.FAILED: ExitCode.FAILED,
}
WAITING = (Phase.SUSPENDED, Phase.CUT_OFF)


def run_session(engine: Engine, opened: Opened, *, as_json: bool) -> int:
    from orchestrator.report import view

    gc.set_threshold(*USUAL_GC)  # from here on hours
    line = Progress(opened)
    line.begin()
    _tell_ready()
    ended = opened.supervise(engine, line.show)
    line.end()
    found = view.of_run(engine, _again(engine, opened))
    if as_json:
        render.as_json(found)
    _say_how_it_ended(found, ended.phase)
    return int(ExitCode.QUOTA_SPENT if ended.phase in WAITING and ended.ends_on_quota else EXIT[ended.phase])


def report_nothing(engine: Engine, nothing: Nothing, *, as_json: bool) -> int:
    """The run is live elsewhere, finished, or waits for the quota: say so and do nothing."""
    from orchestrator.report import view

    found = view.of_run(engine, nothing.run)
    if as_json:
        render.as_json(found)
    elif nothing.why == "live":
        pid = found["session"]["supervisor"]["pid"] if found["session"] else "?"
        click.echo(
            f"{nothing.run.name} is live: pid {pid} supervises it, {found['phase']}, step {found['step']}; nothing was started"
        )
        click.echo(f"next: kgorch status {nothing.run.name}")
    elif nothing.why == "quota":
        click.echo(f"{nothing.run.name}: the quota is spent; {_again_at(nothing.due_at)}")
        click.echo("next: kgorch quota")
    elif nothing.why == "stopped":
        click.echo(f"{nothing.run.name} was stopped by a person; nothing was started")
        click.echo(f"next: kgorch resume {nothing.run.name}")
    else:
        click.echo(f"{nothing.run.name} is finished; nothing was started")
        for difference in nothing.changed:
            click.echo(render.printable(f"  the plan has changed since: {difference}"))
        if nothing.changed:
            click.echo("next: kgorch start PLAN --extend goes on from the final checkpoint, --fresh begins a new run")
        else:
            click.echo("next: kgorch start PLAN --fresh begins a new run of this plan")
    return int(ExitCode.QUOTA_SPENT if nothing.why == "quota" else ExitCode.DONE)


def _again_at(due_at: datetime | None) -> str:
    if due_at is None:
        return "no hours come back by themselves (kgorch quota set --used 0h, or a plan with more)"
    local = due_at.astimezone()
    return f"it goes on at {local:%Y-%m-%d %H:%M:%S %Z} ({due_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC)"


class Copying:
    """Tells on stderr what was found in a source; on a terminal, how far the copying is."""

    def __enter__(self) -> Copying:
        self._bar: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        print(render.printable(f"note: {text}"), file=sys.stderr, flush=True)

    def copying(self, done_bytes: int, total_bytes: int) -> None:
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress, TextColumn, TransferSpeedColumn

            columns = [
                TextColumn("copying {task.percentage:.0f}% of " + render.size(total_bytes)),
                TransferSpeedColumn(),
            ]
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total_bytes)
            self._bar.start()
        self._bar.update(self._task, completed=done_bytes)

    def found(self, described: Manifest, folder: Path) -> None:
        size = render.size(described.total_bytes)
        text = f"found step {described.step} of stage {described.stage} in {folder}, {size}, verified"
        print(render.printable(text), file=sys.stderr, flush=True)


class Progress:
    """One line that follows the session on a terminal; a line a change of phase or stage when piped."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._last = ("", "")
        self._tty = sys.stderr.isatty()
        self._status = None
        if self._tty:
            from rich.console import Console

            self._console = Console(stderr=True)
            self._status = self._console.status("")

    def begin(self) -> None:
        row = self._opened.row
        wall = "" if row.wall_at is None else f", wall at {render.clock(row.wall_at.isoformat())}"
        how = "taken over" if self._opened.adopted else "opened"
        self._say(f"{self._opened.run.name}: session {row.number} {how} at step {row.step}{wall}")
        if self._status:
            self._status.start()

    def show(self, row: SessionInfo) -> None:
        if self._status:
            self._status.update(self._text(row))
        now = ("training" if row.phase == "saving" else row.phase, row.stage)  # saves beside training are no news
        if now != self._last and row.stage:
            self._say(f"{row.stage}: {now[0]}" + (f" (step {row.step})" if row.step else ""))
            self._last = now

    def end(self) -> None:
        if self._status:
            self._status.stop()

    def _text(self, row: SessionInfo) -> str:
        from rich.markup import escape

        total = f"/{row.steps_total}" if row.steps_total else ""
        epochs = f"  epoch {row.epoch}/{row.epochs_total}" if row.epochs_total else ""
        left_s = None if row.boot_wall_s is None else row.boot_wall_s - boottime_s()
        left = "" if left_s is None else f"  wall in {render.duration(max(left_s, 0.0))}"
        to_go_s = (row.steps_total - row.step) * row.step_s if row.steps_total else 0.0
        eta = f"  {render.duration(to_go_s)} to go" if to_go_s > 0 else ""
        return escape(
            f"{row.stage} {row.phase}  step {row.step}{total}{epochs}  {render.metrics(dict(row.metrics))}{eta}{left}"
        )

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log on a full disk; the training is not
            if self._status:
                self._console.print(text, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)


def _say_how_it_ended(found: dict[str, object], phase: Phase) -> None:
    name, checkpoint = found["run"], found["checkpoint"]
    at = f"step {checkpoint['step']}, verified" if isinstance(checkpoint, dict) else "no checkpoint yet"
    if phase is Phase.FINISHED:
        outputs, best = Path(str(found["folder"])) / "outputs", " --best" if found["best"] else ""
        text = f"{name} is finished" + (f": {outputs}" if outputs.is_dir() and any(outputs.iterdir()) else "")
        if checkpoint:
            text += f"\nnext: kgorch checkpoints export {name} model.safetensors{best}"
    elif phase is Phase.FAILED:
        text = f"error: {name} failed and will not be retried\n  {found['why']}\n  newest checkpoint: {at}"
        text += f"\nnext: kgorch logs {name}; then kgorch resume {name}"
    else:
        how = "saved" if phase is Phase.SUSPENDED else "cut off before its last save"
        text = f"{name}: session {phase.value} by {found['why']}; {how}: {at}\nnext: kgorch resume {name}"
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _again(engine: Engine, opened: Opened):  # type: ignore[no-untyped-def]
    from db import runs

    return runs.by_id(engine, opened.run.id) or opened.run


def _tell_ready() -> None:
    """Tell the `start --detach` that waits for us that a session is open."""
    if descriptor := os.environ.pop("KGORCH_READY_FD", None):
        os.write(int(descriptor), b"ready")
        os.close(int(descriptor))
