"""The stand-in as a whole: who may log in, which method does what, faults, and what was asked."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from places.kaggle_server import sandbox
from places.kaggle_server.datasets import Datasets
from places.kaggle_server.faults import Fault
from places.kaggle_server.front import Cut, Front, make_certificates, wait
from places.kaggle_server.kernels import Kernels
from places.kaggle_server.rules import Rules
from places.kaggle_server.values import ApiError, Session

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One request as it came: the method's name, its JSON, how it was logged in (`Bearer`, `Basic`, ``), and when (monotonic)."""

    method: str
    body: Json
    login: str
    at_s: float


class KaggleServer:
    """Kaggle for one account, in threads of this process.

    Args:
        folder: for all that it keeps.
        username: of the account.
        session_variables: more variables for the sessions that it executes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        username: str = "ada",
        rules: Rules | None = None,
        session_variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.username, self.rules = folder, username, rules or Rules()
        self.token, self.key = f"KGAT_{secrets.token_hex(16)}", secrets.token_hex(16)
        self.requests: list[Request] = []
        self.unknown: list[str] = []
        self._faults: dict[str, list[Fault]] = defaultdict(list)
        self._lock = threading.Lock()
        self._is_closed = False
        folder.mkdir(parents=True, exist_ok=True)
        self.datasets = Datasets(folder, username, self.rules)
        self.kernels = Kernels(folder, username, self.rules, self.datasets, dict(session_variables or {}))
        context, self.authority = make_certificates(folder)
        self._front = Front(self, context)
        self.port: int = self._front.server_address[1]
        self._thread = threading.Thread(target=self._front.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def __enter__(self) -> KaggleServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self._front.shutdown()
        self._front.server_close()
        self.kernels.close()

    def environment(self, home: Path, login: str = "token") -> dict[str, str]:
        """Variables that lead the client here, with the account's login.

        Args:
            home: folder for the client's own files, and for the login.
            login: `token` (KAGGLE_API_TOKEN is the path of a file), `key` (kaggle.json), `oauth` (what `kaggle auth login` leaves,
                without an access token), or `` for none.
        """
        folder = home / ".kaggle"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        here = {
            "HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "https_proxy": f"http://127.0.0.1:{self.port}", "REQUESTS_CA_BUNDLE": str(self.authority),
        }  # fmt: skip
        if login == "token":
            path = home / "token"
            path.write_text(self.token + "\n")
            path.chmod(0o600)
            return here | {"KAGGLE_API_TOKEN": str(path)}
        if login == "oauth":
            path = folder / "credentials.json"
            path.write_text(json.dumps({"refresh_token": self.key, "username": self.username, "access_token": ""}))
            path.chmod(0o600)
        if login == "key":
            path = folder / "kaggle.json"
            path.write_text(json.dumps({"username": self.username, "key": self.key}))
            path.chmod(0o600)
        return here

    def order(self, method: str, fault: Fault, times: int = 1) -> None:
        """The next requests of this method go wrong. `PUT`, `File` and `LogStream` name those that are no methods."""
        with self._lock:
            self._faults[method] += [fault] * times

    def withdraw_faults(self) -> None:
        """Drop what was ordered and has not come."""
        with self._lock:
            self._faults.clear()

    def take_fault(self, method: str) -> Fault | None:
        with self._lock:
            return self._faults[method].pop(0) if self._faults[method] else None

    def asked(self, *methods: str) -> list[Request]:
        """The requests of these methods so far; all of them without a name."""
        return [request for request in list(self.requests) if not methods or request.method in methods]

    def session(self, slug: str, version: int | None = None) -> Session:
        return self.kernels.kernels[slug][version - 1 if version else -1]

    def wait_for(self, slug: str, *statuses: str, within_s: float = 60.0) -> Session:
        """Raises: AssertionError when the newest session of the name has none of these statuses (over, without one) in time."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            session = self.session(slug)
            if session.status in statuses or (not statuses and session.is_over):
                return session
            time.sleep(0.02)
        raise AssertionError(f"{slug} is {session.status}, not {statuses}; its log: {session.log[-20:]}")

    def start(self, slug: str) -> None:
        """End the newest session's time in the queue."""
        self.session(slug).may_start.set()

    def cancel(self, slug: str) -> None:
        """As a person does in the browser."""
        self.kernels.cancel(slug)

    def crash(self, slug: str) -> None:
        """SIGKILL to all that the newest session runs, as if its machine had run out of memory: it ends in ERROR."""
        sandbox.kill(self.session(slug))

    def record(self, method: str, body: Json, login: str = "") -> None:
        with self._lock:
            self.requests.append(Request(method, body, login, time.monotonic()))

    def check_login(self, headers: Mapping[str, str]) -> None:
        login = headers.get("Authorization") or ""
        basic = base64.b64encode(f"{self.username}:{self.key}".encode()).decode()
        if login not in (f"Bearer {self.token}", f"Basic {basic}"):
            raise ApiError(401, "Unauthenticated")

    def do_fault(self, fault: Fault | None) -> None:
        """Raises: ApiError, Cut."""
        if fault is None:
            return
        if fault.kind == "hang":
            wait(fault.seconds, lambda: self._is_closed)
            raise Cut
        if fault.kind == "cut":
            raise Cut
        if fault.kind == "status":
            raise ApiError(fault.status, f"{fault.status} by order")

    def answer(
        self, method: str, content: bytes, headers: Mapping[str, str]
    ) -> tuple[int, Json | bytes, dict[str, str]]:
        """Status, body and headers for a method of the interface. Raises: Cut."""
        body = json.loads(content or b"{}")
        self.record(method, _without_token(body), (headers.get("Authorization") or "").partition(" ")[0])
        fault = self.take_fault(method)
        try:
            if fault and not fault.after:
                self.do_fault(fault)
            result = self._do(method, body, headers) if not fault or fault.after else {}
            self.do_fault(fault)
        except ApiError as error:
            return error.status, {"code": error.status, "message": error.message}, fault.headers if fault else {}
        if fault and fault.kind == "text":
            return 200, str(fault.body).encode(), {}
        return 200, fault.body if fault and fault.kind == "body" else result, {}

    def _do(self, method: str, body: Json, headers: Mapping[str, str]) -> Json:
        if method == "IntrospectToken":
            is_ours = body.get("token") == self.token
            return {"active": True, "username": self.username, "exp": int(time.time()) + 3600} if is_ours else {}
        if method == "GenerateAccessToken" and body.get("refreshToken") == self.key:
            return {"token": self.token, "expiresIn": 43200, "userName": self.username}
        self.check_login(headers)
        kernels, datasets = self.kernels, self.datasets
        methods = {
            "SaveKernel": kernels.save, "GetKernel": kernels.get, "GetKernelSessionStatus": kernels.status,
            "ListKernelSessionOutput": kernels.list_output, "ListKernels": kernels.list, "DeleteKernel": kernels.delete,
            "GetAcceleratorQuotaStatistics": kernels.quota, "StartBlobUpload": datasets.start_upload,
            "CreateDataset": datasets.create, "GetDatasetStatus": datasets.status, "GetDataset": datasets.get,
            "ListDatasetFiles": datasets.list_files, "DeleteDataset": datasets.delete,
        }  # fmt: skip
        if method not in methods:
            self.unknown.append(method)
            raise ApiError(404, f"no method {method}")
        return methods[method](body)

    def forget(self) -> None:
        """Remove what it has kept on disk."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _without_token(body: Json) -> Json:
    return {key: "(a secret)" if key in ("token", "refreshToken") else value for key, value in body.items()}
