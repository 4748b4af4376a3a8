"""State that another session left, as a test makes it: checkpoints, rows, outputs; and a place where a run of it would go on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import xxhash

from kgorch.admission import session_start
from kgorch.admission.open_session import ReadySession
from kgorch.admission.requests import Consent, LocalState, StartRequest
from kgorch.checkpoint.folder import write_manifest
from kgorch.checkpoint.manifest import FileEntry, Manifest, Position, checkpoint_folder_name
from kgorch.db import checkpoints, runs, sessions
from kgorch.db.engine import open_database
from kgorch.platforms.profile import Profile
from kgorch.report import run_view

TRUSTED = Consent(plan=True)

PLAN = """
name = "ink"
[[stage]]
name = "train"
entry = "t.py"
[[stage]]
name = "predict"
entry = "t.py"
[resume]
sources = ["../source/**"]
"""


LADDER = """
[memory]
ladder = [{ set = { crop = 64 } }, { set = { hidden = 96 }, begins_anew = true }]
"""


@dataclass
class Told:
    """A watcher that remembers what it was told."""

    notes: list[str] = field(default_factory=list)
    copied: list[Path] = field(default_factory=list)
    bytes: int = 0

    def note(self, text):
        self.notes.append(text)

    def copy_progress(self, done_bytes, total_bytes):
        self.bytes = done_bytes

    def checkpoint_copied(self, manifest, folder):
        self.copied.append(folder)


@dataclass
class Place:
    """A plan's folder, a state folder, and what `kgorch start` there does until it would train."""

    work: Path
    home: Path

    def start(self, text=PLAN, overrides=(), *, until=None, **options):
        """The run that would train now, and what the person was told. `options`: of the request."""
        told, engine = Told(), open_database(self.home)
        try:
            state = LocalState(engine, self.home, Profile("test"))
            request = StartRequest(text, self.work / "plan.toml", list(overrides), **options)
            opened = session_start.start(state, request, watcher=told, until=until)
            if isinstance(opened, ReadySession):
                opened.lock.release()
            return opened, told
        finally:
            engine.dispose()

    def look(self, name="ink"):
        engine = open_database(self.home)
        try:
            run = runs.newest(engine, name)
            return run and (
                run_view.of_run(engine, run),
                run_view.history(engine, run),
                sessions.events(engine, run.id, limit=99),
            )
        finally:
            engine.dispose()


def checkpoint(
    root, step, *, stage="train", final=False, run_id="r1", content=b"weights", run="ink", minute=0, changes=()
):
    """A whole checkpoint under `root`, as a save leaves it."""
    folder = root / stage / checkpoint_folder_name(step, final=final)
    folder.mkdir(parents=True)
    body = content * step
    (folder / "rank0.safetensors").write_bytes(body)
    files = {"rank0.safetensors": FileEntry(len(body), xxhash.xxh3_128(body).hexdigest())}
    at = (datetime(2026, 11, 20, 12, tzinfo=UTC) + timedelta(minutes=minute)).isoformat()
    described = Manifest(run, run_id, stage, Position(step=step), 1, at, final, "h", files=files, changes=changes)
    write_manifest(folder, replace(described, metrics={"loss": float("nan")}))
    return folder


def session_of(engine, run, **columns):
    row = sessions.open_session(
        engine, run.id, boot_id="elsewhere", stage="train", heartbeat_at=datetime.now(UTC), **columns
    )
    sessions.open_attempt(
        engine, row.id, stage="train", ranks=1, first_step=0, folder_of=lambda number: f"/elsewhere/{number}"
    )
    return row


def state(home, steps=(10, 20), *, run_id="r1", number=1, over=True, **changes):
    """A state folder with one run: its rows, a session, its checkpoints and outputs."""
    engine = open_database(home)
    folder = home / "runs" / "ink" / str(number)
    (folder / "outputs").mkdir(parents=True)
    (folder / "outputs" / "submission.csv").write_text("ink")
    columns = {"id": run_id, "name": "ink", "number": number, "plan": PLAN, "overrides": [], "plan_hash": "h"}
    places = {"folder": "/elsewhere", "workdir": "/elsewhere", "checkpoints": "/elsewhere/checkpoints"}
    run = runs.create(engine, **columns | places | changes, stages=["train", "predict"])
    row = session_of(engine, run)
    sessions.record_heartbeat(engine, row.id, sessions.last_attempt(engine, row.id).id, step=max(steps, default=0))
    if over:
        sessions.record(engine, run_id, row.id, kind="attempt_suspended", phase="suspended", facts={}, why="the wall")
    for step in steps:
        made = checkpoint(folder / "checkpoints", step, run_id=run_id)
        described = {"stage": "train", "step": step, "final": False, "bytes": 7 * step, "save_duration_s": 2.5}
        path = f"/elsewhere/{made.name}"
        checkpoints.record(engine, run_id, path, state="verified", session_id=row.id, **described)
    engine.dispose()
    return folder
