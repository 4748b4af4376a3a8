"""Several machines on one PostgreSQL: claims, leases by the server's clock, sessions that another machine has taken."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import psycopg
import pytest
from harness import wait_until
from sqlalchemy import text
from sqlalchemy.orm import Session as Orm

from kgorch.admission import moved_state, queue_entry, session_start
from kgorch.admission.requests import LocalState, ResumeRequest, RunContext
from kgorch.core.codes import EventKind, NotStarted, Phase, Reason
from kgorch.core.session import events
from kgorch.core.session import lifecycle as core
from kgorch.core.session.lifecycle import NextSession
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db import active_sessions, checkpoints, fleet, queue, queue_claims, rungs, runs, sessions
from kgorch.db import postgres as postgresql
from kgorch.db.engine import open_fleet
from kgorch.db.location import Fleet
from kgorch.db.queue import Claimant
from kgorch.db.queue_claims import QueueSnapshot
from kgorch.limits import late_charges
from kgorch.plan import parse
from kgorch.platforms.generic import PROFILE
from kgorch.supervisor.recorder import Journal, Recorder
from kgorch.system.clock import SystemClock

LEASE_S = 60.0
PLAN = 'name = "ink"\n[[stage]]\nname = "train"\nentry = "t.py"\n'


@pytest.fixture
def machines(postgres, tmp_path):
    """The same database as the machines `a` and `b` see it."""
    url = postgres.new_database()
    engines = {name: open_fleet(Fleet(url, name, LEASE_S), tmp_path / name) for name in "ab"}
    for name, engine in engines.items():
        register(engine, name)
    yield engines
    for engine in engines.values():
        engine.dispose()


def register(engine, state_id: str) -> None:
    columns = {
        "host": "h",
        "boot_id": "b",
        "home": "/h",
        "state_id": state_id,
        "version": "1",
        "gpus": ["Tesla T4"] * 2,
    }
    fleet.register(engine, columns)


def queued(engine, name: str, **resource_request) -> int:
    run = runs.create(
        engine, id=f"id-{name}", name=name, number=1, folder=f"/home/x/runs/{name}/1", workdir="/w", checkpoints="runs/c",
        plan=PLAN, overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    queue.put(
        engine, run.id, reason=Reason.QUEUED, due_at=datetime.now(UTC) - timedelta(seconds=5),
        resource_request={"ranks": 1, **resource_request},
    )  # fmt: skip
    return queue.pending_resume(engine, run.id).id


def claimant(name: str, pid: int = 1) -> Claimant:
    return Claimant(pid, 1, "same boot", name)


def snapshot_of(engine) -> QueueSnapshot:
    claimed = [
        row for row in queue_claims.claimed_entries(engine) if row.resume.claimant_machine == runs.machine_of(engine)
    ]
    return QueueSnapshot(len(claimed), queue_claims.newest_session_id(engine))


def test_each_row_goes_to_one_of_many_claimants_that_meet_at_the_head_of_the_queue(machines):
    ids = [queued(machines["a"], f"run{number:02}") for number in range(40)]
    taken: list[int] = []

    def take(name: str, number: int) -> None:
        me = claimant(name, number)
        while (
            row := queue_claims.claim_first(machines[name], ids, me, by="x", snapshot=QueueSnapshot(10**6, 0))
        ) is not None:
            taken.append(row)

    threads = [threading.Thread(target=take, args=("ab"[number % 2], number)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert sorted(taken) == sorted(ids)


def test_another_machines_claims_take_no_place_here_and_ones_own_do(machines):
    first, second, third = (queued(machines["a"], name) for name in ("one", "two", "three"))
    before = {name: snapshot_of(engine) for name, engine in machines.items()}
    assert queue_claims.claim(machines["a"], first, claimant("a"), by="daemon", snapshot=before["a"])
    assert queue_claims.claim(machines["b"], second, claimant("b"), by="daemon", snapshot=before["b"])
    assert not queue_claims.claim(machines["b"], third, claimant("b"), by="daemon", snapshot=before["b"])


def test_two_daemons_of_a_machine_do_not_both_fill_its_last_place(machines):
    """Each claims another row; their UPDATEs would not see each other."""
    rows = [queued(machines["a"], f"run{number}") for number in range(8)]
    snapshot, taken = snapshot_of(machines["a"]), []
    start = threading.Barrier(8)

    def take(row: int) -> None:
        start.wait()
        taken.append(queue_claims.claim(machines["a"], row, claimant("a", row), by="daemon", snapshot=snapshot))

    threads = [threading.Thread(target=take, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(taken) == [False] * 7 + [True]


def test_the_process_of_another_machine_with_the_same_pid_is_another_claimant(machines):
    row = queued(machines["a"], "ink")
    assert queue_claims.claim(machines["a"], row, claimant("a"), by="daemon", snapshot=snapshot_of(machines["a"]))
    assert not queue_claims.renew(machines["b"], row, claimant("b"))
    assert not queue_claims.hand_over(machines["b"], row, claimant("b"), claimant("b", 2), by="daemon")
    assert queue_claims.renew(machines["a"], row, claimant("a"))


def test_leases_are_those_of_the_servers_clock_whatever_the_machines_say(machines, monkeypatch):
    for module in (queue, sessions, runs):
        monkeypatch.setattr(module, "now", lambda: datetime.now(UTC) - timedelta(minutes=7))
    row = queued(machines["a"], "ink")
    queue_claims.claim(machines["a"], row, claimant("a"), by="daemon", snapshot=snapshot_of(machines["a"]))
    session = sessions.open_session(machines["a"], "id-ink", boot_id="same boot")
    left = queue.pending_resume(machines["b"], "id-ink").lease_expires_at - fleet.server_now(machines["b"])
    assert timedelta(seconds=LEASE_S - 30) < left <= timedelta(seconds=LEASE_S)
    [seen] = active_sessions.all_of(machines["b"])
    assert (seen.machine, seen.is_elsewhere, seen.is_leased) == ("a", True, True)
    sessions.update_session(machines["a"], session.id, lease_expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert not active_sessions.all_of(machines["b"])[0].is_leased
    assert fleet.renew_session(machines["a"], session.id) and fleet.is_leased(machines["b"], session.id)


def test_a_session_that_another_machine_has_ended_writes_nothing_more(machines):
    queued(machines["a"], "ink")
    session = sessions.open_session(machines["a"], "id-ink", boot_id="same boot", step=7)
    attempt = sessions.open_attempt(machines["a"], session.id, stage="train", ranks=1, first_step=0, folder_of=str)
    lost = {"kind": EventKind.SESSION_LOST, "phase": Phase.CUT_OFF, "facts": {}}
    sessions.record(machines["b"], "id-ink", session.id, **lost)
    following = sessions.open_session(machines["b"], "id-ink", boot_id="another boot")
    with pytest.raises(sessions.SessionTaken):
        sessions.record_heartbeat(machines["a"], session.id, attempt.id, step=9)
    late = {"kind": EventKind.RUN_FINISHED, "phase": Phase.FINISHED, "facts": {}}
    with pytest.raises(sessions.SessionTaken):
        sessions.record(machines["a"], "id-ink", session.id, **late)
    assert not fleet.renew_session(machines["a"], session.id)
    assert not sessions.has_ended_as(machines["a"], session.id, Phase.FINISHED)
    first, second = sessions.of_run(machines["a"], "id-ink")
    assert (first.phase, first.step, second.id, second.phase) == ("cut_off", 7, following.id, "queued")
    assert runs.by_id(machines["a"], "id-ink").machine == "b"


def has_blocked(engine) -> bool:
    """Whether a transaction on this database waits for another one."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return bool(connection.scalar(text(waiting)))


