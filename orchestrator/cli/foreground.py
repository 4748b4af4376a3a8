"""What start and resume share: a session in the foreground, its line of progress, and how it ends in words."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli import USUAL_GC, render
from orchestrator.cli.progress import Figures, Printer, figures_of, mode_of
from orchestrator.core import lifecycle as core
from orchestrator.core.codes import REASON_TEXT, NotStarted, Phase, Reason
from orchestrator.errors import ExitCode
from orchestrator.system.clock import boottime_s

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import SessionInfo
    from orchestrator.admission.open_session import Opened
    from orchestrator.admission.resolve_run import Nothing
    from orchestrator.checkpoint.manifest import Manifest

EXIT = {
    Phase.FINISHED: ExitCode.DONE,
    Phase.SUSPENDED: ExitCode.SUSPENDED,
    Phase.CUT_OFF: ExitCode.SUSPENDED,
    Phase.FAILED: ExitCode.FAILED,
}
WAITING = (Phase.SUSPENDED, Phase.CUT_OFF)

AGAIN_S = 60.0
"""A save that fails for the same reason is told again after so long, with how often it was: some fail every few seconds."""


def run_session(engine: Engine, opened: Opened, *, as_json: bool, progress: str = "auto") -> int:
    from orchestrator.report import run_view

    gc.set_threshold(*USUAL_GC)  # from here on hours
    with Progress(engine, opened, mode_of(progress, sys.stderr)) as shown:
        shown.begin()
        _tell_ready()
        ended = opened.supervise(engine, shown.show, shown.hear)
    found = run_view.of_run(engine, _again(engine, opened))
    if as_json:
        render.as_json(found)
    _say_how_it_ended(found, ended.phase)
    return int(ExitCode.QUOTA_SPENT if ended.phase in WAITING and ended.ends_on_quota else EXIT[ended.phase])


def report_nothing(engine: Engine, nothing: Nothing, *, as_json: bool) -> int:
    """The run is live elsewhere, finished, or waits for the quota: say so and do nothing."""
    from orchestrator.report import run_view

    found = run_view.of_run(engine, nothing.run)
    if as_json:
        render.as_json(found)
    elif nothing.why is NotStarted.LIVE:
        pid = found["session"]["supervisor"]["pid"] if found["session"] else "?"
        render.echo(
            f"{nothing.run.name} is live: pid {pid} supervises it, {render.words(found['phase'])}, step {found['step']};"
            " nothing was started"
        )
        render.echo(f"next: kgorch status {nothing.run.name}")
    elif nothing.why is NotStarted.QUOTA:
        render.echo(f"{nothing.run.name}: the quota is spent; {_again_at(nothing.due_at)}")
        render.echo("next: kgorch quota")
    elif nothing.why is NotStarted.STOPPED:
        render.echo(f"{nothing.run.name} was stopped by a person; nothing was started")
        render.echo(f"next: kgorch resume {nothing.run.name}")
    else:
        render.echo(f"{nothing.run.name} is finished; nothing was started")
        for difference in nothing.changed:
            render.echo(f"  the plan has changed since: {difference}")
        if nothing.changed:
            render.echo("next: kgorch start PLAN --extend goes on from the final checkpoint, --fresh begins a new run")
        else:
            render.echo("next: kgorch start PLAN --fresh begins a new run of this plan")
    return int(ExitCode.QUOTA_SPENT if nothing.why is NotStarted.QUOTA else ExitCode.DONE)


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
        render.echo(f"note: {text}", err=True)

    def copying(self, done_bytes: int, total_bytes: int) -> None:
        if mode_of("auto", sys.stderr) != "live":
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
        render.echo(f"found step {described.step} of stage {described.stage} in {folder}, {size}, verified", err=True)


class Progress:
    """What a session says of itself while it runs: how far it is, each phase, and what went wrong with where and what to do."""

    def __init__(self, engine: Engine, opened: Opened, mode: str) -> None:
        self._engine, self._opened = engine, opened
        self._row: SessionInfo | None = None
        self._last = ("", "")
        self._state_bytes = 0
        self._causes: dict[str, int] = {}  # how often each was told
        self._failed_saves: dict[str, tuple[float, int]] = {}  # when each was told, and how often it came since
        self._printer = Printer(mode, self._figures)

    def __enter__(self) -> Progress:
        self._printer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._printer.__exit__(*error)

    def begin(self) -> None:
        row = self._opened.row
        wall = "" if row.wall_at is None else f", wall at {render.clock(row.wall_at.isoformat())}"
        how = "taken over" if self._opened.adopted else "opened"
        self._printer.say(f"{self._opened.run.name}: session {row.number} {how} at step {row.step}{wall}")

    def show(self, row: SessionInfo) -> None:
        self._row = row
        now = (
            Phase.TRAINING if row.phase == Phase.SAVING else row.phase,
            row.stage,
        )  # saves beside training are no news
        if now != self._last and row.stage:
            self._printer.say(f"{row.stage}: {now[0]}" + (f" (step {row.step})" if row.step else ""))
            self._last = now

    def hear(self, event: core.Event) -> None:
        """An event of the supervisor's, in its thread."""
        match event:
            case core.Attached(state_bytes):
                self._state_bytes = state_bytes or self._state_bytes
            case core.SaveFailed(why):
                self._say_what_failed_to_save(why)
            case core.StopRequested(Reason.USER, None):
                self._printer.say(f"{self._opened.run.name}: saving; Ctrl-C again to stop at once")
            case core.StopRequested(Reason.USER):
                self._printer.say(f"{self._opened.run.name}: stopping at once")
            case core.StopRequested(reason):
                self._printer.say(f"{self._opened.run.name}: {REASON_TEXT[reason]}: saving")
            case core.AttemptCrashed(cause) | core.OutOfMemory(cause) | core.Unwell(cause) | core.Diagnosed(cause):
                self._say_what_failed(cause)

    def _say_what_failed(self, cause: str) -> None:
        """With its place and the end of its traceback the first time; then that it came again."""
        stage, step = (self._row.stage, self._row.step) if self._row else ("", 0)
        times = self._causes[cause] = self._causes.get(cause, 0) + 1
        if times > 1:
            self._printer.say(f"{stage}: failed again at step {step}, for the {_nth(times)} time: {cause}")
            return

        def told() -> str:
            where, lines = self._cause()
            head = f"{stage}: failed at step {step}: {cause}" + (f" ({where})" if where else "")
            return "\n".join([head, *(f"  {line}" for line in lines)])

        self._printer.say(told)

    def _cause(self) -> tuple[str | None, list[str]]:
        """Where the newest attempt that is over has failed, as its ranks wrote it down."""
        from db import sessions
        from orchestrator.report import failure

        try:
            over = [item for item in sessions.attempts_of(self._engine, [self._opened.row.id]) if item.outcome]
            return failure.of_attempt(over[-1]) if over else (None, [])
        except Exception:  # the database or the disk cannot be read now; the cause is told all the same
            return None, []

    def _say_what_failed_to_save(self, why: str) -> None:
        now_s = time.monotonic()
        told_s, since = self._failed_saves.get(why, (now_s - AGAIN_S, 0))
        if now_s < told_s + AGAIN_S:
            self._failed_saves[why] = (told_s, since + 1)
            return
        self._failed_saves[why] = (now_s, 0)
        folder, state_bytes = Path(self._opened.run.checkpoints), self._state_bytes

        def told() -> str:
            from orchestrator.report import save_advice

            again = f" ({since + 1} times since it was told last)" if since else ""
            todo = save_advice.advice(folder, state_bytes)
            return f"error: a save failed{again}: {why}" + (f"\nnext: {todo}" if todo else "")

        self._printer.say(told)

    def _figures(self) -> Figures | None:
        return figures_of(self._row, boottime_s()) if self._row else None


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _say_how_it_ended(found: dict[str, Any], phase: Phase) -> None:
    name, checkpoint = found["run"], found["checkpoint"]
    at = f"step {checkpoint['step']}, verified" if isinstance(checkpoint, dict) else "no checkpoint yet"
    if phase is Phase.FINISHED:
        outputs, best = Path(str(found["folder"])) / "outputs", " --best" if found["best"] else ""
        text = f"{name} is finished" + (f": {outputs}" if outputs.is_dir() and any(outputs.iterdir()) else "")
        if checkpoint:
            text += f"\nnext: kgorch checkpoints export {name} model.safetensors{best}"
    elif phase is Phase.FAILED:
        text = "\n".join(_failure_lines(found, at))
    else:
        how = "saved" if phase is Phase.SUSPENDED else "cut off before its last save"
        text = f"{name}: session {render.words(phase)}: {found['why']}; {how}: {at}\nnext: {_next_session(name, found['next'])}"
    with contextlib.suppress(OSError):  # a log on a full disk; the training is not
        render.echo(text, err=True)


