"""Kernels and their sessions: KernelsApiService of the stand-in."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from places.kaggle_server import sandbox
from places.kaggle_server.datasets import Datasets
from places.kaggle_server.rules import Rules
from places.kaggle_server.values import ApiError, Session, slug_of

Json = dict[str, Any]

SLOTS_TEXT = "Maximum batch {kind} session count of {count} reached."
QUOTA_TEXT = "Maximum weekly GPU quota of {hours:.2f} hours reached."
"""As users report them."""


class Kernels:
    """Those of the account. Each push runs in a thread of its own."""

    def __init__(
        self, folder: Path, owner: str, rules: Rules, datasets: Datasets, session_variables: dict[str, str]
    ) -> None:
        self._folder, self._owner, self._rules, self._datasets = folder, owner, rules, datasets
        self._variables = session_variables
        self.kernels: dict[str, list[Session]] = {}
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._urls: dict[str, tuple[Path, float]] = {}

    def sessions(self) -> list[Session]:
        return [session for versions in list(self.kernels.values()) for session in versions]

    def save(self, body: Json) -> Json:
        with self._lock:
            owner, _, asked = str(body.get("slug", "")).partition("/")
            title = body.get("newTitle") or asked
            if owner != self._owner:
                raise ApiError(403, "Permission 'kernels.update' was denied")
            if len(title) < 5 or not body.get("text"):
                raise ApiError(400, "Title must be at least five characters, and a source is needed")
            if int(body.get("sessionTimeoutSeconds") or 0) > self._rules.max_timeout_s:
                raise ApiError(400, f"sessionTimeoutSeconds must be at most {self._rules.max_timeout_s}")
            if refusal := self._refusal(body):
                return {"error": refusal}  # under HTTP 200
            slug = slug_of(title)  # whatever the id said
            inputs, invalid = self._inputs(body, slug)
            versions = self.kernels.setdefault(slug, [])
            number = len(versions) + 1
            session = Session(self._owner, slug, number, body, inputs, self._folder / "kernels" / slug / str(number))
            versions.append(session)
            thread = threading.Thread(target=self._run, args=(session,), daemon=True)
            self._threads.append(thread)
            thread.start()
            url = f"/code/{self._owner}/{slug}"
            kernel_id = 1000 + list(self.kernels).index(slug)
            return {
                "ref": url,
                "url": f"https://www.kaggle.com{url}",
                "versionNumber": number,
                "kernelId": kernel_id,
            } | invalid

    def _refusal(self, body: Json) -> str:
        is_gpu = bool(body.get("enableGpu")) or str(body.get("machineShape", "")).startswith("Nvidia")
        open_ones = [session for session in self.sessions() if not session.is_over]
        busy = sum(session.machine_shape.startswith("Nvidia") == is_gpu for session in open_ones)
        most = self._rules.slots if is_gpu else self._rules.cpu_slots
        if busy >= most:
            return SLOTS_TEXT.format(kind="GPU" if is_gpu else "CPU", count=most)
        if is_gpu and self.used_s() >= self._rules.quota_s:
            return QUOTA_TEXT.format(hours=self._rules.quota_s / 3600)
        return ""

    def _inputs(self, body: Json, slug: str) -> tuple[dict[str, Path], Json]:
        """Folders of what is attached, and the names of what is left out, while the push succeeds."""
        inputs: dict[str, Path] = {}
        invalid: Json = {}
        older = self._rules.older_mounts
        for reference in body.get("datasetDataSources", []):
            owner, _, name = reference.partition("/")
            dataset = self._datasets.datasets.get(name) if owner == self._owner else None
            if dataset is None or dataset.status != "READY":
                invalid.setdefault("invalidDatasetSources", []).append(reference)
            else:
                inputs[name if older else f"datasets/{owner}/{name}"] = dataset.folder
        for reference in body.get("kernelDataSources", []):
            owner, _, name = reference.partition("/")
            newest = self.kernels[name][-1] if owner == self._owner and name in self.kernels else None
            if newest is None or name == slug or newest.status != "COMPLETE" or newest.output is None:
                invalid.setdefault("invalidKernelSources", []).append(reference)
            else:
                inputs[name if older else f"notebooks/{owner}/{name}"] = newest.output
        unknown = [name for name in body.get("competitionDataSources", []) if name not in self._rules.competitions]
        return inputs, invalid | ({"invalidCompetitionSources": unknown} if unknown else {})

    def _run(self, session: Session) -> None:
        """Execute a session and settle what remains of it."""
        session.may_start.wait(self._rules.queue_s)
        working = session.folder / "working"
        working.mkdir(parents=True)
        session.began_s = time.monotonic()
        timeout_s = float(session.request.get("sessionTimeoutSeconds") or self._rules.max_timeout_s)
        timeout_s = min(timeout_s, self._rules.killed_after_s or timeout_s)
        if not session.cancelled.is_set():
            session.status = "RUNNING"
            session.exit_code = sandbox.run(session, working, timeout_s, self._variables)
        session.ended_s = time.monotonic()
        if session.exit_code is None:  # killed at its time limit, or by a person: nothing of it is to be had
            session.log, session.failure = [], ""
            shutil.rmtree(working, ignore_errors=True)
            session.status = "CANCEL_ACKNOWLEDGED"
            return
        _keep_plain_files(working)
        if session.exit_code:
            session.failure = f"Your notebook tried to exit with code {session.exit_code}"
            session.output = working if self._rules.keeps_error_output else None
        else:
            session.output = working
        session.status = "ERROR" if session.exit_code else "COMPLETE"

    def cancel(self, slug: str) -> None:
        """As a person does in the browser; the interface has nothing for it."""
        _cancel(self.kernels[slug][-1])

    def close(self) -> None:
        for session in self.sessions():
            _cancel(session)
        for thread in self._threads:
            thread.join(20)

    def _of(self, body: Json) -> Session:
        versions = self.kernels.get(body.get("kernelSlug", "")) if body.get("userName") == self._owner else None
        label = re.fullmatch(r"v(\d+)", body.get("versionLabel") or f"v{len(versions or ())}")
        if not versions or not label or not 1 <= int(label[1]) <= len(versions):
            raise ApiError(self._rules.absent_status, "Permission 'kernels.get' was denied")
        return versions[int(label[1]) - 1]

    def status(self, body: Json) -> Json:
        session = self._of(body)
        answer = {"status": session.status} if session.status != "QUEUED" else {}  # a default, which is left out
        return answer | ({"failureMessage": session.failure} if session.failure else {})

    def get(self, body: Json) -> Json:
        session = self._of(body)
        metadata = {key: session.request[key] for key in session.request if key.endswith("Sources")}
        metadata |= {
            "id": 1, "ref": f"{self._owner}/{session.slug}", "title": session.request.get("newTitle", ""), "slug": session.slug,
            "currentVersionNumber": len(self.kernels[session.slug]), "machineShape": session.machine_shape,
        }  # fmt: skip
        return {
            "metadata": metadata,
            "blob": {"source": session.request["text"], "language": "python", "slug": session.slug},
        }

    def list_output(self, body: Json) -> Json:
        session = self._of(body)
        if not session.is_over:
            return {}
        if session.output is None:
            raise ApiError(404, "No output")
        session.names = names = session.names or sorted(
            str(path.relative_to(session.output)) for path in session.output.rglob("*") if path.is_file()
        )
        at = int(body.get("pageToken") or 0)
        size = min(int(body.get("pageSize") or 20), self._rules.page)
        files = [{"fileName": name, "url": self._signed(session.output / name)} for name in names[at : at + size]]
        answer: Json = {"files": files} if files else {}
        if session.log:
            answer["log"] = json.dumps(session.log)
        return answer | ({"nextPageToken": str(at + size)} if at + size < len(names) else {})

    def _signed(self, path: Path) -> str:
        key = f"{len(self._urls):08x}"
        self._urls[key] = path, time.monotonic() + self._rules.url_s
        return f"https://www.kaggleusercontent.com/kf/{key}?Signature=of-{key}"

    def file_of(self, key: str) -> Path | None:
        path, until_s = self._urls.get(key, (None, 0.0))
        return path if time.monotonic() < until_s else None

    def list(self, body: Json) -> Json:
        names = [{"ref": f"{self._owner}/{slug}", "title": slug} for slug in self.kernels]
        return {"kernels": names} if names else {}

    def delete(self, body: Json) -> Json:
        session = self._of(body)
        if not session.is_over:
            return {"errorMessage": "The kernel is running"}
        shutil.rmtree(session.folder.parent, ignore_errors=True)
        del self.kernels[session.slug]
        return {}

    def used_s(self) -> float:
        rules = self._rules
        own = sum(
            session.elapsed_s * rules.factors.get(session.machine_shape, 1.0)
            for session in self.sessions()
            if session.machine_shape.startswith("Nvidia")
        )
        return rules.used_s + own

    def quota(self, body: Json) -> Json:
        now = datetime.now(UTC)
        saturday = (now + timedelta(days=(5 - now.weekday()) % 7 or 7)).strftime("%Y-%m-%dT00:00:00Z")
        gpu = {
            "timeUsed": f"{self.used_s():.3f}s", "timeReserved": "0s", "totalTimeAllowed": f"{int(self._rules.quota_s)}s",
            "minimumTimeAllowed": "21600s", "hasEverRun": True,
        }  # fmt: skip
        return {
            "quotaRefreshTime": saturday,
            "gpuQuota": gpu,
            "tpuQuota": {"timeUsed": "0s", "timeReserved": "0s", "totalTimeAllowed": "72000s"},
        }

    def log_events(self, body: Json) -> tuple[bool, Iterator[Json]]:
        """Whether the session is over, and its events, which go on until its end."""
        session = self._of(body)
        if session.status == "CANCEL_ACKNOWLEDGED":
            raise ApiError(404, "No log")
        return session.is_over, _follow(session)


def _cancel(session: Session) -> None:
    session.cancelled.set()
    session.may_start.set()
    sandbox.kill(session)


def _follow(session: Session) -> Iterator[Json]:
    at = 0
    while True:
        is_over = session.is_over
        while at < len(session.log):
            yield session.log[at]
            at += 1
        if is_over:
            return
        time.sleep(0.02)


def _keep_plain_files(folder: Path) -> None:
    """What of an output remains: nobody knows how Kaggle takes sockets, pipes and links, so they are gone."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            path.unlink()
