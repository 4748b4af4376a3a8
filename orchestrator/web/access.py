"""Who may see the page and act through it.

- A request must name a host that is this machine's: a foreign name that resolves to 127.0.0.1 (DNS rebinding) is refused.
- A browser gets a session cookie (HttpOnly, SameSite=Strict) for the token in the printed URL, or for the password.
- Whatever acts needs the session's CSRF token in a header, and an Origin that is the page's own, where the browser sends one.
- Every answer forbids scripts, styles and connections from elsewhere (Content-Security-Policy), so that text that slipped through
  the escaping of a template still executes nothing and reports nowhere.

The cookie holds nothing but a random number and its signature, and the key lives as long as the process: a restart of
`kgorch web` ends all sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
MAX_BODY_BYTES = 64 << 10
MAX_PASSWORD = 1000
SAFE_METHODS = ("GET", "HEAD")
CSRF_HEADER = "x-csrf-token"

SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}
"""About 50 ms and 16 MB a try."""

TRY_INTERVAL_S = 1.0
"""Between two passwords that are tried, by whomever."""

App = Callable[..., Awaitable[None]]
Scope = MutableMapping[str, Any]


class Password:
    """A password of which only the scrypt hash is kept."""

    def __init__(self, password: str) -> None:
        self._salt = secrets.token_bytes(16)
        self._hash = self._hashed(password)
        self._lock = threading.Lock()
        self._last_s = float("-inf")

    def matches(self, password: str) -> bool:
        """At most one try a second, one after another: a guesser waits, whatever the number of its connections."""
        with self._lock:
            time.sleep(max(0.0, self._last_s + TRY_INTERVAL_S - time.monotonic()))
            is_right = hmac.compare_digest(self._hashed(password[:MAX_PASSWORD]), self._hash)
            self._last_s = float("-inf") if is_right else time.monotonic()
            return is_right

    def _hashed(self, password: str) -> bytes:
        return hashlib.scrypt(password.encode(errors="replace"), salt=self._salt, **SCRYPT)


class Gate:
    """The keys of one `kgorch web`.

    Args:
        port: part of the cookie's name, because cookies do not tell ports of a host apart.
        names: hosts besides this machine's own names and addresses by which it may be called.
        password: asked for instead of the token; None for a page that this machine alone can reach.

    Attributes:
        token: of the printed URL.
    """

    def __init__(self, port: int, names: tuple[str, ...] = (), password: Password | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        self.password = password
        self.cookie = f"kgorch_web_{port}"
        self._key = secrets.token_bytes(32)
        own = ("localhost", socket.gethostname(), socket.getfqdn()) if password else ("localhost",)
        self._names = {name.lower().rstrip(".") for name in (*own, *names)}

    def is_known_host(self, header: str) -> bool:
        """Whether the Host header names this machine: localhost, a loopback address; with a password its names and any address."""
        host = _host_of(header)
        if host is None:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host in self._names
        # A rebinding attack needs a name: with a literal address the browser is talking to whom it names.
        return address.is_loopback or self.password is not None

    def is_own_origin(self, origin: str | None, host: str) -> bool:
        """True without an Origin: other programs than browsers send none, and those need the CSRF token all the same."""
        return origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")

    def is_token(self, token: str) -> bool:
        return self.password is None and hmac.compare_digest(token.encode(), self.token.encode())

    def new_session(self) -> str:
        name = secrets.token_urlsafe(24)
        return f"{name}.{self._signed('session', name)}"

    def is_session(self, cookie: str | None) -> bool:
        name, _, signature = (cookie or "").partition(".")
        return hmac.compare_digest(signature.encode(), self._signed("session", name).encode())

    def csrf_token(self, cookie: str) -> str:
        return self._signed("csrf", cookie)

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()

    def set_cookie(self, response: Response) -> None:
        """Not `secure`: the page is served over HTTP, and a browser would not send the cookie."""
        response.set_cookie(self.cookie, self.new_session(), httponly=True, samesite="strict", path="/")


def _host_of(header: str) -> str | None:
    """The host of a Host header, without port and brackets; None if it is none."""
    if header.startswith("["):
        host, closed, rest = header[1:].partition("]")
        return host.lower() if closed and (not rest or rest[:1] == ":") else None
    host, _, port = header.partition(":")
    return host.lower().rstrip(".") if host and (not port or port.isdecimal()) else None


class AccessMiddleware:
    """Refuses what `Gate` does not let pass, before any route sees it. Pure ASGI, so that streams pass through unbuffered."""

    def __init__(self, app: App, gate: Gate, open_paths: tuple[str, ...]) -> None:
        self._app, self._gate, self._open_paths = app, gate, open_paths

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # the page has no web sockets, and nothing to do at start and end
            await _close(send)
            return
        request = Request(scope)

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in HEADERS if pair[0] not in present)]
                if b"cache-control" not in present:
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        answer = self._refusal(request) or _Bounded(self._app)
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Why the request is not let through; None if it is."""
        gate, host = self._gate, request.headers.get("host", "")
        if not gate.is_known_host(host):
            return _refused(421, "this page answers to the address that kgorch web printed, not to another name")
        if request.method not in (*SAFE_METHODS, "POST"):
            return _refused(405, "only GET and POST")
        is_open = any(
            request.url.path == path or (path.endswith("/") and request.url.path.startswith(path))
            for path in self._open_paths
        )
        if request.method == "POST" and not gate.is_own_origin(request.headers.get("origin"), host):
            return _refused(403, "the request comes from another page")
        if is_open:
            return None
        cookie = request.cookies.get(gate.cookie)
        if cookie is None or not gate.is_session(cookie):
            if request.method in SAFE_METHODS and "text/html" in request.headers.get("accept", ""):
                return Response(status_code=303, headers={"location": "/login"})
            return _refused(401, "open the address that kgorch web printed")
        if request.method == "POST":
            sent = request.headers.get(CSRF_HEADER, "")
            if not hmac.compare_digest(sent.encode(), gate.csrf_token(cookie).encode()):
                return _refused(403, "the page is older than the server: load it again")
        return None


class _Bounded:
    """Ends a request whose body is longer than any that the page sends."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        read = 0

        async def receive_bounded() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BODY_BYTES:
                return {"type": "http.disconnect"}
            return message

        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            await _refused(413, "the request is too long")(scope, receive, send)
        else:
            await self._app(scope, receive_bounded, send)


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status_code=status)


async def _close(send: Any) -> None:
    await send({"type": "websocket.close", "code": 1000})
