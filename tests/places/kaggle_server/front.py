"""The stand-in's way in: a proxy that answers CONNECT with a certificate of its own authority, and gives requests to the server."""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trustme
from places.kaggle_server.faults import Fault
from places.kaggle_server.values import ApiError

if TYPE_CHECKING:
    from places.kaggle_server.server import KaggleServer

HOSTS = ("api.kaggle.com", "www.kaggle.com", "storage.googleapis.com", "www.kaggleusercontent.com")
CHUNK = 1 << 16
SLOW_PARTS = 12


class Cut(Exception):
    """The connection is to be closed without an answer."""


def make_certificates(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """The context for CONNECT, and the file of the authority that the client must trust."""
    authority = trustme.CA()
    folder.mkdir(parents=True, exist_ok=True)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*HOSTS).configure_cert(context)
    return context, folder / "ca.pem"


class Front(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, server: KaggleServer, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kaggle, self.context = server, context

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Front
    host = ""
    timeout = 120

    def log_message(self, *words: Any) -> None:
        pass

    def do_CONNECT(self) -> None:
        self.host = self.path.partition(":")[0]
        if self.host not in HOSTS:
            self.send_error(502, "no such host")
            return
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            self.connection = self.server.context.wrap_socket(self.connection, server_side=True)
        except (ssl.SSLError, OSError):
            self.close_connection = True
            return
        self.rfile = self.connection.makefile("rb", -1)
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False
        while not self.close_connection:
            self.handle_one_request()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def do_POST(self) -> None:
        match = re.fullmatch(r"/v1/([\w.]+)/(\w+)", self.path)
        body = self._body()
        if self.host != "api.kaggle.com" or not match:
            self._send_json(404, {"code": 404, "message": f"no {self.host}{self.path}"})
            return
        try:
            status, answer, headers = self.server.kaggle.answer(match[2], body, self.headers)
            if isinstance(answer, bytes):
                self._send(status, answer, {"Content-Type": "application/json"} | headers)
            else:
                self._send_json(status, answer, headers)
        except Cut:
            self._cut()

    def do_PUT(self) -> None:
        kaggle = self.server.kaggle
        token = self.path.rpartition("/")[2]
        content_range = self.headers.get("Content-Range", "")
        fault = kaggle.take_fault("PUT") if not content_range.startswith("bytes */") else None
        kaggle.record("PUT", {"token": token, "range": content_range})
        if fault and fault.kind == "half":
            content = self.rfile.read(int(self.headers["Content-Length"]) // 2)
            kaggle.datasets.put(token, content_range, content)
            if not fault.status:
                self._cut()
                return
            self.close_connection = True  # the other half is still on its way
            self._send(fault.status, b"", {"Connection": "close"})
            return
        content = self._body()
        try:
            kaggle.do_fault(fault)
        except Cut:
            self._cut()
            return
        except ApiError as error:
            self._send(error.status, b"", {})
            return
        status, headers = kaggle.datasets.put(token, content_range, content)
        self._send(status, b"", headers)

    def do_GET(self) -> None:
        if match := re.match(r"/v1/kernels/logs/stream/([\w-]+)/([\w-]+)", self.path):
            self._log(match[1], match[2])
        elif match := re.match(r"/kf/(\w+)\?", self.path):
            self._file(match[1])
        else:
            self._send_json(404, {"code": 404, "message": "not found"})

    def _log(self, owner: str, slug: str) -> None:
        kaggle = self.server.kaggle
        kaggle.record("LogStream", {"userName": owner, "kernelSlug": slug})
        try:
            fault = kaggle.take_fault("LogStream")
            if fault and not fault.events:
                kaggle.do_fault(fault)
            kaggle.check_login(self.headers)
            is_over, events = kaggle.kernels.log_events({"userName": owner, "kernelSlug": slug})
        except Cut:
            self._cut()
            return
        except ApiError as error:
            self._send_json(error.status, {"code": error.status, "message": error.message})
            return
        if is_over:
            self._send_json(200, list(events))
            return
        self._stream(events, fault)

    def _stream(self, events: Any, fault: Fault | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(events):
            if fault and number == fault.events:
                self._cut()
                return
            self._chunk(f"data: {json.dumps(event)}\n\n".encode())
        self._chunk(b"data: END_OF_LOG\n\n")
        self._chunk(b"")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def _file(self, key: str) -> None:
        kaggle = self.server.kaggle
        kaggle.record("File", {"key": key, "range": self.headers.get("Range", "")})
        fault = kaggle.take_fault("File")
        try:
            if fault and fault.kind not in ("half", "slow", "huge"):
                kaggle.do_fault(fault)
        except Cut:
            self._cut()
            return
        except ApiError as error:
            self._send(error.status, b"<html>an error of the storage</html>", {})
            return
        path = kaggle.kernels.file_of(key)
        if path is None:
            self._send(403, b"<html>expired</html>", {})
            return
        content = path.read_bytes()
        tag = f'"{path.stat().st_mtime_ns:x}-{len(content):x}"'
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": tag}
        start = 0
        if (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) and self.headers.get("If-Range") in (
            None,
            tag,
        ):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if fault and fault.kind == "huge":
            self._send(200, b"", headers | {"Content-Length": str(1 << 60)})
            self._cut()
            return
        if fault and fault.kind == "slow":
            self._send_slowly(content, headers, fault.seconds)
            return
        if fault:
            self._send(206 if start else 200, content[start : (start + len(content)) // 2],
                       headers | {"Content-Length": str(len(content) - start)})  # fmt: skip
            self._cut()
            return
        self._send(206 if start else 200, content[start:], headers)

    def _send_slowly(self, content: bytes, headers: dict[str, str], seconds: float) -> None:
        size = len(content) // SLOW_PARTS + 1
        self._send(200, b"", headers | {"Content-Length": str(len(content))})
        for start in range(0, len(content), size):
            wait(seconds / SLOW_PARTS, lambda: False)
            self.wfile.write(content[start : start + size])


def wait(seconds: float, is_closed: Any) -> None:
    """Say nothing for so long, or until the server is closed."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and not is_closed():
        time.sleep(0.05)
