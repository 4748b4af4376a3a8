"""A finished run that is trained longer: here, cut in the midst of it, and from a source that holds it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from sources import PLAN, Place, checkpoint, session_of, state
from sqlalchemy import select
from sqlalchemy.orm import Session as Orm

from kgorch.admission import queue_entry
from kgorch.admission.open_session import ReadySession
from kgorch.admission.requests import Consent, LocalState, StartRequest
from kgorch.checkpoint.manifest import Position
from kgorch.checkpoint.verifier import Verifier
from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.db import checkpoints, curves, runs, sessions
from kgorch.db.engine import open_database
from kgorch.db.tables import Attempt
from kgorch.errors import PlanError
from kgorch.launch import attempts
from kgorch.plan import parse
from kgorch.platforms.profile import Profile
from kgorch.supervisor import ending_files, orphan_recovery
from kgorch.supervisor.recorder import Journal

ONE = PLAN.replace('[[stage]]\nname = "predict"\nentry = "t.py"\n', "")
LONG_ONE = ONE.replace('entry = "t.py"', 'entry = "t.py"\nargs = { epochs = 9 }')
LONG = PLAN.replace('name = "train"\nentry = "t.py"', 'name = "train"\nentry = "t.py"\nargs = { epochs = 9 }')
EXTEND = Consent(extend=True)


def finished(place: Place, text: str = ONE, **columns) -> Path:
    """A finished run of one stage, known here; its checkpoints' folder."""
    engine, folder = open_database(place.home), place.home / "runs" / "ink" / "1"
    folder.mkdir(parents=True)
    places = {"folder": str(folder), "workdir": str(place.work), "checkpoints": str(folder / "checkpoints")}
    runs.create(
        engine, id="r1", name="ink", number=1, plan=text, overrides=[], plan_hash="h", stages=["train"], **places
    )
    checkpoint(folder / "checkpoints", 20, final=True, **columns)
    runs.finish_stage(engine, "r1", "train")
    runs.set_state(engine, "r1", "finished")
    engine.dispose()
    return folder / "checkpoints"


def finished_elsewhere(source: Path) -> Path:
    """A finished run of two stages in a source; its checkpoints' folder."""
    root = state(source, steps=(10,)) / "checkpoints"
    checkpoint(root, 20, final=True, minute=1)
    checkpoint(root, 5, stage="predict", final=True, minute=2)
    engine = open_database(source)
    for stage in ("train", "predict"):
        runs.finish_stage(engine, "r1", stage)
    runs.set_state(engine, "r1", "finished")
    engine.dispose()
    return root


def open_stages(place: Place, text: str) -> list[str]:
    engine = open_database(place.home)
    try:
        return [stage.name for stage in attempts.open_stages(engine, runs.newest(engine, "ink"), parse(text, "p"))]
    finally:
        engine.dispose()


