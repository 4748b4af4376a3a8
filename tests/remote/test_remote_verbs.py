"""The verbs that know runs at other places. Whole sessions are in tests/remote and tests/places; here rows are written by hand."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from kgorch.cli.display import remote_rows
from kgorch.core.codes import Reason, RemoteState, RemoteWait, RunState
from kgorch.core.remote.place_values import RemoteStatus
from kgorch.core.remote.session_states import Progress, RemoteSession
from kgorch.db import queue, queue_claims, remote, runs
from kgorch.db.queue_claims import QueueSnapshot
from kgorch.remote.session_rows import columns_of
from kgorch.report import remote_view
from kgorch.scheduler import claimed_resume

NOW = datetime.now(UTC)
PLAN = 'name = "afar"\n[[stage]]\nname = "train"\nentry = "train.py"\n[remote]\non = "local"\n'
GOOD = RemoteSession(
    1, RemoteState.COLLECTED, NOW, pushed_at=NOW - timedelta(hours=2), running_at=NOW - timedelta(hours=2),
    status=RemoteStatus.COMPLETE, status_at=NOW - timedelta(hours=1), version=1, reached=Progress(0, 400),
)  # fmt: skip


@pytest.fixture
def run(kgorch, engine):
    folder = kgorch.home / "runs" / "afar" / "1"
    folder.mkdir(parents=True)
    (kgorch.folder / "plan.toml").write_text(PLAN)
    (kgorch.folder / "train.py").write_text("pass\n")
    return runs.create(
        engine, id="0123456789ab", name="afar", number=1, folder=str(folder), workdir=str(kgorch.folder),
        checkpoints=str(folder / "checkpoints"), plan=PLAN, plan_hash="", overrides=(), stages=["train"],
    )  # fmt: skip


def add(engine, run, session: RemoteSession, **more):
    name = f"kgorch-afar-012345-{session.number:03d}"
    columns = columns_of(session) | {"place": "local", "name": name, "nonce": "00", "stage": "train"}
    return remote.plan(engine, run.id, columns | more)


def test_status_says_where_a_run_is_and_what_it_waits_for(kgorch, engine, run):
    add(engine, run, GOOD)
    due_at = NOW + timedelta(days=2)
    why = "12 min are left of the account's hours\x1b[31m"
    waiting = RemoteSession(2, RemoteState.PLANNED, due_at, source=1, wait=RemoteWait.QUOTA, why=why)
    add(engine, run, waiting, url="https://example.org/code/2")
    view = kgorch.status()
    assert view["session"] is None and view["remote"]["checkpoint"] == {"stage": "train", "step": 400, "session": 1}
    assert (view["remote"]["state"], view["remote"]["wait"], view["remote"]["session"]) == ("planned", "quota", 2)
    assert view["next"]["what"] == "remote" and view["next"]["at"] == view["remote"]["next_at"]
    shown = kgorch("status").stdout
    assert "waits for the account's hours: 12 min" in shown and "\x1b" not in shown
    assert "https://example.org/code/2" in shown and "step 400 of train, verified, in session 1" in shown
    assert "no daemon is running" in shown and "kgorch resume" not in shown
    [entry] = kgorch.look("queue")
    assert (entry["run"], entry["state"], entry["reason"], entry["due_at"]) == (
        "afar", "remote", "quota", view["next"]["at"]
    )  # fmt: skip


def test_history_has_the_sessions_at_the_place(kgorch, engine, run):
    add(engine, run, GOOD)
    add(engine, run, RemoteSession(2, RemoteState.LOST, NOW, expected=Progress(0, 400), why="it left no record"))
    entries = kgorch.history()
    assert [(entry["number"], entry["site"], entry["phase"]) for entry in entries] == [
        (1, "local", "collected"),
        (2, "local", "lost"),
    ]
    assert entries[0]["lasted_s"] == 3600 and entries[0]["remote"]["outcome"] is None
    assert "it left no record" in kgorch("history").stdout
    assert [entry["number"] for entry in kgorch.look("history", "-n", "1")] == [2]


def test_stop_takes_back_what_was_not_pushed_and_start_plans_it_again(kgorch, engine, run):
    add(engine, run, GOOD)
    add(engine, run, RemoteSession(2, RemoteState.PLANNED, NOW + timedelta(hours=1), source=1))
    said = kgorch("stop").stdout
    assert "session 2 is stopped before it was pushed; none follows it" in said
    assert kgorch.status()["next"] | {"daemon_alive": False} == {
        "what": "fetch", "at": None, "command": "kgorch remote fetch afar", "daemon_alive": False
    }  # fmt: skip
    assert "is not running" in kgorch("stop").stdout
    kgorch("remote", "start", "plan.toml")
    newest = remote.newest(engine, run.id)
    assert (newest.number, newest.state, newest.source, newest.expected_step) == (3, RemoteState.PLANNED, 1, 400)


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_run_that_waits_in_the_queue_here_waits_no_longer_once_it_is_started_at_a_place(
    kgorch, engine, run, is_claimed
):
    queue.put(engine, run.id, reason=Reason.TIME_LIMIT, due_at=NOW)
    row, me = queue.pending_resume(engine, run.id), claimed_resume.own_identity(engine)
    if is_claimed:  # by a daemon whose process for it has not come to the run's lock
        assert queue_claims.claim(engine, row.id, me, by="daemon", snapshot=QueueSnapshot(0, 0))
    kgorch("remote", "start", "plan.toml")
    assert queue.entries(engine) == [] and [due.run for due in remote.due_runs(engine, datetime.now(UTC))] == ["afar"]
    assert not queue_claims.put_back(engine, row.id, me, due_at=NOW, failed_starts=8, error="it is not over there")


def test_a_run_that_failed_here_beside_its_session_at_a_place_is_carried_on(kgorch, engine, run):
    add(engine, run, RemoteSession(1, RemoteState.RUNNING, NOW, pushed_at=NOW))
    queue.put(engine, run.id, reason=Reason.TIME_LIMIT, due_at=NOW)
    runs.set_state(engine, run.id, RunState.FAILED)
    kgorch("remote", "start", "plan.toml")
    assert [due.run for due in remote.due_runs(engine, datetime.now(UTC))] == ["afar"] and queue.entries(engine) == []


def test_what_runs_elsewhere_is_neither_removed_nor_queued_nor_started_here(kgorch, engine, run):
    add(engine, run, RemoteSession(1, RemoteState.RUNNING, NOW, pushed_at=NOW))
    verbs = ["rm", "afar", "--yes"], ["queue", "add", "afar"], ["start", "plan.toml"], ["resume", "afar"]
    others = [["start", "plan.toml"], ["remote", "start", "plan.toml"], ["slurm", "submit", "plan.toml"]]
    for words in (*verbs, *([*other, "--fresh"] for other in others)):
        said = kgorch(*words, code=2).stderr
        assert "session 1 of 'afar" in said or "session 1 of afar/1" in said, words
        assert "is not over at local" in said and "kgorch stop afar" in said
    assert "kgorch stop afar" in kgorch("queue", "drop", "afar", code=2).stderr
    assert "there is no session kgorch-afar-012345-001" in kgorch("logs", code=2).stderr


def test_a_new_run_beside_a_stopped_one_closes_the_session_that_goes_on_and_says_so(kgorch, engine, run):
    url = "https://www.kaggle.com/code/ada/afar-001"
    row = add(engine, run, RemoteSession(1, RemoteState.RUNNING, NOW, pushed_at=NOW), url=url)
    remote.mark_last(engine, run.id)
    done = kgorch("remote", "start", "plan.toml", "--fresh")
    assert f"session 1 of 'afar' may go on at local until it ends by itself: {url}" in done.stdout + done.stderr
    [(_, number, planned)] = remote.open_sessions(engine)
    assert (number, planned.number, planned.state) == (2, 1, RemoteState.PLANNED)

    answered = {"state": RemoteState.RUNNING, "status": RemoteStatus.RUNNING}
    assert remote.save(engine, row.id, answered).state == RemoteState.STOPPED, (
        "a visit that was under way opens nothing"
    )
    following = columns_of(RemoteSession(2, RemoteState.PLANNED, NOW)) | {"place": "local", "name": "n", "nonce": "00"}
    closed = remote.close(engine, row.id, {"state": RemoteState.COLLECTED}, following, {"state": RunState.FINISHED})
    assert "--fresh began another run" in closed.why and len(remote.of_run(engine, run.id)) == 1
    assert runs.by_id(engine, run.id).state == RunState.SUPERSEDED
    sentence = remote_rows.sentence(remote_view.session(closed))
    assert sentence == "no longer followed: --fresh began another run of this name"


def test_rm_names_the_sessions_that_stay_at_the_place(kgorch, engine, run):
    url = "https://www.kaggle.com/code/ada/afar-001"
    add(engine, run, RemoteSession(1, RemoteState.DONE, NOW, pushed_at=NOW), url=url)
    assert kgorch.look("rm", "afar", "--dry-run")[0]["remote"] == [url]
    assert f"stays there: {url}" in kgorch("rm", "afar", "--yes").stdout


def test_check_lists_what_would_be_sent_and_stores_nothing(kgorch):
    (kgorch.folder / "plan.toml").write_text(PLAN)
    (kgorch.folder / "train.py").write_text("pass\n")
    (kgorch.folder / ".env").write_text("TOKEN=hunter2\n")
    view = json.loads(kgorch("remote", "check", "plan.toml", "--json").stdout)
    assert sorted(view["bundle"]["files"]) == ["plan.toml", "train.py"] and view["account"] == "local"
    assert any(".env" in text for text in view["bundle"]["left_out"])
    assert not list(kgorch.home.glob("places/local/bundles")) and not kgorch.look("status", "--all")


def test_a_plan_without_a_place_and_a_place_that_is_not_known_say_what_to_type(kgorch):
    (kgorch.folder / "plan.toml").write_text(PLAN.partition("[remote]")[0])
    (kgorch.folder / "train.py").write_text("pass\n")
    assert '[remote] on = "kaggle"' in kgorch("remote", "check", "plan.toml", code=2).stderr
    assert "did you mean 'kaggle'" in kgorch("remote", "start", "plan.toml", "--on", "kagle", code=2).stderr
