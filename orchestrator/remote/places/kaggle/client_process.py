"""The process that runs Kaggle's client, and the only importer of `kaggle`.

`python -m kgorch.remote.places.kaggle.client_process ANSWERS`: orders come as lines of JSON on standard input,
`{"call": NAME, "arguments": {…}}`; answers go as lines of JSON into the descriptor ANSWERS: `{"value": …}`, `{"event": {…}}`
before it where a call has several or makes progress, or `{"trouble": …, "message": …, "retry_after_s": …}`. Standard output
belongs to the client, which prints to it. The parent (client.py) gives up after its deadline and kills this process; when the
parent dies, the end of standard input ends this process, also in the midst of a request.

Methods of `KaggleApi` are used where they are safe. Two are not: `kernels_output` (2.2.4) joins names from the server to the
folder without looking at them, and `kernels_pull` writes to such a name; so listing and source come through `kagglesdk`, which
the client itself uses. No answer holds a credential: those that the client has loaded are masked in every text.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from kgorch.core.remote.place_values import PlaceError, Trouble
from kgorch.remote.places.kaggle import output_names, refusals

PAGE_SIZE, MAX_PAGES = 100, 200
"""Of a data set's listing. Kaggle's own limit of a page is not known; a smaller one of the server is followed."""

MAX_LISTED = 200_000
"""Names of a session's output that are looked at, and pages. Kaggle's limit is not known; a training may leave a file a step."""

CONNECT_S, SILENCE_S = 15.0, 60.0
"""Seconds for a connection, and without a byte, while a file is fetched."""

PART = ".kgorch-part"

STEP_BYTES, STEP_POLL_S = 256 << 10, 2.0
"""Of a file that is fetched: what counts as progress, and seconds between two looks at it."""

FAILED_UPLOADS = 3

MAX_EVENT_CHARS = 1 << 20
"""Of one event of a log; the rest of it is left out."""

Order = dict[str, Any]
Send = Callable[[dict[str, Any]], None]

PROGRESS: Order = {"event": {}}


class _UrlRefusedError(PlaceError):
    """The storage does not hand a file out: URLs expire after minutes, and its 403 says nothing about the session."""


@contextlib.contextmanager
def _progress_told(path: Path, total: int, send: Send) -> Iterator[None]:
    """Send an event for each STEP_BYTES by which the file grows while the block runs, which sends none.

    Args:
        total: bytes of the whole file; 0 where they are not known.
    """
    is_over = threading.Event()

    def size() -> int:
        return path.stat().st_size if path.exists() else 0

    def watch() -> None:
        told = size()
        while not is_over.wait(STEP_POLL_S):
            if (now := size()) >= told + STEP_BYTES:
                told = now
                send({"event": {"bytes": now, "of": total}})

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _quota(quota: Any, refreshes_at: datetime | None) -> dict[str, Any] | None:
    if quota is None:
        return None
    times = (quota.time_used, quota.time_reserved, quota.total_time_allowed)
    used, reserved, allowed = (time.total_seconds() if time is not None else 0.0 for time in times)
    at = (
        refreshes_at.replace(tzinfo=UTC).isoformat() if refreshes_at else ""
    )  # the client's times have no zone and are in UTC
    return {"used_s": used, "reserved_s": reserved, "allowed_s": allowed, "refreshes_at": at}


class Calls:
    """What the parent may order, a method each. Each raises whatever the client raises."""

    def __init__(self) -> None:
        import kaggle  # authenticates, and says nothing where it could not
        from kagglesdk.kaggle_env import get_access_token_from_env

        self._api: Any = kaggle.api
        self._version = kaggle.__version__
        means = self._means() or self._authenticate()
        token, source = get_access_token_from_env()
        if token and means != "ACCESS_TOKEN":
            # the client goes on with the next credentials that it finds, which may be another account's
            raise PlaceError(Trouble.LOGIN, f"Kaggle does not accept the access token ({source})")

    def _means(self) -> str:
        return str(self._api.config_values.get(self._api.CONFIG_NAME_AUTH_METHOD) or "")

    def _authenticate(self) -> str:
        """Once more, for the reason. Raises: whatever the client raises; PlaceError."""
        try:
            self._api.authenticate()
        except SystemExit:
            raise PlaceError(Trouble.LOGIN, "no valid credentials for Kaggle") from None
        return self._means()

    def secrets(self) -> list[str]:
        api = self._api
        values = (api.config_values.get(name) for name in (api.CONFIG_NAME_KEY, api.CONFIG_NAME_TOKEN))
        return [value for value in values if value]

    @property
    def _owner(self) -> str:
        return str(self._api.config_values[self._api.CONFIG_NAME_USER])

    def _ref(self, name: str) -> str:
        return f"{self._owner}/{name}"

    def account(self) -> dict[str, Any]:
        return {"name": self._owner, "means": self._means(), "client": self._version}

    def quota(self) -> dict[str, Any]:
        answer = self._api.quota_view()
        at = answer.quota_refresh_time
        return {"gpu": _quota(answer.gpu_quota, at), "tpu": _quota(answer.tpu_quota, at)}

    def status(self, name: str) -> dict[str, Any]:
        answer = self._api.kernels_status(self._ref(name))
        return {"status": answer.status.name, "message": answer.failure_message or ""}

    def push(self, metadata: dict[str, Any], script: str, timeout_s: int, machine_shape: str | None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            metadata = metadata | {"id": self._ref(metadata["title"]), "code_file": "session.py"}
            Path(folder, "session.py").write_text(script)
            Path(folder, self._api.KERNEL_METADATA_FILE).write_text(json.dumps(metadata))
            answer = self._api.kernels_push(folder, timeout=str(timeout_s), acc=machine_shape)
        names = ("tags", "dataset_sources", "competition_sources", "kernel_sources", "model_sources")
        return {
            "ref": answer.ref, "url": answer.url, "version": answer.version_number, "error": answer.error or "",
            "invalid": [source for name in names for source in getattr(answer, f"invalid_{name}") or ()],
        }  # fmt: skip

    def source(self, name: str) -> dict[str, Any]:
        from kagglesdk.kernels.types.kernels_api_service import ApiGetKernelRequest

        request = ApiGetKernelRequest()
        request.user_name, request.kernel_slug = self._owner, name
        with self._api.build_kaggle_client() as client:
            answer = client.kernels.kernels_api_client.get_kernel(request)
        head = "\n".join((answer.blob.source or "").split("\n", 4)[:4])
        return {"ref": answer.metadata.ref, "version": answer.metadata.current_version_number, "head": head[:4000]}

    def delete(self, name: str) -> dict[str, Any]:
        from kagglesdk.kernels.types.kernels_api_service import ApiDeleteKernelRequest

        request = ApiDeleteKernelRequest()
        request.user_name, request.kernel_slug = self._owner, name
        with self._api.build_kaggle_client() as client:  # kernels_delete() drops the answer, which may be a refusal
            answer = client.kernels.kernels_api_client.delete_kernel(request)
        return {"error": getattr(answer, "error_message", None) or ""}

    def dataset_status(self, name: str) -> dict[str, Any]:
        return {"status": self._api.dataset_status(self._ref(name)).upper()}

    def dataset_files(self, name: str) -> dict[str, Any]:
        sizes: dict[str, int] = {}
        token = None
        for _ in range(MAX_PAGES):
            page = self._api.dataset_list_files(self._ref(name), page_token=token, page_size=PAGE_SIZE)
            sizes |= {file.name: file.total_bytes for file in page.files}
            token = page.next_page_token
            if not token:
                break
        return {"sizes": sizes}

    def create_dataset(self, name: str, folder: str, licence: str) -> dict[str, Any]:
        """Upload the files of a flat folder, as far as they are not, and make them a private data set.

        `dataset_create_new` is not used: it goes on without a file whose upload failed, and repeats the creation by itself.
        """
        from kaggle.api.kaggle_api_extended import ResumableUploadContext
        from kagglesdk.blobs.types.blob_api_service import ApiBlobType
        from kagglesdk.datasets.types.dataset_api_service import ApiCreateDatasetRequest

        request = ApiCreateDatasetRequest()
        request.owner_slug, request.slug, request.title = self._owner, name, name
        request.license_name, request.is_private, request.files = licence, True, []
        count = len(list(Path(folder).iterdir()))
        with ResumableUploadContext() as uploads:
            self._api.upload_files(request, None, folder, ApiBlobType.DATASET, uploads, quiet=True)
            if len(request.files) != count:
                _count_failure()
                raise PlaceError(Trouble.UNANSWERED, f"{len(request.files)} of {count} files were uploaded")
            with self._api.build_kaggle_client() as client:
                answer = client.datasets.dataset_api_client.create_dataset(request)
        return {"ref": answer.ref or "", "status": answer.status or "", "error": answer.error or ""}

    def _listing(self, name: str) -> Iterator[list[tuple[str, str]]]:
        """Pages with name and URL of each file of a session's output."""
        from kagglesdk.kernels.types.kernels_api_service import ApiListKernelSessionOutputRequest

        token, count = "", 0
        for _ in range(MAX_LISTED):
            request = ApiListKernelSessionOutputRequest()
            request.user_name, request.kernel_slug = self._owner, name
            request.page_size, request.page_token = PAGE_SIZE, token
            with self._api.build_kaggle_client() as client:
                answer = client.kernels.kernels_api_client.list_kernel_session_output(request)
            page = [(file.file_name or "", file.url or "") for file in answer.files or ()]
            yield page
            token, count = answer.next_page_token, count + len(page)
            if not token:
                return
            if count > MAX_LISTED:
                break
        raise PlaceError(Trouble.REFUSED, f"the output has more than {MAX_LISTED} files")

    def _wanted(self, name: str, patterns: list[str], most: int, send: Send) -> dict[str, str]:
        """URLs of the files that are wanted, by name. Raises: PlaceError for more than `most`; OutsideError."""
        wanted: dict[str, str] = {}
        are_names = not any(set(pattern) & set("*?[") for pattern in patterns)
        for page in self._listing(name):
            urls = dict(page)
            if urls:
                send(PROGRESS)
            wanted |= {file: urls[file] for file in output_names.wanted(list(urls), patterns)}
            if len(wanted) > most:
                raise PlaceError(Trouble.REFUSED, f"more than {most} files of the output match")
            if are_names and all(pattern in wanted for pattern in patterns):  # the record alone, say
                break
        return wanted

    def output(self, name: str, folder: str, patterns: list[str], limits: Order, send: Send) -> dict[str, Any]:
        """Fetch files into a folder. What an earlier call has fetched whole stays: the output of a session never changes.

        Args:
            limits: `files`, most files; `bytes`, most bytes of all of them; `small`, most bytes of one by the last part of its
                name; such a file is always fetched anew.
            send: gets an event for each file, and for whatever else is progress.
        """
        done: set[str] = set()
        while True:
            wanted, left, before = self._wanted(name, patterns, limits["files"], send), limits["bytes"], len(done)
            try:
                for file, url in wanted.items():
                    path = Path(folder, file)
                    small = limits["small"].get(path.name)
                    if file not in done and (small is not None or not path.is_file()):
                        self._fetch(url, path, left if small is None else small, send)
                    left -= path.stat().st_size
                    if left < 0:
                        raise PlaceError(Trouble.REFUSED, f"the files have more than {limits['bytes']} bytes")
                    if file not in done:
                        done.add(file)
                        send({"event": {"file": file}})
                return {"files": len(done)}
            except _UrlRefusedError:
                if len(done) == before:  # not even the first one of a new listing
                    raise

    def _fetch(self, url: str, path: Path, most: int, send: Send) -> None:
        """Fetch one file under another name, going on where an earlier process ended, and rename it once it is whole."""
        import requests

        if not url.startswith("https://"):
            raise PlaceError(Trouble.REFUSED, f"the URL of {path.name} is not https")
        path.parent.mkdir(parents=True, exist_ok=True)
        response = requests.get(
            url, headers={"Accept-Encoding": "identity"}, stream=True, timeout=(CONNECT_S, SILENCE_S)
        )
        if response.status_code != 200:
            kind = Trouble.BUSY if response.status_code == 429 else Trouble.UNANSWERED
            is_refused = 400 <= response.status_code < 500 and kind is not Trouble.BUSY
            error = _UrlRefusedError if is_refused else PlaceError
            raise error(kind, f"HTTP {response.status_code} for {path.name}", _retry_after(response))
        part, total = path.with_name(path.name[:200] + PART), int(response.headers.get("Content-Length") or 0)
        if total > most:
            raise PlaceError(Trouble.REFUSED, f"{path.name} has {total} bytes, more than {most}")
        free = shutil.disk_usage(path.parent).free
        # what is small is tried: the refusal of a record would count as an answer about its session
        if total - (part.stat().st_size if part.exists() else 0) > max(free, STEP_BYTES):
            raise PlaceError(Trouble.REFUSED, f"{path.name} has {total} bytes, and {free} are free in {path.parent}")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        # a server that announces no size, or a false one, is stopped by the kernel
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if before[1] < 0 else min(most, before[1]), before[1]))
        try:
            # no retries of the client's own: those write an error's page into the file where the size is not known
            with _progress_told(part, total, send):
                self._api.download_file(
                    response, str(part), None, quiet=True, resume=True, max_retries=0, timeout=SILENCE_S
                )
        except ValueError as error:  # another size than announced
            raise PlaceError(Trouble.UNANSWERED, str(error)) from None
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise PlaceError(Trouble.REFUSED, f"{path.name} has more than {most} bytes") from None
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        part.replace(path)

    def log(self, name: str, skip: int, send: Send) -> dict[str, Any]:
        """Send the events of a log after the first `skip`: the server begins at the first one each time."""
        count = 0
        for count, event in enumerate(self._api.kernels_logs_stream(self._ref(name)), 1):
            if count > skip:
                text = event.get("data") if isinstance(event, dict) else None
                send({"event": {"number": count, "text": text[:MAX_EVENT_CHARS] if isinstance(text, str) else ""}})
        return {"events": count}


