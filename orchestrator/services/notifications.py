"""Notices to people: a command, a webhook, whatever Apprise can reach; told and forgotten, nobody waits for them.

Each target has a thread of its own with a bounded queue, so one that hangs holds up neither the loop nor the others. What
does not arrive is tried again a bounded number of times. A session's end gives them a moment (Notices.is_busy), no more.

A target's URL, command and environment may hold secrets. Nothing of them is ever told: a target goes by its scheme, and
by its host where the host is none (system/redaction.py); of an error its kind is told, not its text, which may quote a URL.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import math
import os
import queue
import random
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from orchestrator.core.backoff import Backoff
from orchestrator.core.codes import EventKind, NoticeKind
from orchestrator.core.notification_policy import Notice, Sieve, to_give_up
from orchestrator.errors import PlanError
from orchestrator.plan import NotifySection
from orchestrator.protocol.values import escape_surrogates
from orchestrator.system import process_protection
from orchestrator.system.clock import boottime_s
from orchestrator.system.redaction import public_form

TRIES = 5
AGAIN_S = 1.0
"""Before the second try, give or take half of it; twice as long before each later one."""

REPLY_S = 10.0
COMMAND_S = 30.0
END_S = 10.0
"""What notices get at most at a session's end."""

LATE = "the session was over before it arrived"

ROOM = 32
"""Notices that wait for a target."""

AGAIN_LATER = (408, 425, 429)
"""HTTP's refusals that time heals; any other 4xx is ours, and would come again."""

WORD = 16 * 1024
"""Characters of a text that a command is told in its words; the whole comes on its standard input."""

VARIABLE = re.compile(r"\$\{(\w+)\}")


class NotDelivered(Exception):
    """Why a notice has not arrived, without a secret; `again`: whether it may when tried again."""

    def __init__(self, why: str, *, again: bool = True) -> None:
        super().__init__(why)
        self.why, self.again = why, again


class Outcome(NamedTuple):
    """`why` one has not arrived; None for one that has."""

    target: str
    why: str | None
    took_s: float


