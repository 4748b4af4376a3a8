"""The parent's side of the process that runs Kaggle's client: starts it, gives it orders, and kills it after a deadline.

The client has no time limit of its own on API calls, so a server that accepts a connection and says nothing would hold it for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kgorch.core.remote.place_values import PlaceError, Trouble
from kgorch.remote.places.kaggle import answers
from kgorch.system.redaction import redact, secret_values

CREDENTIALS = ("KAGGLE_API_TOKEN", "KAGGLE_CONFIG_DIR", "KAGGLE_USERNAME", "KAGGLE_KEY")
"""The client makes configuration of each `KAGGLE_*` variable; no other one passes."""

USUAL = (
    "HOME", "XDG_CONFIG_HOME", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR",
    *(f"{name}_proxy" for name in ("http", "https", "all", "no")), *(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "ALL", "NO")),
)  # fmt: skip
"""VERBOSE is not among them: with it the client prints its requests with their credentials."""

MAX_AGE_S = 3600.0
"""Of a process, so that changed credentials are noticed; access tokens of a login in the browser last 12 hours."""

MAX_ANSWER_BYTES = 16 << 20

READ_BYTES = 1 << 16


def environment(environ: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """Variables for the client's process.

    Args:
        temporary: folder for its temporary files, and for its notes of uploads, which another process goes on from. The usual place
            of those has a name that every user of the machine knows, and they hold the address that the files are sent to.
    """
    chosen = {name: environ[name] for name in (*CREDENTIALS, *USUAL) if environ.get(name)}
    for name in ("KAGGLE_API_TOKEN", "KAGGLE_CONFIG_DIR"):  # the process has another working directory
        if name in chosen and Path(chosen[name]).exists():
            chosen[name] = str(Path(chosen[name]).absolute())
    if "PYTHONPATH" in chosen:
        parts = chosen["PYTHONPATH"].split(os.pathsep)
        chosen["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in parts if part)
    return chosen | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}


class ClientProcess:
    """One process, from its start to its end. For one thread."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        temporary = folder / "client"
        temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
        read_end, write_end = os.pipe()
        # -P: a folder `kaggle` or a file `requests.py` where it is started must not be imported
        command = [sys.executable, "-P", "-m", "kgorch.remote.places.kaggle.client_process", str(write_end)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=temporary,
                env=environment(environ, temporary), pass_fds=(write_end,), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(read_end)
            raise PlaceError(Trouble.NO_CLIENT, f"Kaggle's client cannot be started: {error}") from None
        finally:
            os.close(write_end)
        self._answers, self._left = read_end, b""
        self._secrets = secret_values({name: environ[name] for name in CREDENTIALS if name in environ})
        self.began_s = time.monotonic()

    def send(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Raises: PlaceError when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(answers.encode_order(call, arguments))
            self._process.stdin.flush()
        except OSError:
            raise PlaceError(Trouble.UNANSWERED, "Kaggle's client has ended") from None

    def receive(self, until_s: float) -> answers.Answer:
        """The next answer. Raises: PlaceError, also for one that cannot be read or does not come until then (monotonic)."""
        while (end := self._left.find(b"\n")) < 0:
            if len(self._left) > MAX_ANSWER_BYTES:
                raise PlaceError(
                    Trouble.UNANSWERED, f"Kaggle's client answered with more than {MAX_ANSWER_BYTES} bytes"
                )
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise PlaceError(Trouble.UNANSWERED, "Kaggle's client did not answer in time, and was ended")
            if not (part := os.read(self._answers, READ_BYTES)):
                raise PlaceError(Trouble.UNANSWERED, "Kaggle's client ended without an answer")
            self._left += part
        line, self._left = self._left[:end], self._left[end + 1 :]
        try:
            return answers.parse(line)
        except PlaceError as error:
            raise PlaceError(error.trouble, redact(error.message, self._secrets), error.retry_after_s) from None

    def kill(self) -> None:
        """End it and whatever it has started. Safe to repeat."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1


class Client:
    """Calls of Kaggle's client, one at a time, by a process that stays for the next call.

    Args:
        folder: private, outlives processes.
        environ: variables to choose from.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder, self._environ = folder, environ
        self._lock = threading.Lock()
        self._process: ClientProcess | None = None

    def call(
        self, call: str, within_s: float, on_event: Callable[[Any], None] = lambda event: None, **arguments: Any
    ) -> Any:
        """The value of a call. Raises: PlaceError.

        Args:
            within_s: seconds until the value, or until an event, after which they count anew.
        """
        until_s = time.monotonic() + within_s
        with self._lock:
            if self._process and time.monotonic() - self._process.began_s > MAX_AGE_S:
                self._end()
            self._process = self._process or ClientProcess(self._folder, self._environ)
            try:
                self._process.send(call, arguments)
                while (answer := self._process.receive(until_s)).event is not None:
                    until_s = time.monotonic() + within_s
                    on_event(answer.event)
                return answer.value
            except BaseException as error:
                # only after a definite answer nothing of the call can come any more
                definite = isinstance(error, PlaceError) and error.trouble not in (Trouble.UNANSWERED, Trouble.LOGIN)
                if not definite:
                    self._end()
                raise

    def events(self, call: str, first_s: float, quiet_s: float, **arguments: Any) -> Iterator[Any]:
        """The events of a call, by a process of its own, which ends with the iterator.

        Args:
            first_s: seconds without a first event after which TimeoutError is raised.
            quiet_s: the same for every later one.
        Raises: PlaceError, TimeoutError.
        """
        process = ClientProcess(self._folder, self._environ)
        try:
            process.send(call, arguments)
            limit_s = first_s
            while True:
                until_s = time.monotonic() + limit_s
                try:
                    answer = process.receive(until_s)
                except PlaceError:
                    if time.monotonic() >= until_s:
                        raise TimeoutError(f"no event for {limit_s:g} s") from None
                    raise
                if answer.event is None:
                    return
                limit_s = quiet_s
                yield answer.event
        finally:
            process.kill()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process = None