STOPPED = {"reason": Reason.USER, "why": "stopped by the user", "due_at": None}


@pytest.mark.parametrize("is_late", [False, True], ids=["after the stop", "during the stop"])
def test_a_stop_by_the_user_is_not_undone_by_another_machine_that_puts_its_claim_back(machines, is_late):
    row, due_at = queued(machines["a"], "ink"), datetime.now(UTC) - timedelta(seconds=1)
    queue_claims.claim(machines["b"], row, claimant("b"), by="daemon", snapshot=snapshot_of(machines["b"]))

    def put_back() -> None:
        queue_claims.put_back(machines["b"], row, claimant("b"), due_at=due_at, failed_starts=0, error="it is live")

    other = threading.Thread(target=put_back)
    with Orm(machines["a"]) as orm, orm.begin():
        queue.queue_resume(orm, "id-ink", **STOPPED)
        orm.flush()
        if is_late:
            other.start()
            wait_until(lambda: has_blocked(machines["a"]), what="the other machine waits for the row")
    if not is_late:
        other.start()
    other.join(timeout=60)
    waits = queue.pending_resume(machines["a"], "id-ink")
    assert (waits.state, waits.reason, waits.due_at) == ("due", "user", None)
    assert names(machines["b"]) == []


@pytest.mark.parametrize("is_stop_late", [True, False], ids=["the stop comes second", "the user comes second"])
def test_of_two_machines_that_queue_a_run_in_the_same_moment_the_second_counts(machines, is_stop_late):
    """A session ends on one machine, while a user of the other one queues the run."""
    queued(machines["a"], "ink")
    session = sessions.open_session(machines["a"], "id-ink", boot_id="same boot")
    queue.mark_started(machines["a"], "id-ink", claimant("a"), by="x")
    ended = {"kind": EventKind.EXIT_OVERDUE, "phase": Phase.SUSPENDED, "facts": {}, "resume": STOPPED}
    add = {"reason": Reason.QUEUED, "due_at": datetime.now(UTC)}
    first, second = machines["b" if is_stop_late else "a"], machines["a" if is_stop_late else "b"]
    journal, errors = Journal(second, "id-ink", session.id), []

    def write() -> None:
        try:
            if is_stop_late:
                sessions.record(second, "id-ink", session.id, **ended)
            else:
                queue.put(second, "id-ink", **add)
        except Exception as error:
            errors.append(error)
            raise

    with Orm(first) as orm, orm.begin():
        queue.queue_resume(orm, "id-ink", **({**add, "why": "queued"} if is_stop_late else STOPPED))
        orm.flush()
        journal.write(write)
        wait_until(lambda: has_blocked(first), what="the other machine waits")
    assert journal.close(30) and not errors
    assert queue.pending_resume(first, "id-ink").reason == ("user" if is_stop_late else "queued")
    assert sessions.last(first, "id-ink").phase == ("suspended" if is_stop_late else "queued")


