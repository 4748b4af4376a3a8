"""Where the page listens, and what `kgorch web` says about it."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from harness import wait_until

from kgorch.errors import KgorchError
from kgorch.web import access, server


@pytest.fixture
def busy():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_is_told_with_what_to_type(busy):
    with pytest.raises(KgorchError, match=f"another program uses port {busy}") as error:
        server.listen("127.0.0.1", busy)
    assert "--port 0" in error.value.next_step


def test_without_a_port_another_one_is_taken_where_the_default_is_in_use(busy, monkeypatch):
    monkeypatch.setattr(server, "DEFAULT_PORT", busy)
    with server.listen("127.0.0.1", None) as bound:
        assert bound.getsockname()[1] not in (0, busy)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "x" * 300, "a..b"])
def test_a_host_that_is_not_this_machine_is_told(host):
    with pytest.raises(KgorchError):
        server.listen(host, 0)


def test_the_printed_address_can_be_opened_here_whatever_it_listens_on():
    gate = access.Gate(1)
    with server.listen("0.0.0.0", 0) as bound:
        assert server.url_of(bound, gate).startswith("http://127.0.0.1:")
    assert server.is_local("127.0.0.1") and server.is_local("::1") and not server.is_local("0.0.0.0")


def test_another_address_needs_a_password_and_warns(kgorch):
    refused = kgorch("web", "--host", "0.0.0.0", "--port", "0", code=2)
    assert "needs a password" in refused.stderr and "KGORCH_WEB_PASSWORD" in refused.stderr
    kgorch.extra_env["KGORCH_WEB_PASSWORD"] = "correct horse"
    page = kgorch.background("web", "--host", "0.0.0.0", "--port", "0", "--no-open")
    warning, line = page.stdout.readline(), page.stdout.readline()
    assert warning.startswith("warning:") and "not encrypted" in warning and "token" not in line
    url = line.split()[-1]
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert b'type="password"' in answer.read()
    page.terminate()
    assert wait_until(lambda: page.poll() is not None) and page.returncode == 0
