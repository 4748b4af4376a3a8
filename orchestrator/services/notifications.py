"""Notifications of the user: by a command, a webhook, or a service that Apprise supports. Training never waits for them.

Each target has a bounded queue and a thread of its own, so that a target that hangs delays neither the supervisor's loop nor the
other targets. A notice that is not delivered is tried again a bounded number of times. The end of a session waits END_S at most.

No message, error or journal entry holds a secret. A target's URL, command and environment may hold one, so a target is named by
its scheme, and by its host where the host is no secret (system/redaction.py). Of an error the kind is reported and not the text,
which may quote the URL. The targets themselves: services/notification_targets.py; the format: docs/notices.md.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.core.backoff import Backoff
from kgorch.core.codes import EventKind, Note, NoticeKind
from kgorch.core.session.notification_policy import Notice, NoticeFilter, index_to_drop
from kgorch.errors import PlanError
from kgorch.plan import NotifySection
from kgorch.protocol.values import escape_surrogates
from kgorch.services.notification_targets import VARIABLE, NotDelivered, Target, check_url, targets_of
from kgorch.system.clock import boottime_s

TRIES = 5
"""Deliveries of one notice to one target before it is given up."""

FIRST_RETRY_S = 1.0
"""Seconds before the second try, give or take half of it; twice as long before each later one."""

END_S = 10.0
"""Seconds that the end of a session waits for notices at most."""

QUEUE_LENGTH = 32
"""Notices that wait for one target. Of more than these the least important one is dropped (`index_to_drop`)."""

LATE = "the session was over before it arrived"


class Delivery(NamedTuple):
    """How one notice to one target went.

    Attributes:
        target: its label.
        why: why the notice has not arrived; None if it has.
        took_s: seconds.
    """

    target: str
    why: str | None
    took_s: float


def check(section: NotifySection, environ: Mapping[str, str] = os.environ) -> None:
    """Check that every target can be used; nothing is sent.

    Raises: PlanError naming the variable that is not set, the package to install, or the URL that is not valid.
    """
    texts = {f"notify.urls[{index}]": url for index, url in enumerate(section.urls)}
    texts |= {f"notify.command[{index}]": word for index, word in enumerate(section.command)}
    for key, text in texts.items():
        for name in VARIABLE.findall(text):
            if not environ.get(name):
                raise PlanError(
                    f"{key}: the environment has no {name}",
                    next_step=f"set it: export {name}=…, or a secret of the platform",
                )
    for index, url in enumerate(section.urls):
        check_url(f"notify.urls[{index}]", url, environ)


class Notifier:
    """Sends the notices of one run to the targets of its plan. `tell` never waits and never raises.

    Args:
        run: its name, which the messages show.
        workdir: folder that a command runs in.
        note: takes entries for the journal from any thread: `notices_failed` (whenever the failing targets or their causes have
            changed), `notices_arrive` (when the last one delivers again), `notices_dropped`.
        environ: from which `${NAME}` is replaced; this process's by default.
    """

    def __init__(
        self, section: NotifySection, run: str, workdir: Path, note: Note, environ: Mapping[str, str] | None = None
    ) -> None:
        self._note = note
        self._run, self._filter = run, NoticeFilter([NoticeKind(kind) for kind in section.on])
        self._failing: dict[str, str] = {}  # why, by the target's label
        self._guard = threading.Lock()
        environ = dict(os.environ if environ is None else environ)
        self._senders = [
            _Sender(target, self._record, self._record_drop) for target in targets_of(section, workdir, environ)
        ]

    def tell(self, notice: Notice, **facts: Any) -> None:
        """Queue a notice for every target, unless the plan or the limit of its kind suppresses it.

        Args:
            facts: further fields of the message (docs/notices.md).
        """
        if self._senders and (accepted := self._filter.accept(notice, boottime_s())):
            kind, suppressed = accepted
            message = _message(kind, self._run, notice, facts | {"unsaid": suppressed})
            for sender in self._senders:
                sender.enqueue(message)

    def hurry(self) -> None:
        """The session ends: retry at once what waits for a later try, and pause FIRST_RETRY_S at most from here on."""
        for sender in self._senders:
            sender.hurry()

    @property
    def is_busy(self) -> bool:
        """Whether a notice is neither delivered nor given up yet."""
        return any(sender.is_busy for sender in self._senders)

    def finish(self, within_s: float) -> None:
        """Wait until nothing is left to deliver, at most so long; then stop."""
        until_s = time.monotonic() + within_s
        while self.is_busy and time.monotonic() < until_s:
            time.sleep(0.1)
        self.stop()

    def stop(self) -> None:
        """Cancel all deliveries, and record the targets that have not got everything."""
        # all are stopped before the first is waited for, so that they end at the same time
        for sender in self._senders:
            sender.stop()
        for sender in self._senders:
            sender.join(1.0)
            if (kind := sender.oldest_undelivered) is not None:
                self._record(sender.label, kind, LATE)

    def _record(self, target: str, event: str, why: str | None) -> None:
        """Take down a delivery, or why it failed. Only a change is recorded: a dead server would fill the journal."""
        with self._guard:
            before = dict(self._failing)
            if why is None:
                self._failing.pop(target, None)
            else:
                self._failing[target] = why
            if self._failing != before:
                kind = EventKind.NOTICES_FAILED if self._failing else EventKind.NOTICES_ARRIVE
                self._note(kind, {"event": event, "failing": dict(self._failing)})

    def _record_drop(self, target: str, event: str) -> None:
        self._note(EventKind.NOTICES_DROPPED, {"target": target, "event": event})


def test(section: NotifySection, run: str, workdir: Path, environ: Mapping[str, str] = os.environ) -> list[Delivery]:
    """Send a test notice to each target once, one after the other."""
    deliveries = []
    notice = Notice((NoticeKind.TEST,), "a test: what you read here has arrived")
    for target in targets_of(section, workdir, dict(environ)):
        began_s, why = time.monotonic(), None
        try:
            target.send(_message(NoticeKind.TEST, run, notice, {}))
        except NotDelivered as error:
            why = error.why
        except Exception as error:  # as in _Sender: its text may hold the URL
            why = type(error).__name__
        deliveries.append(Delivery(target.label, why, time.monotonic() - began_s))
    return deliveries


def _message(kind: str, run: str, notice: Notice, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The message that a webhook and a command's standard input get (docs/notices.md)."""
    defaults: dict[str, Any] = {"session": None, "stage": "", "step": None, "why": "", "metrics": {}, "unsaid": 0}
    fields = defaults | dict(facts) | dict(notice.facts)
    # JSON has neither NaN nor infinity
    fields["metrics"] = {name: value if math.isfinite(value) else None for name, value in fields["metrics"].items()}
    where = f" at step {fields['step']}" if fields["step"] else ""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in fields["metrics"].items() if value is not None)
    return {
        "event": kind,
        "run": run,
        "title": f"kgorch: {run} {kind}{where}",
        "text": escape_surrogates(notice.text) + (f" ({metrics})" if metrics else ""),
        "at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        **{name: escape_surrogates(value) if isinstance(value, str) else value for name, value in fields.items()},
    }


