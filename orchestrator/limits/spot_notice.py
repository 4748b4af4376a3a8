"""Notices that a spot machine is taken back, asked for at the cloud's metadata server in a thread of its own.

A notice that was seen stays, whatever the server would say later: it is not asked any more. A server that fails is asked more
seldom and noted once: in a container that cannot reach it, it will never answer.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from orchestrator.core.backoff import Backoff
from orchestrator.core.codes import EventKind, Reason
from orchestrator.core.wall import Wall
from orchestrator.system.clock import boottime_s

EVERY_S, AT_MOST_S = 5.0, 15.0
"""AWS asks for every 5 s; of a notice of 30 s a pause of 15 s still leaves half."""

ANSWER_S = 3.0
ANSWER_BYTES = 1 << 16
AWS_NOTICE_S, GCP_NOTICE_S, AZURE_NOTICE_S = 120.0, 30.0, 15 * 60.0
"""Before the machine goes: docs.aws.amazon.com, spot-instance-termination-notices; googleapis, skipGuestOsShutdown; Azure says
30 s at least (platforms/azure.py), and its longest notice of any event is 15 minutes."""

SURELY_S = 30.0
"""What counts as left when the instant that was told has passed, and yet we run: one of the clocks is wrong."""


class Notices:
    """The notices of one cloud (limits/wall_sources.py, Source).

    Args:
        protocol: one of PROTOCOLS. base: URL of the server, without a path.
    """

    def __init__(self, protocol: str, base: str, *, every_s: float = EVERY_S) -> None:
        self.notes: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._look, self._server, self._every_s = PROTOCOLS[protocol](), _Server(base), every_s
        self._wall: Wall | None = None
        self._failed = ""
        self._stopping = threading.Event()
        threading.Thread(target=self._work, name="spot", daemon=True).start()

    def wall(self, now_s: float) -> Wall | None:
        return self._wall

    def stop(self) -> None:
        self._stopping.set()

    def _work(self) -> None:
        failures, backoff = 0, Backoff(2 * self._every_s, max(AT_MOST_S, self._every_s))
        while not self._stopping.is_set():
            try:
                left_s = self._look(self._server)
                self._failed, failures = "", 0
            except Exception as error:  # whatever the network and the server come up with
                left_s, failures = None, failures + 1
                self._note_once(f"{type(error).__name__}: {str(error)[:200]}")
            if left_s is not None:
                self._wall = Wall(boottime_s() + left_s, Reason.SPOT)
                self.notes.put((EventKind.SPOT_NOTICE, {"left_s": round(left_s, 1)}))
                return
            self._stopping.wait(backoff.after(failures) or self._every_s)

    def _note_once(self, why: str) -> None:
        if why != self._failed:
            self._failed = why
            self.notes.put((EventKind.SPOT_UNREACHABLE, {"why": why}))


class _Server:
    """Answers of one address. By http.client, so that neither a proxy nor a redirect leads elsewhere."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address, self._path = parts.netloc, parts.path.rstrip("/")

    def ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and text. Raises: OSError, HTTPException."""
        connection = self._kind(self._address, timeout=ANSWER_S)
        try:
            connection.request(method, self._path + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(ANSWER_BYTES).decode(errors="replace")
        finally:
            connection.close()


class _Aws:
    """IMDSv2: a token first, which lasts for six hours, then the instance's action; 404 while there is none."""

    def __init__(self) -> None:
        self._token = ""

    def __call__(self, server: _Server) -> float | None:
        status, said = self._ask(server)
        if status == 401:  # the token is over
            self._token = ""
            status, said = self._ask(server)
        if status == 404:
            return None
        at = _object(status, said).get("time")
        return _left_s(datetime.fromisoformat(str(at)), AWS_NOTICE_S)

    def _ask(self, server: _Server) -> tuple[int, str]:
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600", "Content-Length": "0"}
            status, self._token = server.ask("PUT", "/latest/api/token", headers)
            if status != 200:
                self._token = ""
                raise ValueError(f"no token: {status}")
        path, headers = "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
        return server.ask("GET", path, headers)


class _Gcp:
    """`preempted` turns TRUE, and the machine goes 30 s later; the 30 s count from the last look at which it was FALSE."""

    def __init__(self) -> None:
        self._false_s: float | None = None

    def __call__(self, server: _Server) -> float | None:
        path = "/computeMetadata/v1/instance/preempted"
        before_s = boottime_s()
        status, said = server.ask("GET", path, {"Metadata-Flavor": "Google"})
        if status != 200 or said.strip().upper() not in ("TRUE", "FALSE"):
            raise ValueError(f"{path}: {status} {said[:60]!r}")
        if said.strip().upper() == "FALSE":
            self._false_s = before_s
            return None
        gone_s = 0.0 if self._false_s is None else min(boottime_s() - self._false_s, AT_MOST_S)
        return GCP_NOTICE_S - gone_s


class _Azure:
    """Scheduled events reach all machines of a scale set; those that name others are not for us."""

    def __init__(self) -> None:
        self._name: str | None = None

    def __call__(self, server: _Server) -> float | None:
        status, said = server.ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        events = _object(status, said).get("Events")
        if not isinstance(events, list):
            raise ValueError(f"scheduledevents without Events: {said[:60]!r}")
        taken = [event for event in events if isinstance(event, dict) and event.get("EventType") == "Preempt"]
        mine = [event for event in taken if self._is_ours(event, server)]
        return min((_azure_left_s(event) for event in mine), default=None)

    def _is_ours(self, event: dict[str, Any], server: _Server) -> bool:
        """Also where we cannot learn our name: to stop in vain costs less than to be cut off."""
        named = event.get("Resources")
        if not isinstance(named, list) or not named:
            return True
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            status, said = server.ask("GET", path, {"Metadata": "true"})
            if status != 200 or not said.strip():
                return True
            self._name = said.strip().lower()
        return self._name in (str(name).lower() for name in named)


def _azure_left_s(event: dict[str, Any]) -> float:
    if not event.get("NotBefore"):  # it has begun
        return SURELY_S
    return _left_s(parsedate_to_datetime(str(event["NotBefore"])), AZURE_NOTICE_S)


def _object(status: int, said: str) -> dict[str, Any]:
    """Raises: ValueError."""
    if status != 200:
        raise ValueError(f"the metadata server answers {status}")
    found = json.loads(said)
    if not isinstance(found, dict):
        raise ValueError(f"no object: {said[:60]!r}")
    return found


def _left_s(at: datetime, notice_s: float) -> float:
    """Seconds until an instant that the cloud's clock tells, as far as ours can be right: no notice is longer than `notice_s`."""
    left_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time()
    return min(left_s, notice_s) if left_s > 0 else SURELY_S


PROTOCOLS: dict[str, Callable[[], Callable[[_Server], float | None]]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}
