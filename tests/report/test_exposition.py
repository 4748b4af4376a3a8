"""`kgorch prometheus`: what is exported, its bounds, and that alert rules and dashboard name nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lived_in
import pytest
from answered import make_state
from sqlalchemy import insert, update

from kgorch.core.codes import RunState
from kgorch.db import runs, samples, sessions
from kgorch.db.engine import open_database
from kgorch.db.tables import Attempt, EventRow, Resume, SlurmJobRow
from kgorch.report import exposition

pytest.importorskip("prometheus_client")
DOCS = Path(__file__).parents[2] / "docs"
NAMES = {
    "kgorch_up",
    *(f"{family.name}_total" if family.kind == "counter" else family.name for family in exposition.FAMILIES),
}
ATTEMPTS = "kgorch_run_attempts"
LABELS = {family.name: family.labels for family in exposition.FAMILIES}


@pytest.fixture
def state(kgorch):
    make_state(kgorch.home, kgorch.folder)
    return kgorch


def parsed(text: str) -> dict[str, dict[tuple, float]]:
    """Name → labels, in the order of FAMILIES → value, by the library's own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            order = LABELS.get(sample.name.removesuffix("_total"), ())
            assert set(order) == set(sample.labels)
            found.setdefault(sample.name, {})[tuple(sample.labels[name] for name in order)] = sample.value
    return found


def test_a_gpu_of_another_node_has_the_nodes_number():
    at = datetime.now(UTC)
    sample = {"at": at.isoformat(), "values": {"gpu0.util": 50.0, "node2.gpu1.util": 100.0, "node2.host.mem_used": 1.0}}
    found = {point.labels: point.value for point in exposition._telemetry(("digits", "1"), sample, at)}
    assert found == {("digits", "1", "0"): 0.5, ("digits", "1", "2:1"): 1.0}


def test_runs_quotas_queue_and_gpus_are_exported_in_base_units(state):
    found = parsed(state("prometheus").stdout)
    run = ("digits", "1")
    assert found["kgorch_up"] == {(): 1.0} and found["kgorch_runs"] == {(): 2.0}
    assert {(labels[0], *labels[2:4]) for labels in found["kgorch_run_info"]} == {
        ("digits", "active", "suspended"), ("ink", "finished", "finished"),
    }  # fmt: skip
    assert found["kgorch_run_step"][run] == 10 and found["kgorch_run_planned_steps"][run] == 40
    assert found["kgorch_run_metric"][(*run, "dice")] == 0.5
    assert found["kgorch_run_checkpoint_size_bytes"][run] == 2048
    assert found["kgorch_run_sessions_total"][run] == 1
    assert found["kgorch_gpu_memory_used_bytes"][(*run, "0")] == 2.0**30
    assert found["kgorch_quota_limit_seconds"][("kaggle",)] == 108_000
    assert found["kgorch_quota_left_seconds"][("kaggle",)] < 108_000
    assert found["kgorch_queued_runs"] == {("due",): 1.0, ("claimed",): 0.0}
    assert set(found) <= NAMES
    for at in ("checkpoint", "heartbeat"):
        assert abs(found[f"kgorch_run_{at}_timestamp_seconds"][run] - datetime.now(UTC).timestamp()) < 3600


def test_names_follow_the_conventions():
    for family in exposition.FAMILIES:
        assert re.fullmatch(r"kgorch(_[a-z]+)+", family.name) and family.help.endswith(".")
        assert not family.name.endswith("_total") and not re.search(r"_(ms|mib|percent|hours)(_|$)", family.name)