def test_an_extension_that_is_cut_before_the_plan_is_taken_can_be_done_again(here, monkeypatch):
    finished(here)

    def full(self, *_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_text", full)
        with pytest.raises(OSError):
            here.start(LONG_ONE, consent=EXTEND)
    opened, _ = here.start(LONG_ONE, consent=EXTEND)
    assert isinstance(opened, ReadySession) and open_stages(here, LONG_ONE) == ["train"]


def test_a_finished_run_that_a_source_holds_is_extended_there_when_somebody_asks(here, source):
    finished_elsewhere(source)
    with pytest.raises(PlanError, match="is finished, and the plan asks for more") as refused:
        here.start(LONG)
    assert "--extend" in str(refused.value.next_step) and here.look() is None, "nothing was taken yet"
    opened, _ = here.start(LONG, consent=EXTEND)
    assert isinstance(opened, ReadySession) and open_stages(here, LONG) == ["train", "predict"]


def test_an_extended_stage_goes_on_from_its_newest_checkpoint_on_a_new_machine(here, source):
    """Behind it lies a finished stage's final checkpoint, which is further in the plan."""
    root = finished_elsewhere(source)
    engine = open_database(source)
    runs.reopen_stage(engine, "r1", "train", note="extended from step 20")
    runs.reopen_stage(engine, "r1", "predict", note="extended from step 5")
    runs.set_state(engine, "r1", "active")
    engine.dispose()
    checkpoint(root, 30, minute=3)
    opened, _ = here.start()
    engine = open_database(here.home)
    found = attempts.find_restore_point(engine, opened.run, "train", lambda *_: None)
    assert found.step == 30 and not found.is_final
    engine.dispose()


@pytest.fixture
def other_machine(here, postgres, monkeypatch):
    """Another machine of a fleet than the one that has finished the run; what that one saved is in a mirror."""
    monkeypatch.setenv("KGORCH_DATABASE", postgres.new_database())
    monkeypatch.setenv("KGORCH_MACHINE", "a")
    root = finished(here)
    engine = open_database(here.home)
    described = {"stage": "train", "step": 20, "final": True, "bytes": 140}
    checkpoints.record(engine, "r1", str(root / "train" / "step-00000020-final"), state="verified", **described)
    engine.dispose()
    shutil.copytree(root, here.work / "mirror" / "ink-r1")
    monkeypatch.setenv("KGORCH_MACHINE", "b")
    return Place(here.work, here.home.with_name("home-b"))


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_finished_run_of_a_fleet_is_extended_from_a_machine_that_has_not_trained_it(other_machine, is_queued):
    text = f'{LONG_ONE}[checkpoint]\nmirror = "{other_machine.work / "mirror"}"\n'
    if is_queued:
        engine = open_database(other_machine.home)
        request = StartRequest(text, other_machine.work / "plan.toml", consent=EXTEND)
        queue_entry.enqueue(LocalState(engine, other_machine.home, Profile("test")), request, due_at=None)
        engine.dispose()
    opened, _ = other_machine.start(text, consent=EXTEND)
    assert isinstance(opened, ReadySession) and opened.row.first_step == 20
    assert (other_machine.home / "runs/ink/1/plan.toml").read_text() == text
    assert open_stages(other_machine, text) == ["train"]
    extended = [event.facts["step"] for event in other_machine.look()[2] if event.kind == "stage_extended"]
    assert extended == [20]


def test_a_final_checkpoint_of_an_earlier_version_is_no_place_to_go_on_from(here):
    """It does not say at which epoch its loop ended: the extension would train nothing and end well."""
    from dataclasses import replace

    from kgorch.checkpoint.folder import read_checkpoint, write_manifest
    from kgorch.checkpoint.manifest import checkpoint_folder_name

    root = finished(here)
    folder = root / "train" / checkpoint_folder_name(20, final=True)
    write_manifest(folder, replace(read_checkpoint(folder), position=Position(loop=1, step=20)))
    with pytest.raises(PlanError, match="earlier kgorch"):
        here.start(LONG_ONE, consent=EXTEND)
    assert here.look()[0]["state"] == "finished"


def test_an_end_that_only_a_file_tells_finishes_the_stage_as_well(here):
    root = finished(here)
    engine = open_database(here.home)
    runs.reopen_stage(engine, "r1", "train", note="")
    runs.set_state(engine, "r1", "active")
    run = runs.newest(engine, "ink")
    row = session_of(engine, run)
    attempt = sessions.last_attempt(engine, row.id)
    closes = {"attempt_id": attempt.id, "outcome": "finished", "cause": "", "last_step": 20, "made_progress": True}
    entry = {
        "kind": "run_finished",
        "phase": "finished",
        "facts": {},
        "resume": None,
        "closes": closes,
        "finishes": "train",
        "why": "",
    }
    ending_files.write(root.parent, row.number, entry)
    plan = parse(ONE, "p")
    assert orphan_recovery.recover_session(engine, run, plan, sessions.last(engine, "r1"), attempt).phase == "finished"
    assert not attempts.open_stages(engine, run, plan)
    engine.dispose()


@pytest.mark.parametrize("names", [4, 400])
def test_figures_with_many_dots_are_no_reason_to_doubt_a_database(here, source, names):
    state(source)
    engine = open_database(source)
    with Orm(engine) as orm:
        attempt = orm.scalars(select(Attempt)).first().id
    values = {f"m{number}": Value(0.1234 + number, 1) for number in range(names)}
    curves.write(engine, attempt, [metric_curve.encode(Record(step, step, 1, 1.7e9, values)) for step in range(1, 60)])
    engine.dispose()
    opened, _ = here.start()
    assert opened.row.number == 2, "the history came along"


def test_a_journal_writes_in_order_what_several_threads_hand_over_and_the_newest_of_a_name(tmp_path):
    engine, written, gate = open_database(tmp_path), [], threading.Event()
    journal = Journal(engine, "r", 1)
    journal.write(lambda: gate.wait(20))
    for number in range(3):
        journal.refresh("beat", lambda number=number: written.append(f"beat {number}"))
        journal.write(lambda number=number: written.append(number))
    assert not journal.flush(0.1)
    gate.set()
    assert journal.flush(20)
    journal.write(lambda: written.append("last"))
    assert journal.close(20)
    assert [item for item in written if not str(item).startswith("beat")] == [0, 1, 2, "last"]
    assert "beat 0" not in written and "beat 1" not in written
    engine.dispose()


def test_a_reader_that_is_closed_says_that_it_drops_nothing(tmp_path):
    folder = checkpoint(tmp_path / "c", 10)
    run = type("Run", (), {"checkpoints": str(tmp_path / "c"), "id": "r1"})()
    reader = Verifier(run, None, lambda job: None)
    reader.close()
    assert not reader.drop(folder) and folder.exists()


def test_an_end_of_another_version_is_none_that_can_be_taken(tmp_path):
    entry = {"kind": "run_finished", "phase": "finished", "facts": {}, "resume": None, "closes": None}
    ending_files.write(tmp_path, 1, entry)
    ending_files.write(tmp_path, 2, entry | {"of_the_future": 1})
    assert ending_files.read(tmp_path, 1) == entry and ending_files.read(tmp_path, 2) is None