def test_a_run_that_trains_on_another_machine_cannot_be_queued(machines):
    queued(machines["a"], "ink")
    session = sessions.open_session(machines["a"], "id-ink", boot_id="same boot")
    queue.mark_started(machines["a"], "id-ink", claimant("a"), by="x")
    run, due_at = runs.by_id(machines["b"], "id-ink"), datetime.now(UTC)
    answer = queue_entry.enqueue_known(machines["b"], run, due_at=due_at)
    assert answer.why is NotStarted.LIVE and queue.pending_resume(machines["b"], "id-ink") is None
    sessions.update_session(machines["a"], session.id, lease_expires_at=due_at - timedelta(seconds=1))
    assert queue_entry.enqueue_known(machines["b"], run, due_at=due_at) is None


def test_an_entry_that_is_written_again_because_its_answer_was_lost_is_no_end_by_another(machines):
    queued(machines["a"], "ink")
    session = sessions.open_session(machines["a"], "id-ink", boot_id="same boot")
    ended = {"kind": EventKind.EXIT_OVERDUE, "phase": Phase.SUSPENDED, "facts": {}, "at": datetime.now(UTC)}
    for _ in range(2):
        sessions.record(machines["a"], "id-ink", session.id, **ended)
    assert sessions.last(machines["a"], "id-ink").phase == "suspended"