def test_odd_names_are_escaped_and_the_number_of_series_is_bounded(state):
    engine = open_database(state.home)
    run = runs.newest(engine, "digits")
    session = sessions.last(engine, run.id)
    names = ['a"b\\c\n{x="1"}', "x" * 10_000, "x" * 9_000, *(f"m{number}" for number in range(2000))]
    sessions.update_session(engine, session.id, metrics=dict.fromkeys(names, 1.0) | {"none": float("nan")})
    of_run = {labels[2] for labels in parsed(state("prometheus").stdout)["kgorch_run_metric"] if labels[0] == "digits"}
    assert len(of_run) == exposition.MAX_METRICS and max(map(len, of_run)) == exposition.MAX_LABEL
    for number in range(70):
        runs.create(
            engine, id=f"r{number}", name=f"many{number}", number=1, folder=run.folder, workdir="", checkpoints="", plan="",
            overrides=[], plan_hash="h", stages=["train"],
        )  # fmt: skip
    assert len(parsed(state("prometheus").stdout)["kgorch_run_info"]) == exposition.MAX_RUNS
    sessions.update_session(engine, session.id, phase="training")
    named = {labels[0] for labels in parsed(state("prometheus").stdout)["kgorch_run_info"]}
    assert "digits" in named, "what trains comes before newer runs that do not"


@pytest.mark.parametrize("last", ["remote", "slurm", "no successor", "queue"])
def test_a_run_that_fails_without_a_recent_session_here_is_exported_for_a_day(tmp_path, last):
    """An alert would have nothing to see of a run that failed at Kaggle, in Slurm's queue, or because no start came off."""
    home = lived_in.Home(tmp_path / "home")
    home.run("digits", age=timedelta(days=5))
    if last != "remote":
        home.session("digits-1", 1, home.now - timedelta(days=4), home.now - timedelta(days=3), 0, 10)
        home.event("digits-1", None, home.now - timedelta(days=3), "run_chosen")
    row = {"run_id": "digits-1", "state": "failed"}
    if last == "queue":
        home.add(Resume, row | {"created_at": home.now - timedelta(days=3), "claimed_at": home.now})
    elif (
        last == "no successor"
    ):  # Slurm refused it: the job before ended in the same transaction, and no event tells of either
        then = dict.fromkeys(("submitted_at", "seen_at"), home.now - timedelta(days=3))
        home.add(SlurmJobRow, row | then | {"name": "digits", "ended_at": home.now})
    else:
        home.event("digits-1", None, home.now, f"{last}_ended")
    runs.set_state(home.engine, "digits-1", RunState.FAILED, "the place refused it")
    for hours, values in ((1, [1.0]), (25, [])):
        points = exposition.points(home.engine, now=home.now + timedelta(hours=hours))
        assert [point.value for point in points if point.family == "kgorch_run_failed"] == values, hours


def test_a_counter_counts_all_that_has_happened(state):
    engine = open_database(state.home)
    run = runs.newest(engine, "digits")
    before = {point.labels: point.value for point in exposition.points(engine) if point.family == ATTEMPTS}
    later, failures = sessions.RECENT_SESSIONS + 5, 1200
    with engine.begin() as connection:
        events = [{"run_id": run.id, "at": run.created_at, "kind": "save_failed", "phase": "training", "facts": {}}]
        connection.execute(insert(EventRow), events * failures)
    for number in range(later):
        session = sessions.open_session(engine, run.id, boot_id="b", step=5, first_step=5)
        if number < 5:
            about = {"stage": "train", "ranks": 1, "first_step": 5, "folder_of": lambda _: str(state.folder)}
            attempt = sessions.open_attempt(engine, session.id, **about)
            with engine.begin() as connection:
                connection.execute(update(Attempt).where(Attempt.id == attempt.id).values(outcome="lost"))
        sessions.update_session(engine, session.id, phase="suspended")
    points = exposition.points(engine)
    [saves] = [
        item.value for item in points if item.family == "kgorch_run_save_failures" and item.labels[0] == "digits"
    ]
    assert saves == failures
    now = {point.labels: point.value for point in points if point.family == ATTEMPTS}
    assert now == before | {("digits", "1", "lost"): before["digits", "1", "lost"] + 5}


