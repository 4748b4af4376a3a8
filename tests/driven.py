"""A run that the driver carries through local sessions, whose script is a stand-in that trains nothing: it writes a record.

Everything else is real: the driver, its rows, the local place and its processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kgorch.core.codes import REMOTE_OPEN
from kgorch.core.remote.place_profiles import PLACES
from kgorch.core.remote.place_values import SessionOrder
from kgorch.core.remote.session_plan import next_session
from kgorch.core.remote.session_states import Moment
from kgorch.db import remote, runs
from kgorch.db.engine import open_database
from kgorch.db.rows import RemoteSessionInfo, RunInfo
from kgorch.remote.bundle import Bundle
from kgorch.remote.driver import Driver, Tools, exclusive, new_columns
from kgorch.remote.places.local.place import LocalPlace
from kgorch.remote.run_settings import RunSettings

SCRIPT = """
import json, os, sys, time
order, diary, outcomes = json.loads({order!r}), {diary!r}, json.loads({outcomes!r})
def note(what):
    with open(diary, "a") as file:
        file.write(json.dumps(dict(what=what, number=order["number"], source=order["source"], at=time.monotonic())) + "\\n")
note("begin")
output, inputs = os.environ["KGORCH_REMOTE_OUTPUT"], os.environ["KGORCH_REMOTE_INPUT"]
step = -1
if order["source"]:
    record = json.load(open(f"{{inputs}}/notebooks/local/{{order['source']}}/kgorch-session.json"))
    step = record["step"]
outcome, exit_code = outcomes.get(str(order["number"]), ["suspended", 0])
if step != order["expected_step"]:
    outcome = "no_state"
reached = step + 10 if outcome in ("suspended", "finished", "failed", "error") else step
if reached >= 29:
    outcome = "finished"
folder = f"kgorch/runs/ink/1/checkpoints/train/step-{{reached:08}}" if reached >= 0 else ""
at = "2026-11-23T12:00:00+00:00"
record = dict(format=1, nonce=order["nonce"], run=order["run"], run_id=order["run_id"], number=order["number"], outcome=outcome,
    exit_code=10, stage="train" if folder else "", step=reached if folder else -1, checkpoint=folder, bytes=5, gpus=[],
    began_at=at, ended_at=at, message="")
if outcome != "none":
    json.dump(record, open(f"{{output}}/kgorch-session.json", "w"))
note("end")
sys.exit(exit_code)
"""


@dataclass
class Driven:
    """A run of the stand-in: three sessions of ten steps each finish it.

    Attributes:
        folder: of the test.
        outcomes: of sessions that end otherwise, by number: outcome (`none`: no record) and exit code.
        wrap: puts something around the place in the process that visits.
    """

    folder: Path
    outcomes: dict[int, tuple[str, int]] = field(default_factory=dict)
    accelerator: str = ""
    poll_s: float = 0.02
    login_requests: int = 0
    told: list[str] = field(default_factory=list)
    wrap: Callable[[LocalPlace], Any] | None = None

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def diary(self) -> Path:
        return self.folder / "diary"

    @property
    def settings(self) -> RunSettings:
        profile = replace(PLACES["local"], login_requests=self.login_requests)
        return RunSettings("local", self.accelerator, False, (), (), 60, 2, self.poll_s, ("train",), profile)

    def begin(self) -> None:
        engine = open_database(self.home)
        folder = self.home / "runs" / "ink" / "1"
        folder.mkdir(parents=True)
        run = runs.create(
            engine, id="0123456789ab", name="ink", number=1, folder=str(folder), workdir=str(self.folder),
            checkpoints=str(folder / "checkpoints"), plan="", overrides=[], plan_hash="h", stages=["train"],
        )  # fmt: skip
        planned = next_session([], Moment(datetime.now(UTC)), session_s=60)
        remote.plan(engine, run.id, new_columns(run, self.settings, planned))
        engine.dispose()

    def visit(self) -> RemoteSessionInfo:
        """One visit, as a process of the daemon's makes it."""
        engine = open_database(self.home)
        try:
            run = self.run(engine)
            place: Any = LocalPlace(self.home / "places" / "local")
            place = self.wrap(place) if self.wrap else place
            tools = Tools(self._build, self._render, lambda text, state: self.told.append(text))
            with exclusive(run) as is_ours:
                assert is_ours
                row = Driver(engine, run, self.settings, place, tools).visit()
            assert row
            return row
        finally:
            engine.dispose()

    def run(self, engine: Any) -> RunInfo:
        run = runs.newest(engine, "ink")
        assert run
        return run

    def rows(self) -> list[RemoteSessionInfo]:
        engine = open_database(self.home)
        try:
            return remote.of_run(engine, "0123456789ab")
        finally:
            engine.dispose()

    def carry(self, *, within_s: float = 60.0, visit: Callable[[], Any] | None = None) -> list[RemoteSessionInfo]:
        """Visit it whenever it is due, until no session is open."""
        until_s = time.monotonic() + within_s
        while (rows := self.rows())[-1].state in REMOTE_OPEN:
            assert time.monotonic() < until_s, rows[-1]
            wait_s = (rows[-1].due_at - datetime.now(UTC)) / timedelta(seconds=1)
            time.sleep(min(max(0.005, wait_s), 0.5))
            (visit or self.visit)()
        return rows

    def diary_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.diary.read_text().splitlines()] if self.diary.exists() else []

    def _build(self) -> Bundle:
        folder = self.folder / "bundle"
        folder.mkdir(exist_ok=True)
        (folder / "kgorch-bundle.json").write_text("{}")
        return Bundle("kgorch-stand-in", "00", folder, 2, (), ())

    def _render(self, order: SessionOrder) -> str:
        text = json.dumps(asdict(order))
        return SCRIPT.format(order=text, diary=str(self.diary), outcomes=json.dumps(self.outcomes))
