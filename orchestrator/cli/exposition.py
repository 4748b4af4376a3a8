"""The exposition of `kgorch prometheus` (report/exposition.py), written by prometheus-client: as text, as a file, over HTTP."""

from __future__ import annotations

import errno
import ipaddress
import socketserver
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kgorch.errors import KgorchError
from kgorch.system import files

if TYPE_CHECKING:
    from prometheus_client.core import Metric

READ_S = 10.0
"""Seconds that a client has to send its request: one that says nothing must not keep a thread."""

PATHS = ("/metrics", "/")


class Exposition:
    """What Prometheus is told of a state folder, read anew each time."""

    def __init__(self, home: Path) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise KgorchError(
                "kgorch prometheus needs prometheus-client",
                next_step="pip install 'kgorch[prometheus]'",
                error_code="KG902",
            ) from None
        self._home = home
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client: the families with their values. A database that cannot be read is a value, too."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from sqlalchemy.exc import SQLAlchemyError

        from kgorch.db.engine import open_database
        from kgorch.report import exposition

        try:
            engine = open_database(
                self._home
            )  # anew: the files may have been replaced, and connections must not add up
            try:
                found = exposition.points(engine)
            finally:
                engine.dispose()
            is_up = 1.0
        except (SQLAlchemyError, KgorchError):
            found, is_up = [], 0.0
        yield GaugeMetricFamily("kgorch_up", "1 if the state folder's database could be read.", is_up)
        for family, points in exposition.by_family(found):
            make = CounterMetricFamily if family.kind is exposition.Kind.COUNTER else GaugeMetricFamily
            metric = make(family.name, family.help, labels=family.labels)
            for point in points:
                metric.add_metric(list(point.labels), point.value)
            yield metric

    def text(self) -> str:
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry)).decode()

    def write(self, path: Path) -> None:
        """Replace the file when the new one is whole: the collector reads at any moment. Raises: KgorchError."""
        try:
            # node_exporter reads `*.prom` alone, so it does not see the file that is being written; it runs as another user
            files.write(path, self.text().encode(), mode=0o644)
        except OSError as error:
            what = "there is no such folder" if error.errno == errno.ENOENT else str(error)
            raise KgorchError(
                f"{path} cannot be written", what, next_step="give another path", error_code="KG503"
            ) from None

    def serve(self, host: str, port: int, say: Callable[[str], None]) -> int:
        """Answer until Ctrl-C. Args: say: told where it listens. Raises: KgorchError for an address that is in use."""
        from prometheus_client import make_wsgi_app

        app: Callable[..., Iterable[bytes]] = make_wsgi_app(self._registry)
        is_local = _is_loopback(host)

        def guarded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            refusal = _refusal(environ, is_local=is_local)
            if refusal:
                start_response(refusal, [("Content-Type", "text/plain")])
                return [f"{refusal}\n".encode()]
            return app(environ, start_response)

        try:
            server = _Server((host, port), _Handler)
        except OSError as error:
            raise KgorchError(
                f"cannot listen at {host}:{port}", error.strerror or str(error), next_step="give another port"
            ) from None
        server.set_app(guarded)
        with server:
            say(f"http://{host}:{server.server_port}/metrics; Ctrl-C ends it")
            if not is_local:
                say("anybody who reaches this address can read names, metrics and times of your runs")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return 0
        return 0


def _refusal(environ: Mapping[str, Any], *, is_local: bool) -> str:
    """The status with which a request is refused; empty for one that is answered.

    A page in a browser of this machine can reach a local port under a name of its own that it has let point here (DNS
    rebinding), and would read the answer. Such a request names another host.
    """
    if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
        return "405 Method Not Allowed"
    if environ.get("PATH_INFO") not in PATHS:
        return "404 Not Found"
    host = str(environ.get("HTTP_HOST", "")).rpartition(":")[0] or str(environ.get("HTTP_HOST", ""))
    return "403 Forbidden" if is_local and not _is_loopback(host.strip("[]")) else ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape each 15 s would fill the log."""
