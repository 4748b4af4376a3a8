"""Notices that a spot machine is reclaimed, queried from the cloud's metadata server in a thread.

A notice is final: once there is one, the server is not queried again. It may end before the machine does, and nothing that it
answers later counts. A server that fails is queried less often and its failure recorded once: in a container that cannot reach
it, it will never answer.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from kgorch.core.backoff import Backoff
from kgorch.core.codes import EventKind, Reason
from kgorch.core.limits.wall import Wall
from kgorch.limits.source import News
from kgorch.system.clock import boottime_s

EVERY_S, MAX_PAUSE_S = 5.0, 15.0
"""Seconds between two queries, and the longest pause after failures. AWS recommends 5 s; 15 s leave half of a notice of 30 s."""

ANSWER_S = 3.0
"""Seconds that the server has to answer."""

ANSWER_BYTES = 1 << 16
"""Bytes that are read of an answer."""

AWS_NOTICE_S, GCP_NOTICE_S, AZURE_NOTICE_S = 120.0, 30.0, 15 * 60.0
"""Seconds between notice and end. docs.aws.amazon.com, spot-instance-termination-notices; googleapis, skipGuestOsShutdown; Azure
promises 30 s at least (platforms/azure.py), and the longest notice of any of its events is 15 minutes."""

OVERDUE_S = 30.0
"""Seconds that count as left where the machine should have ended by now, and has not: one of the clocks is wrong."""


class SpotNoticeSource:
    """The notices of one cloud, as a source (limits/source.py).

    Args:
        protocol: one of PROTOCOLS.
        base: URL of the server, without a path.
    """

    def __init__(self, protocol: str, base: str, *, every_s: float = EVERY_S) -> None:
        self.news = News()
        self._query, self._server, self._every_s = PROTOCOLS[protocol](), _MetadataServer(base), every_s
        self._wall: Wall | None = None
        self._failure = ""
        self._stopping = threading.Event()
        threading.Thread(target=self._work, name="spot", daemon=True).start()

    def wall(self, now_s: float) -> Wall | None:
        return self._wall

    def stop(self) -> None:
        self._stopping.set()

    def _work(self) -> None:
        failures, backoff = 0, Backoff(2 * self._every_s, max(MAX_PAUSE_S, self._every_s))
        while not self._stopping.is_set():
            try:
                left_s = self._query(self._server)
                self._failure, failures = "", 0
            except Exception as error:  # the answer may be anything, and so may what parsing it raises
                left_s, failures = None, failures + 1
                self._note_once(f"{type(error).__name__}: {str(error)[:200]}")
            if left_s is not None:
                self._wall = Wall(boottime_s() + left_s, Reason.SPOT)
                self.news.note(EventKind.SPOT_NOTICE, {"left_s": round(left_s, 1)})
                self.news.wall_moved()
                return  # the notice is final
            self._stopping.wait(backoff.after(failures) or self._every_s)

    def _note_once(self, why: str) -> None:
        if why != self._failure:
            self._failure = why
            self.news.note(EventKind.SPOT_UNREACHABLE, {"why": why})


class _MetadataServer:
    """Requests to one address. By http.client, so that neither a proxy nor a redirect leads elsewhere."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address, self._path = parts.netloc, parts.path.rstrip("/")

    def request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and text of the response. Raises: OSError, HTTPException."""
        connection = self._connection_class(self._address, timeout=ANSWER_S)
        try:
            connection.request(method, self._path + path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(ANSWER_BYTES).decode(errors="replace")
        finally:
            connection.close()


class _Aws:
    """IMDSv2: first a token, which is valid for six hours, then the instance's action; 404 while there is none."""

    def __init__(self) -> None:
        self._token = ""

    def __call__(self, server: _MetadataServer) -> float | None:
        status, text = self._query(server)
        if status == 401:  # the token has expired
            self._token = ""
            status, text = self._query(server)
        if status == 404:
            return None
        at = _parse_object(status, text).get("time")
        return _left_s(datetime.fromisoformat(str(at)), AWS_NOTICE_S)

    def _query(self, server: _MetadataServer) -> tuple[int, str]:
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600", "Content-Length": "0"}
            status, self._token = server.request("PUT", "/latest/api/token", headers)
            if status != 200:
                self._token = ""
                raise ValueError(f"no token: {status}")
        path, headers = "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
        return server.request("GET", path, headers)


class _Gcp:
    """`preempted` turns TRUE, and the machine ends 30 s later. When it did is not reported: the 30 s count from the last FALSE."""

    def __init__(self) -> None:
        self._last_false_s: float | None = None

    def __call__(self, server: _MetadataServer) -> float | None:
        path = "/computeMetadata/v1/instance/preempted"
        before_s = boottime_s()
        status, text = server.request("GET", path, {"Metadata-Flavor": "Google"})
        if status != 200 or text.strip().upper() not in ("TRUE", "FALSE"):
            raise ValueError(f"{path}: {status} {text[:60]!r}")
        if text.strip().upper() == "FALSE":
            self._last_false_s = before_s
            return None
        # bounded: after a time without answers the last FALSE may be minutes ago
        ago_s = 0.0 if self._last_false_s is None else min(boottime_s() - self._last_false_s, MAX_PAUSE_S)
        return GCP_NOTICE_S - ago_s


class _Azure:
    """Scheduled events. All machines of a scale set get them; those that name other machines do not count."""

    def __init__(self) -> None:
        self._name: str | None = None

    def __call__(self, server: _MetadataServer) -> float | None:
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        status, text = server.request("GET", path, {"Metadata": "true"})
        events = _parse_object(status, text).get("Events")
        if not isinstance(events, list):
            raise ValueError(f"scheduledevents without Events: {text[:60]!r}")
        preemptions = [event for event in events if isinstance(event, dict) and event.get("EventType") == "Preempt"]
        ours = [event for event in preemptions if self._is_ours(event, server)]
        return min((_azure_left_s(event) for event in ours), default=None)

    def _is_ours(self, event: dict[str, Any], server: _MetadataServer) -> bool:
        """Also where this machine's name is not known: stopping for nothing costs less than being cut off."""
        names = event.get("Resources")
        if not isinstance(names, list) or not names:
            return True
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            status, text = server.request("GET", path, {"Metadata": "true"})
            if status != 200 or not text.strip():
                return True
            self._name = text.strip().lower()
        return self._name in (str(name).lower() for name in names)


def _azure_left_s(event: dict[str, Any]) -> float:
    if not event.get("NotBefore"):  # the event has started
        return OVERDUE_S
    return _left_s(parsedate_to_datetime(str(event["NotBefore"])), AZURE_NOTICE_S)


def _parse_object(status: int, text: str) -> dict[str, Any]:
    """The JSON object of a response. Raises: ValueError."""
    if status != 200:
        raise ValueError(f"the metadata server answers {status}")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"no object: {text[:60]!r}")
    return value


def _left_s(at: datetime, notice_s: float) -> float:
    """Seconds until an instant of the cloud's clock.

    Bounded, since our clock may be wrong: no notice is longer than `notice_s`, and where the instant has passed it is OVERDUE_S.
    """
    left_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time()
    return min(left_s, notice_s) if left_s > 0 else OVERDUE_S


PROTOCOLS: dict[str, Callable[[], Callable[[_MetadataServer], float | None]]] = {
    "aws": _Aws,
    "gcp": _Gcp,
    "azure": _Azure,
}
"""By the profile's `notice`: makes a function that queries the server. It returns the seconds until the machine ends, None without
a notice, and raises whatever a wrong answer makes it raise."""