class Target(Protocol):
    shown: str

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises: NotDelivered."""

    def cancel(self) -> None:
        """End what is being sent, as far as that can be."""


def check(part: NotifySection, environ: Mapping[str, str] = os.environ) -> None:
    """See that every target could be told something; nothing is sent.

    Raises: PlanError naming the variable that is not set, or the package to install.
    """
    texts = {f"notify.urls[{place}]": url for place, url in enumerate(part.urls)}
    texts |= {f"notify.command[{place}]": word for place, word in enumerate(part.command)}
    for key, text in texts.items():
        for name in VARIABLE.findall(text):
            if not environ.get(name):
                raise PlanError(
                    f"{key}: the environment has no {name}",
                    next_step=f"set it: export {name}=…, or a secret of the platform",
                )
    for place, url in enumerate(part.urls):
        _check_url(f"notify.urls[{place}]", url, environ)


def _check_url(key: str, url: str, environ: Mapping[str, str]) -> None:
    told = _filled(url, environ)
    if _is_http(told):
        try:
            fits = bool(urlsplit(told).hostname) and not re.search(r"\s", told)
        except ValueError:
            fits = False
        if not fits:
            raise PlanError(f"{key}: expected https://HOST/…; found {public_form(url)}")
        return
    try:
        import apprise
    except ImportError:
        raise PlanError(
            f"{key}: {public_form(url)} needs Apprise; without it there are http:// and https:// webhooks",
            next_step="pip install 'kgorch[notify]'",
        ) from None
    _be_silent()
    if apprise.Apprise.instantiate(told, suppress_exceptions=True) is None:
        raise PlanError(
            f"{key}: Apprise cannot make anything of this {public_form(url)} URL",
            next_step="its wiki tells the form of each service's URL",
        )


class Notices:
    """Of one run: tells the targets of its plan. Independent of who has something to tell; `tell` never waits or raises.

    Attributes:
        notes: for the journal: `notices_failed` (each time that other targets fail, or otherwise, than before),
            `notices_arrive` (once none does), `notices_dropped`.
    """

    def __init__(
        self,
        part: NotifySection,
        run: str,
        workdir: Path,
        environ: Mapping[str, str] | None = None,
        *,
        tries: int = TRIES,
    ) -> None:
        self.notes: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._run, self._sieve = run, Sieve([NoticeKind(kind) for kind in part.on])
        self._failing: dict[str, str] = {}
        self._guard = threading.Lock()
        environ = dict(os.environ if environ is None else environ)
        self._posts = [
            _Post(target, tries, self._outcome, self._dropped) for target in _targets(part, workdir, environ)
        ]

    def tell(self, notice: Notice, **facts: Any) -> None:
        """Have it sent to every target; `facts` as in docs/notices.md."""
        if self._posts and (passed := self._sieve.lets_through(notice, boottime_s())):
            message = _message(passed[0], self._run, notice, facts | {"unsaid": passed[1]})
            for post in self._posts:
                post.take(message)

    def now(self) -> None:
        """The session ends: what would be tried again later is tried now, and then in quick succession."""
        for post in self._posts:
            post.hurry()

    @property
    def is_busy(self) -> bool:
        """Whether something has yet to arrive or be given up."""
        return any(post.is_busy for post in self._posts)

    def stop(self) -> None:
        """Where it is; what has not arrived does not any more, and that is noted."""
        for post in self._posts:
            post.stop()
        for post in self._posts:
            post.join(1.0)
            if (kind := post.unsent) is not None:
                self._outcome(post.shown, kind, LATE)

    def _outcome(self, target: str, event: str, why: str | None) -> None:
        with self._guard:
            before = dict(self._failing)
            if why is None:
                self._failing.pop(target, None)
            else:
                self._failing[target] = why
            if self._failing != before:
                kind = EventKind.NOTICES_FAILED if self._failing else EventKind.NOTICES_ARRIVE
                self.notes.put((kind, {"event": event, "failing": dict(self._failing)}))

    def _dropped(self, target: str, kind: str) -> None:
        self.notes.put((EventKind.NOTICES_DROPPED, {"target": target, "event": kind}))


def test(part: NotifySection, run: str, workdir: Path, environ: Mapping[str, str] = os.environ) -> list[Outcome]:
    """Tell each target once that this is a test, one after the other, and how that went."""
    found = []
    notice = Notice((NoticeKind.TEST,), "a test: what you read here has arrived")
    for target in _targets(part, workdir, dict(environ)):
        began_s, why = time.monotonic(), None
        try:
            target.send(_message(NoticeKind.TEST, run, notice, {}))
        except NotDelivered as error:
            why = error.why
        except Exception as error:  # as in _Post: its text may hold the URL
            why = type(error).__name__
        found.append(Outcome(target.shown, why, time.monotonic() - began_s))
    return found


def _message(kind: str, run: str, notice: Notice, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a webhook and a command's standard input get (docs/notices.md)."""
    known: dict[str, Any] = {"session": None, "stage": "", "step": None, "why": "", "metrics": {}, "unsaid": 0}
    told = known | dict(facts) | dict(notice.facts)
    told["metrics"] = {name: value if math.isfinite(value) else None for name, value in told["metrics"].items()}
    where = f" at step {told['step']}" if told["step"] else ""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in told["metrics"].items() if value is not None)
    return {
        "event": kind,
        "run": run,
        "title": f"kgorch: {run} {kind}{where}",
        "text": escape_surrogates(notice.text) + (f" ({metrics})" if metrics else ""),
        "at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        **{name: escape_surrogates(value) if isinstance(value, str) else value for name, value in told.items()},
    }


