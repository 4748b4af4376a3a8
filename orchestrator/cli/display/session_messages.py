"""What a session in the foreground prints: its progress, each phase, and each failure with its place and its traceback."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kgorch.cli.display import render
from kgorch.cli.display.progress import Figures, Printer, figures_of
from kgorch.core.codes import REASON_TEXT, EventKind, Phase, Reason
from kgorch.core.session import events
from kgorch.errors import KgorchError
from kgorch.system import signals
from kgorch.system.clock import boottime_s

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.admission.open_session import ReadySession
    from kgorch.db.rows import SessionInfo

REPEAT_S = 60.0
"""A save that fails again for the same reason is reported after this time, with a count: a full disk fails every few seconds."""

MAX_WARNINGS = 20
"""Different warnings that a session prints; `kgorch history --events` has all of them."""


class SessionMessages:
    """Observes a supervisor and prints on stderr.

    Args:
        mode: `live`, `plain` or `none` (display/progress.py).
    """

    def __init__(self, engine: Engine, ready: ReadySession, mode: str) -> None:
        self._engine, self._ready = engine, ready
        self._row: SessionInfo | None = None
        self._phase = ("", "")  # phase and stage that were printed last
        self._state_bytes = 0
        self._failures: dict[str, int] = {}  # cause → how often it was reported
        self._warned: set[str] = set()
        self._failed_saves: dict[str, tuple[float, int]] = {}  # cause → when it was reported, repetitions since then
        self._printer = Printer(mode, self._figures, self._telemetry)

    def __enter__(self) -> SessionMessages:
        self._printer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._printer.__exit__(*error)

    def begin(self) -> None:
        row = self._ready.row
        wall = "" if row.wall_at is None else f", wall at {render.clock(row.wall_at.isoformat())}"
        how = "adopted" if self._ready.adopted else "opened"
        self._say(f"session {row.number} {how} at step {row.step}{wall}")

    def show(self, row: SessionInfo) -> None:
        """The session's row, whenever the supervisor has changed it."""
        self._row = row
        # a periodic save runs beside training, so it is no change of phase to a person
        phase = (Phase.TRAINING if row.phase == Phase.SAVING else row.phase, row.stage)
        if phase != self._phase and row.stage:
            self._printer.say(f"{row.stage}: {phase[0]}" + (f" (step {row.step})" if row.step else ""))
            self._phase = phase

    def hear(self, event: events.Event | events.JournalNote) -> None:
        """An event of the supervisor, called in its thread."""
        match event:
            case events.JournalNote(EventKind.NOT_ATTACHED | EventKind.NEVER_ATTACHED, {"what": what}):
                self._warn(f"{what}; see docs/your-training.md")
            case events.JournalNote(EventKind.EXACTNESS, facts):
                for what in (facts[topic] for topic in ("untracked", "training") if topic in facts):
                    self._warn(str(what))
            case events.Attached(state_bytes):
                self._state_bytes = state_bytes or self._state_bytes
            case events.SaveFailed(why):
                self._report_failed_save(why)
            case events.StopRequested(Reason.USER, None) if signals.interrupt_count():
                self._say("saving; Ctrl-C again to stop at once")
            case events.StopRequested(Reason.USER, None):
                self._say("kgorch stop: saving")  # from another terminal: a hint about Ctrl-C would help nobody here
            case events.StopRequested(Reason.USER):
                self._say("stopping at once")
            case events.StopRequested(reason):
                self._say(f"{REASON_TEXT[reason]}: saving")
            case (
                events.AttemptCrashed(cause)
                | events.OutOfMemory(cause)
                | events.AttemptDiverged(cause)
                | events.Diagnosed(cause)
            ):
                self._report_failure(cause)

    def _say(self, text: str) -> None:
        self._printer.say(f"{self._ready.run.name}: {text}")

    def _warn(self, text: str) -> None:
        """Once for each text, as an attempt that is launched again says the same; MAX_WARNINGS at most, for ranks write some."""
        if text not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(text)
            self._printer.say(f"warning: {text}")

    def _report_failure(self, cause: str) -> None:
        """The first time with its place and the end of its traceback; a repetition in one line."""
        stage, step = (self._row.stage, self._row.step) if self._row else ("", 0)
        times = self._failures[cause] = self._failures.get(cause, 0) + 1
        if times > 1:
            self._printer.say(f"{stage}: failed again at step {step}, for the {_ordinal(times)} time: {cause}")
            return

        def text() -> str:  # reads the database and the rank's record, so it runs in the printer's thread
            where, lines = self._location()
            head = f"{stage}: failed at step {step}: {cause}" + (f" ({where})" if where else "")
            return "\n".join([head, *(f"  {line}" for line in lines)])

        self._printer.say(text)

    def _location(self) -> tuple[str | None, list[str]]:
        """File and line where the newest attempt failed, and its traceback, from the records of its ranks."""
        from kgorch.db import sessions
        from kgorch.report import failure

        try:
            # Not by their outcome: that is written behind the supervisor's loop, perhaps after this.
            launched = sessions.attempts_of_sessions(self._engine, [self._ready.row.id])
            causes = (failure.of_attempt(item) for item in reversed(launched))
            return next((cause for cause in causes if cause != (None, [])), (None, []))
        except Exception:  # the database or the disk cannot be read now; the cause is printed without them
            return None, []

    def _report_failed_save(self, why: str) -> None:
        now_s = time.monotonic()
        reported_s, repeated = self._failed_saves.get(why, (now_s - REPEAT_S, 0))
        if now_s < reported_s + REPEAT_S:
            self._failed_saves[why] = (reported_s, repeated + 1)
            return
        self._failed_saves[why] = (now_s, 0)
        self._printer.say(_failed_save(why, repeated, Path(self._ready.run.checkpoints), self._state_bytes))

    def _figures(self) -> Figures | None:
        return figures_of(self._row, boottime_s()) if self._row else None

    def _telemetry(self) -> Mapping[str, float]:
        """The newest sample of the session; empty where the database cannot be read now."""
        from kgorch.db import samples

        try:
            sample = samples.newest(self._engine, self._ready.row.id)
        except Exception:  # the display goes on without it
            return {}
        return sample.values if sample else {}


def _failed_save(why: str, repeated: int, folder: Path, state_bytes: int) -> Callable[[], str]:
    """The message, computed in the printer's thread: a network disk may take long to say how much is free."""

    def text() -> str:
        from kgorch.report import save_advice

        again = f" ({repeated + 1} times since the last report)" if repeated else ""
        advice = save_advice.advice(folder, state_bytes)
        return KgorchError(f"a save failed{again}: {why}", next_step=advice, error_code="KG306").render()

    return text


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
