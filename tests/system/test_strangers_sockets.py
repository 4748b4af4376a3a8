"""A socket that another user has put where ours is expected: nobody believes it, and a person is told."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_until

from kgorch.errors import KgorchError
from kgorch.protocol import codec, transport
from kgorch.protocol.messages import Response
from kgorch.protocol.run_files import KEEPER_SOCKET
from kgorch.protocol.transport import WrongOwner
from kgorch.scheduler import daemon_api
from kgorch.snapshots import keeper_client
from kgorch.system.sockets import control_socket

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@contextlib.contextmanager
def squatted(path: Path) -> Iterator[None]:
    """Another user's process listens there, and says yes to everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    server, (ready, tell) = socket.socket(socket.AF_UNIX), os.pipe()
    server.bind(str(path))
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setuid(NOBODY)
            server.listen()
            os.write(tell, b"!")
            while True:
                peer, _ = server.accept()
                with contextlib.suppress(OSError):
                    peer.recv(4096)
                    peer.sendall(codec.encode(Response(True, "training")) + b'{"ok": true, "pid": 1}\n')
                peer.close()
        os._exit(1)
    try:
        assert os.read(ready, 1) == b"!"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        server.close()
        os.close(ready)
        os.close(tell)


def test_a_strangers_socket_is_no_supervisors_no_keepers_and_no_daemons(tmp_path):
    for name in ("control.sock", KEEPER_SOCKET, daemon_api.SOCKET):
        with squatted(tmp_path / name), pytest.raises(WrongOwner, match=f"uid {NOBODY}"):
            transport.connect(tmp_path / name)
    with squatted(tmp_path / "a" / "control.sock"), pytest.raises(KgorchError, match="belongs to another user"):
        control_socket.ask(tmp_path / "a" / "control.sock", "stop")
    with squatted(tmp_path / "a" / KEEPER_SOCKET):
        assert keeper_client.newest(tmp_path / "a") is None
    with squatted(tmp_path / "a" / daemon_api.SOCKET), pytest.raises(KgorchError, match="belongs to another user"):
        daemon_api.ask(tmp_path / "a", "ping")


def test_who_asks_for_the_daemon_is_told_that_another_user_answers(kgorch):
    with squatted(kgorch.home / daemon_api.SOCKET):
        for verb in ("status", "stop"):
            said = kgorch("daemon", verb, code=2).stderr
            assert "daemon.sock belongs to another user" in said and f"uid {NOBODY}" in said and "next:" in said


def test_a_daemon_takes_the_place_of_a_strangers_socket(kgorch):
    path = kgorch.home / daemon_api.SOCKET
    with squatted(path):
        process = kgorch.background("daemon")
        wait_until(lambda: path.stat().st_uid == 0 and stat.S_IMODE(path.stat().st_mode) == 0o600)
        wait_until(lambda: daemon_api.ask(kgorch.home, "ping"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