def _count_failure() -> None:
    """After some failures in a row forget the client's notes of uploads: one that cannot be resumed any more never succeeds."""
    counter = Path(tempfile.gettempdir(), "failed-uploads")
    count = len(counter.read_bytes()) + 1 if counter.exists() else 1
    counter.write_bytes(b"." * count)
    if count >= FAILED_UPLOADS:
        counter.unlink()
        for folder in Path(tempfile.gettempdir()).glob(".kaggle*"):
            shutil.rmtree(folder, ignore_errors=True)


def _retry_after(response: Any) -> float | None:
    return refusals.retry_after_s(response.headers.get("Retry-After"))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it came from: the client raises ValueError for some HTTP errors, without `from`."""
    known: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in known:
        known.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _was_sent(trace: TracebackType | None) -> bool:
    """Whether the exception comes from within kagglesdk: before that the client has sent nothing."""
    return any("kagglesdk" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))


def failure(error: BaseException) -> Order:
    """The answer for an exception of a call."""
    for cause in _chain(error):
        if isinstance(cause, PlaceError):
            return {"trouble": cause.trouble, "message": cause.message, "retry_after_s": cause.retry_after_s}
        response = getattr(cause, "response", None)
        if response is not None and (status := getattr(response, "status_code", None)) is not None:
            with contextlib.suppress(Exception):  # the client raises for a body with a code under HTTP 200, too
                status = int(response.json()["code"]) if status < 400 else status
            return {
                "trouble": refusals.trouble_of_status(status, str(cause)), "message": f"HTTP {status}: {cause}",
                "retry_after_s": _retry_after(response),
            }  # fmt: skip
    kind = Trouble.UNANSWERED
    if isinstance(error, output_names.OutsideError) or (
        isinstance(error, ValueError) and not _was_sent(error.__traceback__)
    ):
        kind = Trouble.REFUSED  # the client looks at what it is given before it sends it
    return {"trouble": kind, "message": f"{type(error).__name__}: {error}", "retry_after_s": None}


def _begin() -> Calls | Order:
    try:
        return Calls()
    except ImportError as error:
        message = f"Kaggle's client cannot be imported ({error}): pip install 'kgorch[kaggle]'"
        return {"trouble": Trouble.NO_CLIENT, "message": message, "retry_after_s": None}
    except (Exception, SystemExit) as error:
        return failure(error)


def _orders() -> Iterator[Order]:
    """Lines of standard input, read by a thread, so that the parent's death ends a process that waits for a server.

    From a descriptor of our own: without credentials the client calls `exit`, which closes sys.stdin before it raises SystemExit.
    """
    lines: queue.Queue[bytes] = queue.Queue()
    source = os.fdopen(os.dup(0), "rb")
    sys.stdin = open(os.devnull)

    def read() -> None:
        for line in source:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def main() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the limit of a file's size becomes an error
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", errors="backslashreplace")
    secrets: list[str] = []

    def masked(value: Any) -> Any:
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, "***")
            return value
        if isinstance(value, dict):
            return {key: masked(item) for key, item in value.items()}
        return [masked(item) for item in value] if isinstance(value, list) else value

    def send(answer: Order) -> None:
        answers.write(json.dumps(masked(answer)) + "\n")
        answers.flush()

    calls: Calls | Order = {}
    for order in _orders():
        if not isinstance(calls, Calls):
            calls = _begin()
            if not isinstance(calls, Calls):
                send(calls)
                continue
            secrets = calls.secrets()
        arguments = order["arguments"] | ({"send": send} if order["call"] in ("log", "output") else {})
        try:
            send({"value": getattr(calls, order["call"])(**arguments)})
        except (Exception, SystemExit) as error:
            send(failure(error))


if __name__ == "__main__":
    main()