class _Sender:
    """Delivers notices to one target, in order: a queue, a thread, and retries with back-off.

    Args:
        record: called with the target's label, the notice's kind, and why it was not delivered (None if it was).
        record_drop: called with label and kind of a notice that the full queue has dropped.
    """

    def __init__(
        self, target: Target, record: Callable[[str, str, str | None], None], record_drop: Callable[[str, str], None]
    ) -> None:
        self._target, self._record, self._record_drop = target, record, record_drop
        self._guard = threading.Condition()
        self._waiting: list[Mapping[str, Any]] = []
        self._sending: Mapping[str, Any] | None = None
        self._is_stopping = self._is_hurried = False
        # a daemon thread: a target that hangs must not keep the process alive
        self._thread = threading.Thread(target=self._work, name="notices", daemon=True)
        self._thread.start()

    def enqueue(self, message: Mapping[str, Any]) -> None:
        with self._guard:
            self._waiting.append(message)
            if len(self._waiting) > QUEUE_LENGTH:
                kinds = [item["event"] for item in self._waiting]
                index = index_to_drop(kinds)
                del self._waiting[index]
                self._record_drop(self._target.label, kinds[index])
            self._guard.notify()

    def hurry(self) -> None:
        with self._guard:
            self._is_hurried = True
            self._guard.notify()

    @property
    def is_busy(self) -> bool:
        with self._guard:
            return bool(self._waiting) or self._sending is not None

    @property
    def oldest_undelivered(self) -> str | None:
        """The kind of the oldest notice that is not delivered; None for none."""
        with self._guard:
            undelivered = self._waiting if self._sending is None else [self._sending]
            return undelivered[0]["event"] if undelivered else None

    @property
    def label(self) -> str:
        return self._target.label

    def stop(self) -> None:
        with self._guard:
            self._is_stopping = True
            self._guard.notify()
        self._target.cancel()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (message := self._next()) is not None:
            why = self._deliver(message)
            # the error of a delivery that `stop` has cancelled is our doing; Notifier.stop records it as late
            if why is None or not self._is_stopping:
                self._record(self._target.label, message["event"], why)
            with self._guard:
                self._sending = message if why is not None and self._is_stopping else None

    def _next(self) -> Mapping[str, Any] | None:
        with self._guard:
            self._guard.wait_for(lambda: self._waiting or self._is_stopping)
            if self._is_stopping:
                return None
            self._sending = self._waiting.pop(0)
            return self._sending

    def _deliver(self, message: Mapping[str, Any]) -> str | None:
        """Why the notice has not arrived, after all tries; None if it has."""
        backoff = Backoff(FIRST_RETRY_S, jitter=0.5)
        for failures in range(1, TRIES + 1):
            try:
                self._target.send(message)
                return None
            except NotDelivered as error:
                why, can_retry = error.why, error.can_retry
            except Exception as error:  # from a library; its text may hold the URL
                why, can_retry = type(error).__name__, True
            pause_s = backoff.after(failures, random.random())
            if failures == TRIES or not can_retry or not self._wait_to_retry(pause_s):
                return why
        return None

    def _wait_to_retry(self, pause_s: float) -> bool:
        """Pause; `hurry` shortens it. Returns whether to retry: not once it is stopped."""
        with self._guard:
            if self._is_hurried:
                self._guard.wait_for(lambda: self._is_stopping, timeout=min(pause_s, FIRST_RETRY_S))
            else:
                self._guard.wait_for(lambda: self._is_stopping or self._is_hurried, timeout=pause_s)
            return not self._is_stopping
