"""The targets of notifications: a command, a webhook, and whatever Apprise supports (docs/notices.md).

Nothing here shows a URL or the text of an error, since both may hold a token: a target has a label, a failure a short cause. So
exceptions are raised `from None`, without the one that quotes them.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from kgorch.errors import PlanError
from kgorch.plan import NotifySection
from kgorch.system import process_protection
from kgorch.system.redaction import public_form

REPLY_S = 10.0
"""Seconds that a web server has to answer."""

COMMAND_S = 30.0
"""Seconds that a command may run."""

RETRY_STATUSES = (408, 425, 429)
"""HTTP's refusals that pass with time. Any other 4xx means that our request is wrong, and would come again."""

MAX_WORD_CHARS = 16 * 1024
"""Characters of a text in a command's arguments; its standard input has the whole. The kernel limits one argument to 128 KiB."""

VARIABLE = re.compile(r"\$\{(\w+)\}")


class NotDelivered(Exception):
    """A notice has not arrived.

    Attributes:
        why: the cause, without a secret.
        can_retry: whether a later try may succeed.
    """

    def __init__(self, why: str, *, can_retry: bool = True) -> None:
        super().__init__(why)
        self.why, self.can_retry = why, can_retry


class Target(Protocol):
    """Where notices are sent.

    Attributes:
        label: what messages call it; it holds no secret.
    """

    label: str

    def send(self, message: Mapping[str, Any]) -> None:
        """Deliver one message; returns once it has arrived. Raises: NotDelivered."""

    def cancel(self) -> None:
        """End a delivery from another thread, as far as that is possible."""


def targets_of(section: NotifySection, workdir: Path, environ: Mapping[str, str]) -> list[Target]:
    """The targets of a plan, each with another label."""
    targets: list[Target] = [CommandTarget(section.command, workdir, environ)] if section.command else []
    for url in section.urls:
        full, label = _substitute(url, environ), public_form(url)
        targets.append(WebhookTarget(full, label) if _is_http(full) else AppriseTarget(full, label))
    # Two webhooks of one host look alike without their paths. Failures are kept by label, so labels differ.
    labels = [target.label for target in targets]
    for index, target in enumerate(targets):
        if labels.count(target.label) > 1:
            target.label += f" ({labels[: index + 1].count(labels[index])})"
    return targets


def check_url(key: str, url: str, environ: Mapping[str, str]) -> None:
    """Check that a URL of the plan names a target that can be used.

    Args:
        key: the URL's place in the plan, which errors name.
    Raises: PlanError.
    """
    full = _substitute(url, environ)
    if _is_http(full):
        try:
            is_valid = bool(urlsplit(full).hostname) and not re.search(r"\s", full)
        except ValueError:
            is_valid = False
        if not is_valid:
            raise PlanError(f"{key}: expected https://HOST/…; found {public_form(url)}")
        return
    try:
        import apprise
    except ImportError:
        raise PlanError(
            f"{key}: {public_form(url)} needs Apprise; without it there are http:// and https:// webhooks",
            next_step="pip install 'kgorch[notify]'",
            error_code="KG902",
        ) from None
    _silence_libraries()
    if apprise.Apprise.instantiate(full, suppress_exceptions=True) is None:
        raise PlanError(
            f"{key}: Apprise does not accept this {public_form(url)} URL",
            next_step="its wiki tells the form of each service's URL",
        )


def _substitute(text: str, environ: Mapping[str, str]) -> str:
    """The text with each `${NAME}` replaced by the variable's value.

    A variable that has gone since the start stays as it is: then this target fails, and only this one.
    """
    return VARIABLE.sub(lambda match: environ.get(match[1]) or match[0], text)


def _is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


