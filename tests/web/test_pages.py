"""What the pages show, of good rows and of bad ones."""

from __future__ import annotations

import asyncio
import functools
import http.cookiejar
import itertools
import json
import math
import re
import threading
import urllib.request
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import lived_in
import pytest
from starlette.testclient import TestClient

from kgorch.core.codes import Phase, RunState
from kgorch.db import fleet, runs, sessions
from kgorch.db.engine import open_fleet
from kgorch.db.location import Fleet
from kgorch.platforms.detect import detect
from kgorch.report import run_view
from kgorch.web import access, app, server, state
from kgorch.web.app import create_app
from kgorch.web.state import WebState

NASTY = "<img src=x onerror=alert(1)>\"'\u202e\x1b[31m" + "n" * 10_000
RUN = "/runs/surface-unet3d/1"


class Site:
    """A page over a furnished state folder."""

    def __init__(self, folder: Path) -> None:
        self.home = lived_in.Home(folder)
        lived_in.surface(self.home)
        gate = access.Gate(1)
        self.state = WebState(self.home.engine, folder, detect())
        app = create_app(self.state, gate)
        self.client = TestClient(app, base_url="http://127.0.0.1:1", raise_server_exceptions=False)
        self.client.get(f"/login?token={gate.token}")

    def text(self, path: str, status: int = 200) -> str:
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text[:2000]
        return answer.text

    def json(self, path: str, status: int = 200):
        return json.loads(self.text(path, status), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "home")


def first_event(site, path):
    """The first `parts` of a stream, as a browser gets them: Starlette's client waits for the end of an answer."""
    gate, bound = access.Gate(2), server.listen("127.0.0.1", 0)
    running = server.make_server(site.state, gate)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
    thread.start()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    url = server.url_of(bound, gate)
    try:
        opener.open(url, timeout=30).read()
        with opener.open(url.split("/login")[0] + path, timeout=30) as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    return json.loads(line.removeprefix(b"data: "))
    finally:
        running.stop()
        thread.join(timeout=30)
        bound.close()
    raise AssertionError("no event")


def test_the_list_shows_state_progress_metric_end_and_quota(site):
    site.home.add(
        lived_in.Pool,
        {
            "name": "kaggle",
            "total_s": 108_000.0,
            "resets": "Sat 00:00 UTC",
            "reserve_s": 0.0,
            "updated_at": site.home.now,
        },
    )
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", site.text("/")))
    for shown in (
        "surface-unet3d",
        "training",
        "15,990 of 24,000",
        "dice",
        "0.8718",
        "Quota kaggle",
        "left of 30h 00m",
        "time limit",
    ):
        assert shown in text, shown


def test_every_page_of_a_run_shows_figures_of_the_report(site):
    view = run_view.of_run(site.state.engine, runs.by_number(site.state.engine, "surface-unet3d", 1))
    overview = site.text(RUN)
    assert f"step {view['checkpoint']['step']:,}" in overview and view["exactness"]["memory"] in overview
    assert "skipped 1 batch" in overview  # a notice
    assert "1.3 GiB" in site.text(RUN + "/checkpoints") and "rank0.log" in site.text(RUN + "/logs")
    assert "checkpoint.every" in site.text(RUN + "/plan") and "8h 30m" in site.text(RUN + "/plan")


def test_the_timeline_has_sessions_attempts_saves_rungs_remedies_crashes_and_walls(site):
    told = site.json(f"/api{RUN}/timeline")
    assert [one["number"] for one in told["sessions"]] == [1, 2, 3, 4]
    assert [one["outcome"] for one in told["attempts"]] == ["suspended", "crashed", "suspended", "suspended", None]
    assert {mark["kind"] for mark in told["marks"]} == {"save", "rung", "remedy", "crash", "wall", "plan_changed"}


@pytest.mark.parametrize("axis", ["step", "hours", "epoch"])
def test_curves_go_over_all_sessions_without_doubles(site, axis):
    told = site.json(f"/api{RUN}/curves?axis={axis}")
    [loss] = [one for one in told["charts"] if one["name"] == "loss"]
    xs = loss["series"][0]["x"]
    assert xs == sorted(xs) and len(set(xs)) == len(xs) <= 1300
    assert loss["series"][0]["points"] == {"epoch": 27}.get(axis, 799)


