"""What the buttons do without a training; with one: test_browser.py."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import lived_in
import pytest
from starlette.testclient import TestClient

from kgorch.core.codes import RunState
from kgorch.db import queue, runs
from kgorch.errors import KgorchError
from kgorch.platforms.detect import detect
from kgorch.web import access, actions
from kgorch.web.app import create_app
from kgorch.web.state import WebState

WAITING, FINISHED = "cloud-removal-glfcr", "camouflage-edgenext"


class Site:
    def __init__(self, folder):
        self.engine = lived_in.furnish(folder)
        gate = access.Gate(1)
        self.state = WebState(self.engine, folder, detect())
        self.client = TestClient(create_app(self.state, gate), base_url="http://127.0.0.1:1")
        self.client.get(f"/login?token={gate.token}")
        self.headers = {"x-csrf-token": gate.csrf_token(self.client.cookies[gate.cookie])}

    def act(self, run, action, **values):
        """The last line that the action says."""
        answer = self.client.post(f"/api/runs/{run}/1/actions/{action}", json=values, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text.splitlines()[-1])


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "home")


def row(site, run):
    return queue.pending_resume(site.engine, f"{run}-1")


def test_the_queue_is_left_and_joined_with_a_priority(site):
    assert "out of the queue" in site.act(WAITING, "unqueue")["done"]
    assert row(site, WAITING).due_at is None
    assert "no daemon is running" in site.act(WAITING, "queue", priority="7")["done"]
    assert row(site, WAITING).due_at is not None and row(site, WAITING).priority == 7
    site.act(WAITING, "priority", priority="-3")
    assert row(site, WAITING).priority == -3


@pytest.mark.parametrize(
    "values", [{"priority": "a lot"}, {"priority": "101"}, {"at": "yesterday"}, {"at": "x" * 9999}]
)
def test_values_that_mean_nothing_are_refused_and_change_nothing(site, values):
    before = row(site, WAITING)
    assert site.act(WAITING, "queue", **values)["error"]
    assert row(site, WAITING) == before


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b"[" * 50_000])
def test_a_body_that_is_no_object_is_refused(site, body):
    answer = site.client.post(f"/api/runs/{WAITING}/1/actions/queue", content=body, headers=site.headers)
    assert (
        answer.status_code == 400 and "not a JSON object" in answer.json()["error"] and answer.json()["code"] == "KG806"
    )


def test_what_is_not_running_says_so(site):
    assert "not running" in site.act(WAITING, "save")["error"]
    assert "not running" in site.act(WAITING, "stop")["done"]
    assert "no such action" in site.act(WAITING, "explode")["error"]


def test_a_finished_run_is_extended_by_the_plan_that_it_stores(site):
    assert site.act(FINISHED, "extend", set="train")["error"].startswith("extend: expected KEY=VALUE")
    told = site.act(FINISHED, "extend", set="stage.train.args.epochs=60")
    assert "queued" in told["done"], told
    run = runs.by_id(site.engine, f"{FINISHED}-1")
    assert run.state == RunState.ACTIVE and run.overrides == ["stage.train.args.epochs=60"]
    assert row(site, FINISHED).due_at is not None


def test_a_finished_run_is_not_extended_once_a_newer_one_has_its_name(site):
    home = lived_in.Home(site.state.home)
    home.run(FINISHED, age=timedelta(minutes=1), number=2)
    told = site.act(FINISHED, "extend", set="stage.train.args.epochs=60")
    assert told["error"].startswith("a newer run of this name continues instead: number 2"), told
    older, newer = (runs.by_id(site.engine, f"{FINISHED}-{number}") for number in (1, 2))
    assert older.state == RunState.FINISHED and newer.overrides == []


def test_a_checkpoint_is_pinned_and_dropped_and_the_newest_is_not(site):
    name = "surface-unet3d"
    assert "stays until" in site.act(name, "pin", stage="train", step="4600")["done"]
    assert "pinned" in site.act(name, "drop", stage="train", step="4600")["error"]
    site.act(name, "unpin", stage="train", step="4600")
    assert "is deleted" in site.act(name, "drop", stage="train", step="4600")["done"]
    assert "no such checkpoint" in site.act(name, "drop", stage="train", step="4600")["error"]
    newest = max(row.step for row in lived_in_checkpoints(site))
    assert "newest verified" in site.act(name, "drop", stage="train", step=str(newest))["error"]


@pytest.mark.parametrize("stage", ["../train", "train/../../..", "", "/"])
def test_no_path_of_a_checkpoint_comes_from_the_request(site, stage):
    assert "no such checkpoint" in site.act("surface-unet3d", "drop", stage=stage, step="4600")["error"]


def test_a_second_browser_cannot_do_what_the_first_is_doing(site, monkeypatch):
    began, go_on, told = threading.Event(), threading.Event(), []

    def slow(state, run, values, say):
        began.set()
        go_on.wait(30)
        return "done"

    monkeypatch.setitem(actions.ACTIONS, "save", actions.Action(slow, "kgorch save RUN"))
    runner, run = actions.Runner(site.state), runs.newest(site.engine, WAITING)
    first = threading.Thread(target=lambda: told.append(runner.run("save", run, {}, print)))
    first.start()
    began.wait(30)
    with pytest.raises(KgorchError, match="already under way"):
        runner.run("save", run, {}, print)
    go_on.set()
    first.join(30)
    assert told == ["done"] and runner.run("save", run, {}, print) == "done"


def test_an_export_is_one_file_with_the_bytes_of_the_verb_and_leaves_nothing_behind(suspended):
    from kgorch.db.engine import open_database

    gate = access.Gate(1)
    state = WebState(open_database(suspended.home), suspended.home, detect())
    client = TestClient(create_app(state, gate), base_url="http://127.0.0.1:1")
    client.get(f"/login?token={gate.token}")
    step = suspended.status()["checkpoint"]["step"]
    headers = {"x-csrf-token": gate.csrf_token(client.cookies[gate.cookie])}
    answer = client.post("/api/runs/test/1/export", json={"stage": "train", "step": step}, headers=headers)
    assert answer.status_code == 200 and f"test-train-{step}.safetensors" in answer.headers["content-disposition"]
    out = suspended.folder / "verb.safetensors"
    suspended("checkpoints", "export", "test", str(out))
    assert answer.content == out.read_bytes()
    assert not list(suspended.home.glob("export-*"))


def lived_in_checkpoints(site):
    from kgorch.db import checkpoints

    return checkpoints.of_run(site.engine, "surface-unet3d-1", "verified")
