"""Who may see the page: token, password, cookie, CSRF, origin, host, sizes."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import lived_in
import pytest
from starlette.testclient import TestClient

from kgorch.platforms.detect import detect
from kgorch.web import access, server
from kgorch.web.app import create_app
from kgorch.web.state import WebState

HOST = "127.0.0.1:8642"
RUN = "/runs/surface-unet3d/1"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("web") / "home"
    lived_in.furnish(folder).dispose()
    return folder


def client_of(home, gate):
    state = WebState(lived_in.open_database(home), home, detect())
    return TestClient(create_app(state, gate), base_url=f"http://{HOST}", follow_redirects=False)


@pytest.fixture
def gate():
    return access.Gate(8642)


@pytest.fixture
def stranger(home, gate):
    return client_of(home, gate)


@pytest.fixture
def client(stranger, gate):
    assert stranger.get(f"/login?token={gate.token}").status_code == 200
    return stranger


def csrf_of(client):
    return re.search(r'name="csrf" content="([0-9a-f]{64})"', client.get("/").text)[1]


def test_without_a_cookie_nothing_is_shown(stranger):
    assert stranger.get("/", headers={"accept": "text/html"}).headers["location"] == "/login"
    for path in ("/", RUN, "/api/runs", f"/api{RUN}/curves", f"/api{RUN}/logs?attempt=1.1&file=rank0.log"):
        assert stranger.get(path).status_code == 401, path
    assert "surface" not in stranger.get("/login").text


def test_the_printed_token_opens_the_page_with_a_cookie_that_scripts_and_other_sites_cannot_use(stranger, gate):
    answer = stranger.get(f"/login?token={gate.token}")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and gate.token.lower() not in cookie
    assert "surface-unet3d" in stranger.get("/").text


@pytest.mark.parametrize("token", ["", "x", "é" * 40, "a" * 10_000])
def test_a_wrong_token_opens_nothing(stranger, token):
    answer = stranger.get("/login", params={"token": token})
    assert "set-cookie" not in answer.headers
    assert stranger.get("/").status_code == 401


@pytest.mark.parametrize("cookie", ["x", "x.y", ".", "a" * 5000])
def test_a_made_up_cookie_is_none(stranger, gate, cookie):
    stranger.cookies.set(gate.cookie, cookie)
    assert stranger.get("/").status_code == 401


def test_a_cookie_of_an_earlier_server_is_none(client, home):
    cookies = dict(client.cookies)
    restarted = client_of(home, access.Gate(8642))
    restarted.cookies.update(cookies)
    assert restarted.get("/").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "", "[::1", "10.0.0.5:8642", "localhost:x"]
)
def test_a_foreign_host_name_is_refused_even_with_the_cookie(client, host):
    """DNS rebinding: the browser believes to be on evil.example, which now leads to 127.0.0.1."""
    assert client.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:8642", "127.0.0.1:9", "LOCALHOST", "[::1]:8642", "127.8.8.8"])
def test_this_machine_is_known_by_any_port_because_ssh_forwards_from_others(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


def test_an_action_needs_the_csrf_token(client):
    path = f"/api{RUN}/actions/unqueue"
    assert client.post(path, json={}).status_code == 403
    assert client.post(path, json={}, headers={"x-csrf-token": "0" * 64}).status_code == 403
    assert client.post(path, json={}, headers={"x-csrf-token": csrf_of(client)}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8642"])
def test_an_action_from_another_origin_is_refused_even_with_the_token(client, origin):
    headers = {"x-csrf-token": csrf_of(client), "origin": origin}
    assert client.post(f"/api{RUN}/actions/unqueue", json={}, headers=headers).status_code == 403


def test_an_action_is_not_done_by_get(client):
    assert client.get(f"/api{RUN}/actions/stop").status_code in (404, 405)
    assert client.put(f"/api{RUN}/actions/stop").status_code == 405


def test_a_long_request_is_refused(client):
    headers = {"x-csrf-token": csrf_of(client), "content-type": "application/json"}
    assert client.post(f"/api{RUN}/actions/queue", content=b"x" * 100_000, headers=headers).status_code == 413


def test_every_answer_forbids_scripts_from_elsewhere_and_inline(client):
    for path in ("/", "/login", "/nothing", RUN, "/static/page.css", f"/api{RUN}/timeline"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy, path
    assert client.get("/").headers["cache-control"] == "no-store"


def test_no_page_refers_to_another_machine_or_holds_inline_code(client):
    for page in ("", "/metrics", "/system", "/checkpoints", "/logs", "/plan"):
        text = client.get(RUN + page).text
        assert not re.search(r"(?:src|href|action)=[\"'](?:https?:)?//", text), page
        assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=", text), page


def test_a_password_opens_the_page_for_other_addresses_and_the_token_does_not(home):
    gate = access.Gate(8642, password=access.Password("correct horse"))
    client = client_of(home, gate)
    assert client.get("/", headers={"host": "10.0.0.5:8642"}).status_code == 401
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421
    assert "set-cookie" not in client.get(f"/login?token={gate.token}").headers
    wrong = client.post("/login", data={"password": "battery staple"})
    assert wrong.status_code == 403 and "set-cookie" not in wrong.headers
    assert (
        client.post("/login", data={"password": "correct horse"}, headers={"origin": "http://evil.example"}).status_code
        == 403
    )
    assert client.post("/login", data={"password": "correct horse"}).status_code == 200
    assert client.get("/").status_code == 200


def test_passwords_can_be_tried_once_a_second(monkeypatch):
    password, slept = access.Password("correct horse"), []
    monkeypatch.setattr(access.time, "sleep", slept.append)
    assert not password.matches("a") and not password.matches("b")
    assert slept[-1] > 0
    assert b"correct horse" not in password._hash


def test_wrong_passwords_hold_up_nobody_who_is_in_and_few_of_them_wait(home):
    gate, bound = access.Gate(8642, password=access.Password("correct horse")), server.listen("127.0.0.1", 0)
    running = server.make_server(WebState(lived_in.open_database(home), home, detect()), gate)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"

    def sign_in(password, within_s=120.0):
        return httpx2.post(f"{url}/login", data={"password": password}, timeout=within_s).status_code

    try:
        assert sign_in("battery staple") == 403
        with ThreadPoolExecutor(60) as guessers:
            guesses = [guessers.submit(sign_in, "battery staple") for _ in range(60)]
            time.sleep(0.5)  # until they have arrived
            for _ in range(3):
                answer = httpx2.get(url, cookies={gate.cookie: gate.new_session()}, timeout=5.0)
                assert answer.status_code == 200 and "surface-unet3d" in answer.text
            codes = [guess.result() for guess in guesses]
        assert set(codes) == {403, 429} and 1 <= codes.count(403) <= 10
        assert sign_in("correct horse") == 200
    finally:
        running.stop()
        thread.join(timeout=30)
        bound.close()


@pytest.mark.parametrize(
    "path", ["/static/../access.py", "/static/%2e%2e/access.py", "/static/..%2f..%2faccess.py", "/static//etc/passwd"]
)
def test_no_path_leads_out_of_the_static_files(client, path):
    answer = client.get(path)
    assert answer.status_code in (404, 405) and "class Gate" not in answer.text
