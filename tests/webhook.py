"""A web server of this machine that is told notices, and answers as it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Webhook:
    """`replies`: the statuses to come, then 200 for ever; `slow_s`: before each; `got`: the bodies that were taken."""

    port: int = 0
    replies: list[int] = field(default_factory=list)
    slow_s: float = 0.0
    got: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    logins: list[str | None] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> list[str]:
        return [body["event"] for body in self.got]


@contextmanager
def serving() -> Iterator[Webhook]:
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            hook.asked.append(self.path)
            hook.logins.append(self.headers["Authorization"])
            time.sleep(hook.slow_s)
            status = hook.replies.pop(0) if hook.replies else 200
            if status < 300:
                hook.got.append(body)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"{hook.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hook.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