def _targets(part: NotifySection, workdir: Path, environ: Mapping[str, str]) -> list[Target]:
    found: list[Target] = [_Command(part.command, workdir, environ)] if part.command else []
    for url in part.urls:
        told = _filled(url, environ)
        found.append(_Webhook(told, public_form(url)) if _is_http(told) else _Apprise(told, public_form(url)))
    names = [target.shown for target in found]
    for place, target in enumerate(found):
        if names.count(target.shown) > 1:
            target.shown += f" ({names[: place + 1].count(names[place])})"
    return found


def _filled(text: str, environ: Mapping[str, str]) -> str:
    """A variable that is gone since the start stays as it is: the target then fails by itself."""
    return VARIABLE.sub(lambda found: environ.get(found[1]) or found[0], text)


def _is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


class _Post:
    """The way to one target: a queue, a thread, and patience."""

    def __init__(self, target: Target, tries: int, outcome: Any, dropped: Any) -> None:
        self._target, self._tries, self._outcome, self._dropped = target, tries, outcome, dropped
        self._guard = threading.Condition()
        self._waiting: list[Mapping[str, Any]] = []
        self._sending: Mapping[str, Any] | None = None
        self._stopping = self._ending = False
        self._thread = threading.Thread(target=self._work, name="notices", daemon=True)
        self._thread.start()

    def take(self, message: Mapping[str, Any]) -> None:
        with self._guard:
            self._waiting.append(message)
            if len(self._waiting) > ROOM:
                gone = self._waiting.pop(to_give_up([item["event"] for item in self._waiting]))
                self._dropped(self._target.shown, gone["event"])
            self._guard.notify()

    def hurry(self) -> None:
        with self._guard:
            self._ending = True
            self._guard.notify()

    @property
    def is_busy(self) -> bool:
        with self._guard:
            return bool(self._waiting) or self._sending is not None

    @property
    def unsent(self) -> str | None:
        """The kind of the oldest that has not arrived; None for none."""
        with self._guard:
            left = self._waiting if self._sending is None else [self._sending]
            return left[0]["event"] if left else None

    @property
    def shown(self) -> str:
        return self._target.shown

    def stop(self) -> None:
        with self._guard:
            self._stopping = True
            self._guard.notify()
        self._target.cancel()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (message := self._next()) is not None:
            why = self._deliver(message)
            if why is None or not self._stopping:
                self._outcome(self._target.shown, message["event"], why)
            with self._guard:
                self._sending = message if why is not None and self._stopping else None

    def _next(self) -> Mapping[str, Any] | None:
        with self._guard:
            self._guard.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            self._sending = self._waiting.pop(0)
            return self._sending

    def _deliver(self, message: Mapping[str, Any]) -> str | None:
        """Why it has not arrived, after all tries; None when it has."""
        backoff = Backoff(AGAIN_S, jitter=0.5)
        for failures in range(1, self._tries + 1):
            try:
                self._target.send(message)
                return None
            except NotDelivered as error:
                why, again = error.why, error.again
            except Exception as error:  # whatever a library says: its text may hold the URL
                why, again = type(error).__name__, True
            pause_s = backoff.after(failures, random.random())
            if failures == self._tries or not again or not self._may_try_again(pause_s):
                return why
        return None

    def _may_try_again(self, pause_s: float) -> bool:
        with self._guard:
            if self._ending:
                self._guard.wait_for(lambda: self._stopping, timeout=min(pause_s, AGAIN_S))
            else:
                self._guard.wait_for(lambda: self._stopping or self._ending, timeout=pause_s)
            return not self._stopping


