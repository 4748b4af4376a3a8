"""Spot notices from a metadata server on this machine that speaks each cloud's protocol, also badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from harness import wait_until

from kgorch.core.codes import Reason
from kgorch.limits import spot_notice
from kgorch.system.clock import boottime_s

Answer = Callable[[str, str, Any], tuple[int, str]]
GARBAGE = ["", "null", "[]", "{", '{"time": 5}', '{"time": "soon"}', '{"Events": 3}', "<html>", "[" * 5000, "\x00\xff"]


class Metadata:
    """A server whose `answer(method, path, headers)` gives status and text; `asked` is what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.answer: Answer = lambda *_: (404, "")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                outer.asked.append((self.command, self.path))
                status, text = outer.answer(self.command, self.path, self.headers)
                body = text.encode("latin-1")
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = _any

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


@pytest.fixture
def listen(server) -> Iterator[Callable[[str], spot_notice.SpotNoticeSource]]:
    made: list[spot_notice.SpotNoticeSource] = []

    def listening(protocol: str, base: str = "") -> spot_notice.SpotNoticeSource:
        made.append(spot_notice.SpotNoticeSource(protocol, base or server.url, every_s=0.05))
        return made[-1]

    yield listening
    for notices in made:
        notices.stop()


def _left_s(notices: spot_notice.SpotNoticeSource) -> float:
    wall = wait_until(lambda: notices.wall(boottime_s()), within_s=30, what="a notice")
    assert wall.kind == Reason.SPOT
    return wall.at_s - boottime_s()