def _failure_lines(found: dict[str, Any], at: str) -> list[str]:
    """What failed, where, and the end of the traceback: a notebook would need another cell for it."""
    name, failure = found["run"], found["failure"] or {"where": None, "traceback": []}
    where = f" ({failure['where']})" if failure["where"] else ""
    return [
        f"error: {name} failed and will not be retried",
        f"  {found['why']}{where}",
        *(f"    {line}" for line in failure["traceback"]),
        f"  newest checkpoint: {at}",
        f"next: kgorch logs {name}; then kgorch resume {name}",
    ]


def _next_session(name: str, following: dict[str, Any]) -> str:
    """What to do for it. Where a session's machine goes with it, its state comes back as an input of the next one."""
    from orchestrator.platforms.detect import detect

    if sources := detect().sources:
        return f"attach this session's output to the next one (it is looked for in {', '.join(sources)}), then: kgorch start PLAN"
    return f"kgorch resume {name}{_who_goes_on(following)}"


def _who_goes_on(following: dict[str, Any]) -> str:
    """A resume that is queued is carried out by a daemon, and by nobody else."""
    if not following["at"]:
        return ""
    if following["daemon_alive"]:
        return f"    (or leave it to the daemon: due {render.clock(following['at'])})"
    return "    (a resume is queued, and no daemon lives that would begin it)"


def _again(engine: Engine, opened: Opened):  # type: ignore[no-untyped-def]
    from db import runs

    return runs.by_id(engine, opened.run.id) or opened.run


def _tell_ready() -> None:
    """Tell the `start --detach` that waits for us that a session is open."""
    if descriptor := os.environ.pop("KGORCH_READY_FD", None):
        os.write(int(descriptor), b"ready")
        os.close(int(descriptor))
