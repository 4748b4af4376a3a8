"""The channel between nodes: who may connect, and what a stranger can do."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest
from harness import wait_until

from kgorch.nodes import channel
from kgorch.nodes.channel import AgentListener, NotAuthentic

SECRETS = {1: b"one" * 10, 2: b"two" * 10}


@pytest.fixture
def listener() -> Iterator[AgentListener]:
    with selectors.DefaultSelector() as selector:
        made = AgentListener("127.0.0.1", SECRETS.get, selector)
        yield made
        made.close()


def test_an_agent_with_the_secret_is_handed_on_and_learns_the_other_clock(listener):
    connection, ahead_s = channel.connect("127.0.0.1", listener.port, 1, SECRETS[1])
    served = wait_until(listener.accept)
    served.sendall(b"line\n")
    assert connection.recv(10) == b"line\n"
    assert abs(ahead_s) < 1.0  # the same machine
    connection.close()
    served.close()


@pytest.mark.parametrize(("node", "secret"), [(1, b"wrong"), (1, SECRETS[2]), (3, SECRETS[1]), (-1, b"")])
def test_an_agent_without_the_secret_of_its_node_is_refused(listener, node, secret):
    with pytest.raises(ConnectionError):
        channel.connect("127.0.0.1", listener.port, node, secret)
    assert listener.accept() is None


@pytest.mark.parametrize(
    "line", [b"\n", b"[]\n", b"{}\n", b'{"node": "x"}\n', b"x" * 600, b'{"node": 1, "nonce": [], "proof": 5}\n']
)
def test_what_is_no_greeting_is_closed(listener, line):
    with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as stranger:
        stranger.sendall(line)
        content = b"".join(iter(lambda: _received(stranger), b""))
    assert content.count(b"\n") == 1  # its own nonce, and nothing else
    assert listener.accept() is None


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1000)
    except ConnectionResetError:
        return b""


def test_strangers_that_say_nothing_keep_no_agent_out_for_long(listener):
    strangers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(channel.MAX_STRANGERS * 2)]
    connection, _ = channel.connect_patiently("127.0.0.1", listener.port, 1, SECRETS[1])
    assert wait_until(listener.accept)
    for stranger in [*strangers, connection]:
        stranger.close()


def test_a_server_that_does_not_know_the_secret_learns_nothing_and_is_left():
    with socket.create_server(("127.0.0.1", 0)) as false_server:
        false_server.settimeout(10)
        import threading

        def play() -> None:
            peer, _ = false_server.accept()
            peer.sendall(b'{"nonce": "00"}\n')
            peer.recv(600)
            peer.sendall(b'{"proof": "00", "boottime_s": 1.0}\n')

        threading.Thread(target=play, daemon=True).start()
        with pytest.raises(NotAuthentic):
            channel.connect("127.0.0.1", false_server.getsockname()[1], 1, SECRETS[1])