def _in(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def _aws(action: Callable[[], str | None]) -> Answer:
    """IMDSv2 as it is: no answer without a token."""

    def answer(method: str, path: str, headers: Any) -> tuple[int, str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, "t0ken") if headers["X-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
        if headers["X-aws-ec2-metadata-token"] != "t0ken":
            return 401, ""
        found = action() if path == "/latest/meta-data/spot/instance-action" else None
        return (404, "") if found is None else (200, found)

    return answer


def _azure(*events: dict[str, Any], name: str = "vm-7") -> Answer:
    def answer(method: str, path: str, headers: Any) -> tuple[int, str]:
        if headers["Metadata"] != "true":
            return 400, ""
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, name
        if path.startswith("/metadata/scheduledevents?api-version="):
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": list(events)})
        return 404, ""

    return answer


def _preempt(in_s: float, *resources: str, kind: str = "Preempt") -> dict[str, Any]:
    at = format_datetime(_in(in_s), usegmt=True)
    return {"EventId": "A", "EventType": kind, "EventStatus": "Scheduled", "NotBefore": at, "Resources": [*resources]}


def test_on_aws_a_token_that_is_over_is_made_anew_at_once_and_is_no_news(server, listen):
    good = ["first"]

    def answer(method: str, path: str, headers: Any) -> tuple[int, str]:
        if method == "PUT":
            return 200, good[0]
        return (404, "") if headers["X-aws-ec2-metadata-token"] == good[0] else (401, "")

    server.answer = answer
    notices = listen("aws")
    wait_until(lambda: len(server.asked) > 2)
    good[0] = "second"
    wait_until(lambda: [method for method, _ in server.asked].count("PUT") == 2)
    asked = len(server.asked)
    wait_until(lambda: len(server.asked) > asked + 2)
    assert not notices.news.undelivered and notices.wall(boottime_s()) is None


def test_on_aws_the_notice_is_asked_for_with_a_token_and_is_the_instant_it_tells(server, listen):
    told: list[str] = []
    server.answer = _aws(lambda: told[0] if told else None)
    notices = listen("aws")
    wait_until(lambda: len(server.asked) > 4)
    assert notices.wall(boottime_s()) is None
    assert [path for method, path in server.asked if method == "PUT"] == ["/latest/api/token"], "one token serves all"
    told.append(json.dumps({"action": "terminate", "time": _in(90).strftime("%Y-%m-%dT%H:%M:%SZ")}))
    assert 60 < _left_s(notices) <= 90
    assert notices.news.undelivered.pop(0)[0] == "spot_notice" and not notices.news.undelivered


def test_on_gcp_thirty_seconds_are_left_since_it_was_last_not_so(server, listen):
    told = ["FALSE"]
    server.answer = lambda method, path, headers: (
        (200, told[0])
        if headers["Metadata-Flavor"] == "Google" and path == "/computeMetadata/v1/instance/preempted"
        else (403, "")
    )
    notices = listen("gcp")
    wait_until(lambda: len(server.asked) > 2)
    assert notices.wall(boottime_s()) is None
    told[0] = "TRUE\n"
    assert 5 < _left_s(notices) <= 30


def test_on_azure_a_preemption_of_this_machine_is_a_notice_and_no_other_event_is(server, listen):
    others = _preempt(40, "vm-8"), _preempt(30, "vm-7", kind="Reboot"), _preempt(20, "vm-7", kind="Freeze")
    server.answer = _azure(*others)
    notices = listen("azure")
    wait_until(lambda: len(server.asked) > 4)
    assert notices.wall(boottime_s()) is None and not notices.news.undelivered
    server.answer = _azure(*others, _preempt(80, "VM-7"))
    assert 50 < _left_s(notices) <= 80


def test_on_azure_a_preemption_that_names_nobody_or_has_begun_is_ours_at_once(server, listen):
    server.answer = _azure(_preempt(80))
    assert 50 < _left_s(listen("azure")) <= 80
    server.answer = _azure({"EventType": "Preempt", "EventStatus": "Started", "NotBefore": "", "Resources": ["vm-7"]})
    assert 0 < _left_s(listen("azure")) <= spot_notice.OVERDUE_S


def test_a_notice_that_was_seen_stays_whatever_the_server_says_later(server, listen):
    server.answer = lambda *_: (200, "TRUE")
    notices = listen("gcp")
    _left_s(notices)
    seen, server.answer = notices.wall(boottime_s()), lambda *_: (200, "FALSE")
    server.close()
    assert notices.wall(boottime_s() + 60) == seen


@pytest.mark.parametrize("hours", [-24 * 365, -1, 1, 24 * 365])
def test_a_wrong_clock_makes_of_a_notice_neither_a_wall_in_the_past_nor_one_out_of_reach(server, listen, hours):
    at = _in(60 + 3600 * hours).strftime("%Y-%m-%dT%H:%M:%SZ")
    server.answer = _aws(lambda: json.dumps({"action": "stop", "time": at}))
    assert 5 < _left_s(listen("aws")) <= spot_notice.AWS_NOTICE_S


@pytest.mark.parametrize("protocol", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("status", [200, 500, 302])
def test_a_server_that_talks_nonsense_is_no_notice_is_noted_and_believed_once_it_makes_sense(
    server, listen, protocol, status
):
    said = iter(GARBAGE * 3)
    server.answer = lambda *_: (status, next(said, "?"))
    notices = listen(protocol)
    kind, facts = wait_until(lambda: notices.news.undelivered and notices.news.undelivered.pop(0))
    assert kind == "spot_unreachable" and facts["why"] and len(facts["why"]) < 300
    wait_until(lambda: len(server.asked) > 2)
    assert notices.wall(boottime_s()) is None
    at = _in(60).strftime("%Y-%m-%dT%H:%M:%SZ")
    server.answer = {
        "aws": lambda method, path, headers: (200, "t" if method == "PUT" else json.dumps({"time": at})),
        "gcp": lambda *_: (200, "TRUE"),
        "azure": _azure(_preempt(60)),
    }[protocol]
    assert _left_s(notices) > 0


def test_a_cause_is_noted_once_and_the_server_asked_more_seldom(listen, server, monkeypatch):
    monkeypatch.setattr(spot_notice, "MAX_PAUSE_S", 0.2)
    server.answer = lambda *_: (500, "down")
    notices = listen("gcp")
    wait_until(lambda: len(server.asked) > 5)
    assert notices.news.undelivered.pop(0)[0] == "spot_unreachable" and not notices.news.undelivered


def test_a_slow_server_and_none_at_all_hold_nobody_up(server, listen, monkeypatch):
    monkeypatch.setattr(spot_notice, "ANSWER_S", 0.3)
    gone = threading.Event()
    server.answer = lambda *_: (gone.wait(30), (200, "TRUE"))[1]
    began = time.monotonic()
    slow, none = listen("gcp"), listen("gcp", "http://127.0.0.1:9")
    for notices in (slow, none):
        assert notices.wall(boottime_s()) is None
    assert time.monotonic() - began < 5.0, "asking takes place in another thread"
    for notices in (slow, none):
        kind, _ = wait_until(lambda notices=notices: notices.news.undelivered and notices.news.undelivered.pop(0))
        assert kind == "spot_unreachable"
    gone.set()


def test_no_proxy_is_asked(server, listen, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    server.answer = lambda *_: (200, "TRUE")
    assert _left_s(listen("gcp")) > 0


@pytest.mark.slow
def test_a_training_that_is_told_in_time_saves_before_the_machine_goes(kgorch, server):
    told: list[datetime] = []
    server.answer = _aws(
        lambda: json.dumps({"action": "terminate", "time": told[0].strftime("%Y-%m-%dT%H:%M:%SZ")}) if told else None
    )
    platform = f'[platform]\nname = "aws"\nmetadata = "{server.url}"'
    plan = kgorch.plan(args={"epochs": 100_000, "sleep": 0.05}, extra=platform)
    supervisor = kgorch.background("start", str(plan))
    step = kgorch.wait_for_step(5)["step"]
    assert kgorch.status()["session"]["wall_at"] is None
    told.append(_in(40))
    assert supervisor.wait(timeout=90) == 10
    over = kgorch.status()
    assert datetime.fromisoformat(over["session"]["ended_at"]) < told[0], "over before the machine goes"
    assert (over["phase"], over["reason"]) == ("suspended", Reason.SPOT)
    assert over["checkpoint"]["verified"] and over["checkpoint"]["step"] == over["step"] > step
    [moved] = kgorch.events("wall_moved")
    assert moved["facts"]["wall"] == Reason.SPOT
    assert kgorch.events("spot_notice")