def test_forecasts_are_drawn_against_the_end_once_it_is_known(site):
    series = {one["label"]: one for one in site.json(f"/api{RUN}/forecasts")["series"]}
    assert list(series) == ["predicted end", "earliest", "latest"] and len(series["latest"]["x"]) == 4
    assert all(
        made < first < end < last
        for made, first, end, last in zip(
            series["latest"]["x"], *(series[name]["y"] for name in ("earliest", "predicted end", "latest")), strict=True
        )
    )
    runs.set_state(site.state.engine, runs.by_number(site.state.engine, "surface-unet3d", 1).id, RunState.FINISHED)
    ended = site.json(f"/api{RUN}/forecasts")["series"][-1]
    run = runs.by_number(site.state.engine, "surface-unet3d", 1)
    hours = (run.finished_at - run.created_at).total_seconds() / 3600
    assert ended["label"] == "actual end" and ended["x"] == [series["latest"]["x"][0], ended["y"][0]]
    assert ended["y"] == [pytest.approx(hours, abs=0.001)] * 2


def test_smoothing_keeps_the_raw_curve_beside_it(site):
    [series] = site.json(f"/api{RUN}/curves?name=loss&smooth=0.9")["charts"][0]["series"]
    spread = [sum(abs(a - b) for a, b in itertools.pairwise(ys)) for ys in (series["raw"], series["y"])]
    assert spread[1] < spread[0] / 3


def test_of_curves_that_grow_only_the_newest_answer_is_remembered(site):
    site.text(f"/api{RUN}/curves")
    remembered = len(site.state._kept)
    file = max(site.home.home.glob("runs/*/*/attempts/4.1/metrics.jsonl"))
    for step in range(16_000, 16_010):
        record = {"s": step, "e": 30, "t": site.home.now.timestamp() + step, "v": {"dice": step / 1e5}}
        with open(file, "a") as records:
            records.write(json.dumps(record) + "\n")
        charts = site.json(f"/api{RUN}/curves")["charts"]
        assert next(chart for chart in charts if chart["name"] == "dice")["series"][0]["y"][-1] == step / 1e5
    assert len(site.state._kept) == remembered


def test_what_was_read_for_a_page_is_forgotten_once_it_is_too_old_to_be_shown(site, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: now_s))
    for smooth in range(20):
        site.text(f"/api{RUN}/curves?smooth=0.{smooth:02}")
    assert len(site.state._kept) >= 20
    now_s += 3600.0
    site.text(f"/api{RUN}/timeline")
    assert len(site.state._kept) == len(site.state._building) == 1


def test_values_that_are_no_numbers_interrupt_a_curve_and_are_counted(site):
    file = max(site.home.home.glob("runs/*/*/attempts/4.1/metrics.jsonl"))
    with open(file, "a") as lines:
        for step, value in ((20_000, "NaN"), (20_020, "Infinity"), (20_040, "null"), (20_060, "0.5")):
            lines.write(
                f'{{"s": {step}, "e": 27, "t": {site.home.now.timestamp()}, "f": {step - 20}, "v": {{"loss": [{value}, 20]}}}}\n'
            )
    [series] = site.json(f"/api{RUN}/curves?name=loss")["charts"][0]["series"]
    assert series["not_finite"] >= 1 and None in series["y"] and series["y"][-1] == 0.5
    assert all(y is None or math.isfinite(y) for y in series["y"])