class CommandTarget:
    """A program of the user, run without a shell."""

    label = "command"

    def __init__(self, words: list[str], workdir: Path, environ: Mapping[str, str]) -> None:
        self._words, self._workdir, self._environ = words, workdir, environ
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        fields = {name: _as_word(message[name]) for name in ("title", "text", "event", "run", "step")}
        words = [_fill_in(word, fields, self._environ) for word in self._words]
        variables = {f"KGORCH_{name.upper()}": fields[name] for name in ("event", "run", "step", "text")}
        try:
            process = subprocess.Popen(
                words,
                cwd=self._workdir,
                env={**self._environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that `cancel` reaches its children, and nobody else
                umask=process_protection.user_umask(),
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise NotDelivered(f"cannot be run: {why}", can_retry=False) from None
        self._process = process
        try:
            process.communicate(json.dumps(message).encode(), timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            raise NotDelivered(f"ran for {COMMAND_S:.0f} s and was killed") from None
        except OSError:
            pass  # it has not read its input; its exit status counts
        finally:
            self.cancel()
            process.wait()
        if process.returncode:
            raise NotDelivered(f"exit status {process.returncode}")

    def cancel(self) -> None:
        """Kill the program and its children, unless it has ended."""
        process = self._process
        if process and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _as_word(value: Any) -> str:
    """A value as an argument or a variable: without zero bytes, which end a C string, and not too long for the kernel."""
    return str(value or "").replace("\0", "?")[:MAX_WORD_CHARS]


def _fill_in(word: str, fields: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """A word of the command with `{title}` and the like, and `${NAME}`, replaced.

    All at once: a field may hold braces itself, and an error's text that quotes `${TOKEN}` must not get the token's value.
    """

    def replace(match: re.Match[str]) -> str:
        return _substitute(match[0], environ) if match[1] is None else fields[match[1]]

    return re.sub(r"\$\{\w+\}|\{(" + "|".join(fields) + r")\}", replace, word)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would repeat a POST as a GET without its body, perhaps at another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class WebhookTarget:
    """A POST with the message as JSON; a 2xx status means that it has arrived."""

    def __init__(self, url: str, label: str) -> None:
        self._url, self.label = url, label
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            url, login = _split_login(self._url)
            headers = {"Content-Type": "application/json", "User-Agent": "kgorch", **login}
            request = urllib.request.Request(url, json.dumps(message).encode(), headers, method="POST")
            with self._opener.open(request, timeout=REPLY_S):
                return
        except urllib.error.HTTPError as error:
            error.close()
            can_retry = error.code >= 500 or error.code in RETRY_STATUSES
            why = f"HTTP {error.code}" + (", a redirect, which is not followed" if 300 <= error.code < 400 else "")
            raise NotDelivered(why, can_retry=can_retry) from None
        except urllib.error.URLError as error:
            raise NotDelivered(_cause(error.reason)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotDelivered(_cause(error)) from None

    def cancel(self) -> None:
        pass  # urllib cannot be interrupted: REPLY_S ends it, or the end of the process


def _split_login(url: str) -> tuple[str, dict[str, str]]:
    """`https://name:password@host/` as a URL without the login and an Authorization header.

    urllib takes the login for a part of the host, and would send the password to a name server.
    """
    parts = urlsplit(url)
    login, separator, host = parts.netloc.rpartition("@")
    header = {"Authorization": "Basic " + base64.b64encode(unquote(login).encode()).decode()} if separator else {}
    return parts._replace(netloc=host).geturl(), header


def _cause(error: Any) -> str:
    """The cause of an error without its text, which may quote the URL."""
    if isinstance(error, TimeoutError):
        return f"no answer within {REPLY_S:.0f} s"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


class AppriseTarget:
    """A service that Apprise supports."""

    def __init__(self, url: str, label: str) -> None:
        self._url, self.label = url, label

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            import apprise  # an optional dependency
        except ImportError:
            raise NotDelivered("needs Apprise: pip install 'kgorch[notify]'", can_retry=False) from None
        _silence_libraries()
        # secure_logging masks URLs in its logs; without async_mode it starts no threads of its own
        asset = apprise.AppriseAsset(app_id="kgorch", secure_logging=True, async_mode=False)
        sender = apprise.Apprise(asset=asset)
        if not sender.add(self._url):
            raise NotDelivered("Apprise does not accept this URL", can_retry=False)
        if not sender.notify(title=message["title"], body=message["text"]):
            raise NotDelivered("Apprise could not deliver it")

    def cancel(self) -> None:
        pass  # Apprise has no way to interrupt a delivery


def _silence_libraries() -> None:
    """Keep Apprise and its HTTP libraries from logging: they log URLs, and Python prints warnings on stderr by default."""
    for name in ("apprise", "urllib3", "requests"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL + 1)
        logger.propagate = False