@pytest.mark.parametrize("at", [None, datetime.now(UTC)], ids=["another that settles it", "its supervisor"])
def test_of_two_machines_that_end_a_session_alike_only_the_first_does(machines, at):
    queued(machines["a"], "ink")
    session = sessions.open_session(machines["a"], "id-ink", boot_id="same boot")
    ended = {"kind": EventKind.SESSION_LOST, "phase": Phase.CUT_OFF, "facts": {}}
    sessions.record(machines["b"], "id-ink", session.id, **ended)
    queue.mark_started(machines["b"], "id-ink", claimant("b"), by="x")
    with pytest.raises(sessions.SessionTaken):
        resume = {"reason": Reason.LOST, "why": "", "due_at": datetime.now(UTC)}
        sessions.record(machines["a"], "id-ink", session.id, **ended, at=at, resume=resume)
    assert len(sessions.events(machines["a"], "id-ink", limit=99)) == 1
    assert queue.pending_resume(machines["a"], "id-ink") is None


def test_a_start_of_a_run_whose_session_another_machine_is_just_settling_starts_nothing(
    machines, monkeypatch, tmp_path
):
    folder = str(tmp_path / "runs" / "ink" / "1")
    runs.create(
        machines["a"], id="id-ink", name="ink", number=1, folder=folder, workdir=str(tmp_path), checkpoints="c", plan=PLAN,
        overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    session = sessions.open_session(machines["a"], "id-ink", boot_id="same boot")
    sessions.update_session(machines["a"], session.id, lease_expires_at=datetime.now(UTC) - timedelta(seconds=1))
    register(machines["b"], "a")  # the same state folder
    lost = {"kind": EventKind.SESSION_LOST, "phase": Phase.FAILED, "facts": {}}
    monkeypatch.setattr(
        late_charges, "complete", lambda *_: sessions.record(machines["a"], "id-ink", session.id, **lost)
    )
    result = session_start.resume(LocalState(machines["b"], tmp_path, PROFILE), ResumeRequest("ink"))
    assert result.why is NotStarted.LIVE
    assert [(row.number, row.phase) for row in sessions.of_run(machines["b"], "id-ink")] == [(1, "failed")]


def test_what_was_committed_before_a_connection_failed_is_written_once(machines, monkeypatch):
    """The answer to each first COMMIT is lost, so the journal writes each entry again."""
    engine, commits = machines["a"], []
    queued(engine, "ink")
    session = sessions.open_session(engine, "id-ink", boot_id="same boot")
    commit = engine.dialect.do_commit

    def lose_every_second_answer(connection) -> None:
        commit(connection)
        commits.append(connection)
        if threading.current_thread().name == "journal" and len(commits) % 2:
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(engine.dialect, "do_commit", lose_every_second_answer)
    journal, at = Journal(engine, "id-ink", session.id), datetime.now(UTC)
    journal.note(EventKind.STACKS, {"n": 1})
    journal.note(EventKind.STACKS, {"n": 2})
    move = core.advance(LifecycleState(phase=Phase.QUEUED), events.SessionOpened(), 0.0)
    live = SimpleNamespace(
        engine=engine, run=runs.by_id(engine, "id-ink"), row=session, state=move.session, clock=SystemClock(),
        attempt=None, saved_step=0,
    )  # fmt: skip
    Recorder(live, journal, None).record(move)
    rung = {"plan_hash": "h", "stage": "train", "device": "", "world_size": 1, "step": 3, "rung": "r", "settings": {}}
    journal.write(lambda: rungs.add(engine, "id-ink", session.id, at=at, **rung))
    assert journal.close(30)
    assert len(commits) == 8, "four entries, each tried twice"
    written = [(event.kind, event.facts.get("n")) for event in sessions.events(engine, "id-ink", limit=99)]
    assert written == [("stacks", 1), ("stacks", 2), ("session_opened", None), ("rung_taken", None)]
    assert len(rungs.of_run(engine, "id-ink")) == 1


def names(engine, reachable=frozenset("b")) -> list[str]:
    found = queue.due_entries(engine, fleet.server_now(engine), limit=99, reachable=reachable)
    return sorted(entry.run for entry in found)


def test_a_machine_looks_at_its_own_runs_at_new_ones_and_at_those_whose_files_may_be_had(machines):
    for name in ("plain", "mirrored", "new"):
        queued(machines["a"], name, mirrored=name == "mirrored")
        if name != "new":
            session = sessions.open_session(machines["a"], f"id-{name}", boot_id="b")
            sessions.update_session(machines["a"], session.id, phase="suspended")
            queue.put(machines["a"], f"id-{name}", reason=Reason.QUEUED, due_at=datetime.now(UTC))
    assert names(machines["b"]) == ["mirrored", "new"]
    assert names(machines["b"], frozenset("ab")) == ["mirrored", "new", "plain"]
    assert names(machines["a"], frozenset("a")) == ["mirrored", "new", "plain"]
    register(machines["b"], "a")  # the same state folder
    assert fleet.sharing_state(machines["b"]) == {"a", "b"}


def test_the_machines_of_a_fleet_are_known_with_what_they_run(machines):
    queued(machines["a"], "ink")
    session = sessions.open_session(machines["a"], "id-ink", boot_id="b", step=3)
    assert [row.name for row in fleet.machines(machines["b"])] == ["a", "b"]
    assert fleet.machines(machines["b"])[0].gpus == ["Tesla T4", "Tesla T4"]
    [seen] = fleet.live_sessions(machines["b"])
    assert (seen.machine, seen.run, seen.number, seen.step, seen.is_leased) == ("a", "ink", session.number, 3, True)
    assert fleet.alive_machines(machines["b"]) == {"a", "b"}


def test_an_end_that_queues_the_next_session_is_known_while_the_database_is_away(tmp_path):
    """It goes into the ending file, with this machine's time."""
    engine = postgresql.create(f"postgresql+psycopg://kgorch@/gone?host={tmp_path}")
    engine.dialect.kgorch_fleet = Fleet(str(engine.url), "a", LEASE_S)
    live = SimpleNamespace(engine=engine, clock=SystemClock())
    queued_as = Recorder(live, None, None)._queued(NextSession(Reason.TIME_LIMIT, "the session's time limit"))
    assert abs(queued_as["due_at"] - datetime.now(UTC)) < timedelta(seconds=10)


def test_a_machine_with_the_end_of_a_later_stage_does_not_have_the_newest_of_one_that_is_extended(machines, tmp_path):
    a, b = machines["a"], machines["b"]
    plan = f'{PLAN}[[stage]]\nname = "tune"\nentry = "t.py"\n'
    run = runs.create(
        a, id="id-ink", name="ink", number=1, folder=str(tmp_path / "runs/ink/1"), workdir=str(tmp_path), checkpoints="runs/c",
        plan=plan, overrides=[], plan_hash="h", stages=["train", "tune"],
    )  # fmt: skip
    for stage, step, is_here in [("train", 10, True), ("tune", 90, True), ("train", 20, False)]:
        folder = tmp_path / stage / str(step)
        folder.mkdir(parents=True)
        if is_here:
            (folder / "manifest.json").write_text("{}")
        columns = {"stage": stage, "step": step, "final": step != 20, "bytes": 1}
        checkpoints.record(a, run.id, str(folder), state="verified", **columns)
    runs.finish_stage(a, run.id, "tune")
    context = RunContext(b, run, parse(plan, "plan.toml"), PROFILE)
    with pytest.raises(moved_state.StateElsewhere, match="train 20"):
        moved_state.bring(context, tmp_path / "b", SimpleNamespace(note=print))
    assert checkpoints.newest_verified(b, run.id).step == 20