class _Command:
    """A program of the person's, without a shell, in a session of its own."""

    shown = "command"

    def __init__(self, words: list[str], workdir: Path, environ: Mapping[str, str]) -> None:
        self._words, self._workdir, self._environ = words, workdir, environ
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        told = {name: _as_word(message[name]) for name in ("title", "text", "event", "run", "step")}
        words = [_told(word, told, self._environ) for word in self._words]
        named = {f"KGORCH_{name.upper()}": told[name] for name in ("event", "run", "step", "text")}
        try:
            process = subprocess.Popen(
                words,
                cwd=self._workdir,
                env={**self._environ, **named},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                umask=process_protection.user_umask(),
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise NotDelivered(f"cannot be run: {why}", again=False) from None
        self._process = process
        try:
            process.communicate(json.dumps(message).encode(), timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            raise NotDelivered(f"ran for {COMMAND_S:.0f} s and was killed") from None
        except OSError:
            pass  # it did not read what it was told; its status counts
        finally:
            self.cancel()
            process.wait()
        if process.returncode:
            raise NotDelivered(f"exit status {process.returncode}")

    def cancel(self) -> None:
        """Kill it with all that it started, unless it has ended."""
        process = self._process
        if process and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _as_word(value: Any) -> str:
    """As an argument or a variable may be: no zero byte, and far below the 128 KiB that the kernel takes of one."""
    return str(value or "").replace("\0", "?")[:WORD]


def _told(word: str, told: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """`{title}` and its like, and `${NAME}`, in a word of the command: all at once, for what is told may hold braces itself, and
    an error's text that quotes `${TOKEN}` must not be given what that holds."""

    def fill(found: re.Match[str]) -> str:
        return _filled(found[0], environ) if found[1] is None else told[found[1]]

    return re.sub(r"\$\{\w+\}|\{(" + "|".join(told) + r")\}", fill, word)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect of a POST is followed as a GET without what it had to say, perhaps to somebody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Webhook:
    """A POST with the message as JSON; 2xx is an arrival."""

    def __init__(self, url: str, shown: str) -> None:
        self._url, self.shown = url, shown
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            url, login = _without_login(self._url)
            headers = {"Content-Type": "application/json", "User-Agent": "kgorch", **login}
            request = urllib.request.Request(url, json.dumps(message).encode(), headers, method="POST")
            with self._opener.open(request, timeout=REPLY_S):
                return
        except urllib.error.HTTPError as error:
            error.close()
            again = error.code >= 500 or error.code in AGAIN_LATER
            why = f"HTTP {error.code}" + (", a redirect, which is not followed" if 300 <= error.code < 400 else "")
            raise NotDelivered(why, again=again) from None
        except urllib.error.URLError as error:
            raise NotDelivered(_reason(error.reason)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotDelivered(_reason(error)) from None

    def cancel(self) -> None:
        pass  # its time-out ends it, or the process does


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """`https://name:password@host/` as a URL without them and the header that says them: urllib would ask DNS for all of it."""
    parts = urlsplit(url)
    login, found, host = parts.netloc.rpartition("@")
    header = {"Authorization": "Basic " + base64.b64encode(unquote(login).encode()).decode()} if found else {}
    return parts._replace(netloc=host).geturl(), header


def _reason(error: Any) -> str:
    """Of an error that may quote the URL, what does not."""
    if isinstance(error, TimeoutError):
        return f"no answer within {REPLY_S:.0f} s"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


class _Apprise:
    """A service that Apprise knows."""

    def __init__(self, url: str, shown: str) -> None:
        self._url, self.shown = url, shown

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            import apprise
        except ImportError:
            raise NotDelivered("needs Apprise: pip install 'kgorch[notify]'", again=False) from None
        _be_silent()
        asset = apprise.AppriseAsset(app_id="kgorch", secure_logging=True, async_mode=False)
        sender = apprise.Apprise(asset=asset)
        if not sender.add(self._url):
            raise NotDelivered("Apprise cannot make anything of this URL", again=False)
        if not sender.notify(title=message["title"], body=message["text"]):
            raise NotDelivered("Apprise could not deliver it")

    def cancel(self) -> None:
        pass


def _be_silent() -> None:
    """Apprise and what it speaks through log URLs, and Python prints warnings that nobody has asked for."""
    for name in ("apprise", "urllib3", "requests"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL + 1)
        logger.propagate = False