def test_the_machines_of_a_fleet_are_shown_with_their_gpus_and_runs(postgres, tmp_path):
    names = ("left", "right<b>")
    url = postgres.new_database()
    engines = [open_fleet(Fleet(url, name, 60.0), tmp_path / str(number)) for number, name in enumerate(names)]
    for name, engine in zip(names, engines, strict=True):
        columns = {
            "host": "h",
            "boot_id": "b",
            "home": "/h",
            "state_id": name,
            "version": "1",
            "gpus": ["Tesla T4"] * 2,
        }
        fleet.register(engine, columns)
    made = runs.create(
        engine, id="id", name="ink", number=1, folder="/h/runs/ink/1", workdir="/w", checkpoints="runs/c",
        plan="", overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    sessions.open_session(engine, made.id, boot_id="b", step=1234)
    gate = access.Gate(1)
    client = TestClient(create_app(WebState(engine, tmp_path, detect()), gate), base_url="http://127.0.0.1:1")
    client.get(f"/login?token={gate.token}")
    tile = client.get("/").text.partition('aria-label="Fleet"')[2].partition("</section>")[0]
    for shown in (
        "of 2 machines alive, 4 GPUs",
        "left</bdi>: idle; Tesla T4, Tesla T4",
        "right&lt;b&gt;",
        "at step 1,234",
    ):
        assert shown in tile, (shown, tile)
    for engine in engines:
        engine.dispose()


def test_names_and_texts_from_elsewhere_stay_text(site):
    run_id = "surface-unet3d-1"
    last = sessions.last(site.state.engine, run_id)
    sessions.update_session(site.state.engine, last.id, metrics={NASTY: 1.0}, why=NASTY, stage="train")
    site.home.event(run_id, last.id, site.home.now, "save_failed", why=NASTY)
    site.home.event(
        run_id, last.id, site.home.now, "plan_changed", changed=[{"key": NASTY, "old": NASTY, "new": 3}], what=NASTY
    )
    folder = site.home.run("x", age=timedelta(days=1), workdir=NASTY, plan=f"name = 'x'\n# {NASTY}")
    session = site.home.session(
        "x-1", 1, site.home.now, site.home.now, 0, 9, metrics={NASTY: 1.0}, why=NASTY, phase="failed"
    )
    place = site.home.attempt(
        folder, session, "1.1", site.home.now, site.home.now, 0, 9, cause=NASTY, outcome="crashed"
    )
    (place / "metrics.jsonl").write_text(json.dumps({"s": 1, "e": 1, "t": 1e9, "v": {NASTY: 0.5}}) + "\n")
    site.home.checkpoint(folder, "x-1", session, site.home.now, 9, metrics={NASTY: 1.0})
    for path in ("/", RUN, RUN + "/plan", "/runs/x/1", "/runs/x/1/plan", "/runs/x/1/checkpoints", "/runs/x/1/logs"):
        text = site.text(path)
        assert "<img src=x" not in text and "\u202e" not in text and "\x1b" not in text, path
        assert len(text) < 200_000, path
    for part in first_event(site, "/api/runs")["parts"].values():
        assert "<img src=x" not in part


def test_a_run_without_sessions_and_without_metrics_has_all_pages(site):
    site.home.run("new", age=timedelta(minutes=1))
    assert "new" in site.text("/")
    for page in ("", "/metrics", "/system", "/checkpoints", "/logs", "/plan"):
        site.text("/runs/new/1" + page)
    assert site.json("/api/runs/new/1/curves")["charts"] == []
    assert site.json("/api/runs/new/1/system")["charts"] == []
    assert site.json("/api/runs/new/1/timeline")["sessions"] == []


def test_a_session_that_ends_before_it_began_by_a_clock_that_was_set_back_is_drawn(site):
    folder = site.home.run("back", age=timedelta(days=1))
    at = site.home.now
    session = site.home.session("back-1", 1, at, at - timedelta(hours=3), 0, 9)
    site.home.attempt(folder, session, "1.1", at, at - timedelta(hours=3), 0, 9)
    told = site.json("/api/runs/back/1/timeline")
    assert told["sessions"][0]["to"] >= told["sessions"][0]["from"] and told["to"] >= told["from"]
    site.json("/api/runs/back/1/curves?axis=hours")
    site.text("/runs/back/1")


def test_a_stream_sends_parts_and_then_only_what_has_changed(site):
    told = first_event(site, "/api/runs")
    assert told["order"][:2] == ["summary", "run-surface-unet3d-1"]
    parts = site.client.app.state.site.parts
    first = parts.of_run("surface-unet3d", 1, "overview")
    last = sessions.last(site.state.engine, "surface-unet3d-1")
    sessions.update_session(site.state.engine, last.id, phase=Phase.SAVING)
    site.state._kept.clear()  # a second later
    second = parts.of_run("surface-unet3d", 1, "overview")
    assert "training" in first["head"] and "saving" in second["head"]
    assert second["actions"] == first["actions"]


def test_a_stream_sends_the_parts_again_after_trouble_for_the_page_says_so_until_then(site, monkeypatch):
    monkeypatch.setattr(app, "INTERVAL_S", 0)
    page, looks = app.Site(site.state, access.Gate(1)), itertools.count()

    def look():
        if (number := next(looks)) == 1:
            raise OSError("the disk is away")
        page.is_stopping = number == 3
        return {"head": "<p>as before</p>"}, True

    async def events():
        request = SimpleNamespace(is_disconnected=functools.partial(asyncio.sleep, 0, False))
        return [text.split("\n")[0] async for text in page._events(request, look)]

    assert asyncio.run(events()) == ["retry: 2000", "event: parts", "event: trouble", "event: parts", ": "]


def test_an_unknown_run_and_page_are_not_found(site):
    for path in ("/runs/none/1", "/runs/surface-unet3d/2", RUN + "/nothing", "/nothing", "/runs/..%2f..%2fetc/1"):
        site.text(path, 404)
    assert "no such run" in site.json("/api/runs/none/1/timeline", 404)["error"]


def test_a_broken_database_is_told_on_every_page_and_seen_again_once_it_is_mended(site):
    file = site.home.home / "kgorch.db"
    with site.home.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    file.rename(file.with_suffix(".away"))
    file.write_bytes(b"this is no database" * 1000)
    for path in ("/", RUN):
        assert re.search("not a database|malformed", site.text(path, 503))
    for path in site.home.home.glob("kgorch.db-*"):
        path.unlink()
    file.with_suffix(".away").rename(file)
    assert "surface-unet3d" in site.text("/")


# logs


def log_of(site, name="rank0.log"):
    return max(site.home.home.glob(f"runs/*/*/attempts/4.1/{name}"))


def query(what="", **more):
    rest = "".join(f"&{key}={value}" for key, value in more.items())
    return f"/api{RUN}/logs?attempt=4.1&file=rank0.log&what={what}{rest}"


def test_a_log_is_read_by_pages_from_its_end(site):
    file = log_of(site)
    file.write_text("".join(f"line {number}\n" for number in range(60_000)))
    last = site.json(query())
    assert last["lines"][-1] == "line 59999" and last["end"] == last["size"] == file.stat().st_size
    before = site.json(query(at=last["begin"]))
    assert int(before["lines"][-1].split()[1]) + 1 == int(last["lines"][0].split()[1])


def test_following_a_log_gives_whole_lines_and_notices_that_it_was_rotated(site):
    file = log_of(site)
    at = site.json(query())["end"]
    with open(file, "a") as log:
        log.write("one\ntwo\nthr")
    more = site.json(query("after", at=at))
    assert more["lines"] == ["one", "two"]
    with open(file, "a") as log:
        log.write("ee\n")
    assert site.json(query("after", at=more["end"]))["lines"] == ["three"]
    file.write_text("fresh\n")
    rotated = site.json(query("after", at=at))
    assert rotated["rotated"] and rotated["lines"] == ["fresh"]


def test_a_search_finds_lines_from_the_end_in_any_case(site):
    log_of(site).write_text(
        "".join(f"step {number} {'ERROR here' if number % 1000 == 0 else ''}\n" for number in range(200_000))
    )
    found = site.json(query("search", text="error"))
    assert [hit["text"] for hit in found["hits"][:2]] == ["step 199000 ERROR here", "step 198000 ERROR here"]
    assert len(found["hits"]) == 200 and found["next"] is None


def test_reads_of_a_log_of_a_gigabyte_are_bounded(site):
    file = log_of(site)
    with open(file, "wb") as log:
        log.truncate(1 << 30)  # a hole: no disk is filled
        log.seek(0, 2)
        log.write(b"\nthe end\n")
    page = site.json(query())
    assert page["lines"][-1] == "the end" and page["end"] - page["begin"] <= 128 << 10
    found = site.json(query("search", text="nothing like it"))
    assert found["hits"] == [] and found["searched"] <= 65 << 20 and found["next"] > 0
    assert len(json.dumps(site.json(query(at=1 << 20)))) < 1 << 20


def test_control_characters_and_progress_bars_of_a_log_are_shown_as_text(site):
    log_of(site).write_bytes(
        b"10%\r50%\r100%\n\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m \xff \xe2\x80\xae" + b"x" * 20_000 + b"\n"
    )
    first, second = site.json(query())["lines"]
    assert first == "100%" and second.startswith("red \ufffd ?x") and len(second) < 2100


@pytest.mark.parametrize(
    "name", ["../../../kgorch.db", "/etc/passwd", "rank0.log/../launch.json", "rank9.log", "metrics.jsonl", ""]
)
def test_no_file_but_a_log_of_the_run_can_be_read(site, name):
    assert site.client.get(f"/api{RUN}/logs", params={"attempt": "4.1", "file": name}).status_code == 404
    assert site.client.get(f"/api{RUN}/logs", params={"attempt": "../4.1", "file": "rank0.log"}).status_code == 404


# system


def test_memory_and_power_are_drawn_against_their_limits(site):
    charts = {chart["name"]: chart for chart in site.json(f"/api{RUN}/system")["charts"]}
    assert charts["gpu_memory"]["limit"] == 15 * lived_in.GIB and charts["power"]["limit"] == 70
    assert [line["key"] for line in charts["gpu"]["lines"]] == ["gpu0.util", "gpu1.util"]
    assert max(charts["data_wait"]["lines"][0]["y"]) > 20  # percent
    recent = site.json(f"/api{RUN}/system?window=recent")
    assert recent["span_s"] == 0 and len(recent["t"]) >= 500


def test_a_long_session_is_drawn_by_at_most_900_samples(site):
    last = sessions.last(site.state.engine, "surface-unet3d-1")
    site.home.telemetry(last.id, site.home.now - timedelta(days=3), site.home.now - timedelta(days=1), seconds=0)
    sessions.update_session(site.state.engine, last.id, started_at=site.home.now - timedelta(days=3))
    told = site.json(f"/api{RUN}/system")
    assert 400 < len(told["t"]) <= 900