def test_an_old_sample_says_nothing_of_now(engine, state):
    there = open_database(state.home)
    later = datetime.now(UTC) + timedelta(minutes=5)
    found = {point.family for point in exposition.points(there, now=later)}
    assert "kgorch_run_step" in found and "kgorch_gpu_memory_used_bytes" not in found
    assert samples.newest(there, sessions.last(there, "digits").id)


def test_the_file_for_node_exporter_is_replaced_whole_and_readable_by_others(state):
    path = state.folder / "kgorch.prom"
    state("prometheus", "--textfile", str(path))
    assert parsed(path.read_text())["kgorch_up"] == {(): 1.0} and path.stat().st_mode & 0o777 == 0o644
    assert [item.name for item in state.folder.glob("kgorch.prom*")] == ["kgorch.prom"]
    assert "there is no such folder" in state("prometheus", "--textfile", "missing/kgorch.prom", code=2).stderr


def test_a_database_that_cannot_be_read_is_a_value_and_no_error(tmp_path):
    from kgorch.cli.exposition import Exposition

    (tmp_path / "kgorch.db").write_bytes(b"no database" * 1000)
    assert parsed(Exposition(tmp_path).text()) == {"kgorch_up": {(): 0.0}}


def test_an_endpoint_answers_on_this_machine_under_its_own_name_alone(state):
    serving = state.background("prometheus", "--serve", "0")
    assert serving.stdout
    url = re.match(r"(http://127\.0\.0\.1:(\d+)/metrics);", serving.stdout.readline())
    assert url
    with urllib.request.urlopen(url[1], timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert parsed(answer.read().decode())["kgorch_up"] == {(): 1.0}
    openmetrics = urllib.request.Request(url[1], headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(openmetrics, timeout=60) as answer:
        assert answer.read().endswith(b"# EOF\n")
    for path, headers, method, code in (
        ("/metrics", {"Host": "evil.example"}, "GET", 403),
        ("/metrics", {"Host": f"127.0.0.1.evil.example:{url[2]}"}, "GET", 403),
        ("/metrics", {}, "POST", 405),
        ("/../kgorch.db", {}, "GET", 404),
    ):
        request = urllib.request.Request(f"http://127.0.0.1:{url[2]}{path}", headers=headers, method=method)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code == code, (path, headers)
    told = state("prometheus", "--serve", url[2], code=2).stderr
    assert f"cannot listen at 127.0.0.1:{url[2]}" in told and "next: give another port" in told


# The rules and the dashboard


def queries_of_dashboard() -> list[str]:
    dashboard = json.loads((DOCS / "prometheus" / "grafana.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return targets + [item["definition"] for item in dashboard["templating"]["list"] if item["type"] == "query"]


def test_the_dashboard_and_the_alert_rules_name_metrics_that_are_exported():
    rules = re.findall(r"expr: (.*)", (DOCS / "prometheus" / "alerts.yml").read_text())
    assert len(rules) >= 8 and len(queries_of_dashboard()) >= 12
    for query in [*rules, *queries_of_dashboard()]:
        named = set(re.findall(r"\bkgorch_\w+", query))
        assert named and named <= NAMES, query


def test_a_dashboards_panels_fill_a_grid_without_overlaps():
    dashboard = json.loads((DOCS / "prometheus" / "grafana.json").read_text())
    assert dashboard["schemaVersion"] >= 36 and dashboard["uid"] == "kgorch"
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert {target["refId"] for target in panel["targets"]} and panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's prometheus)")
def test_promtool_accepts_the_alert_rules_and_the_exposition(state):
    rules = subprocess.run(
        ["promtool", "check", "rules", str(DOCS / "prometheus" / "alerts.yml")], capture_output=True, text=True
    )
    assert rules.returncode == 0, rules.stdout + rules.stderr
    text = state("prometheus").stdout
    metrics = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert metrics.returncode == 0, metrics.stdout + metrics.stderr


def test_every_metric_is_documented():
    page = (DOCS / "prometheus.md").read_text()
    assert {name for name in NAMES if f"`{name}`" not in page} == set()
