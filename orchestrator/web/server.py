"""Serves the page until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from kgorch.errors import KgorchError
from kgorch.web.access import Gate
from kgorch.web.app import create_app
from kgorch.web.state import WebState

DEFAULT_PORT = 8642
LIVE_CONNECTIONS = 256
"""More are answered with 503."""


def listen(host: str, port: int | None) -> socket.socket:
    """A socket at that address; without a port the default one, or any free one where another program has that.

    Raises: KgorchError.
    """
    try:
        return _bound(host, DEFAULT_PORT if port is None else port)
    except (OSError, UnicodeError) as error:  # a name that no resolver can be asked for
        code = getattr(error, "errno", None)
        if port is None and code == errno.EADDRINUSE:
            return _bound(host, 0)
        if code == errno.EADDRINUSE:
            raise KgorchError(
                f"another program uses port {port} of {host}", next_step="kgorch web --port 0    (takes a free one)"
            ) from None
        if isinstance(error, socket.gaierror | UnicodeError) or code == errno.EADDRNOTAVAIL:
            raise KgorchError(
                f"{host!r} is not an address of this machine", next_step="kgorch web --host 0.0.0.0    (all addresses)"
            ) from None
        raise KgorchError(f"cannot listen at {host}:{port}", str(error), next_step="kgorch web --port 0") from None


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # a page that was stopped just now leaves connections that wait; two servers still cannot listen at the same time
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


def is_local(host: str) -> bool:
    """Whether that address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(bound: socket.socket, gate: Gate) -> str:
    """The address to open in a browser of this machine."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}/login" + (f"?token={gate.token}" if gate.password is None else "")


class Server(uvicorn.Server):
    """Ends the streams of open pages first, for which uvicorn would wait. A signal is the normal end, not an error."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()  # not before: until now a signal would have ended the process as by default

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.stop()

    def stop(self) -> None:
        self.config.app.state.site.is_stopping = True  # type: ignore[union-attr]
        self.should_exit = True


def make_server(state: WebState, gate: Gate, on_ready: Callable[[], None] = lambda: None) -> Server:
    """A server that `run(sockets=[…])` starts; it ends with SIGINT, SIGTERM or `stop`.

    Args:
        on_ready: called once it answers requests and takes signals.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(
        create_app(state, gate),
        log_level="warning",
        access_log=False,  # addresses hold the token
        proxy_headers=False,
        server_header=False,
        limit_concurrency=LIVE_CONNECTIONS,
        timeout_graceful_shutdown=3,
        lifespan="off",
    )
    return Server(config, on_ready)
