"""Kaggle as a Place (remote/place.py): one account, through the process of its official client.

One kernel (slug) for each session, because Kaggle refuses a kernel as a source of itself. A push is believed only when the typed
answer says that it was accepted, under our name, with all of its inputs; `kaggle kernels push` itself says "successfully pushed"
for less, and ends with 0 for a refusal.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kgorch.core.remote.place_values import (
    Account,
    PlaceError,
    PlaceQuota,
    Pushed,
    SessionOrder,
    Sighting,
    Trouble,
)
from kgorch.remote.place import RECORD_BYTES, RECORD_NAME, OnBytes, unwatched
from kgorch.remote.places.kaggle import answers
from kgorch.remote.places.kaggle.client import Client
from kgorch.untrusted_io import parse_json, read_all

ASK_S, PUSH_S = 60.0, 180.0
"""Seconds for one question, with the start of the client; for a push, whose text may be large."""

SLOWEST_BYTES_PER_S, MAX_UPLOAD_S = 64 << 10, 6 * 3600.0
"""An upload may take what it takes at this rate; afterwards it goes on where it ended, at the next call."""

STALLED_S = 180.0
"""Seconds without progress after which a download is given up; the client's own limits for a connection come before."""

MAX_FILES, MAX_BYTES = 100_000, 40 << 30
"""Of what is fetched by one call. Kaggle keeps 20 GB of an output."""

SLUG = r"[a-z0-9](-?[a-z0-9])*"
"""A name of which Kaggle makes itself: it makes the name of a kernel from its title."""

BUNDLE_LICENCE = "other"
"""Kaggle asks for one; a private data set is licensed to nobody."""

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".whl")
"""Kaggle unpacks archives of a data set into folders; whether wheels are among them is not known."""

FIRST_S, QUIET_S = 60.0, 3.0
"""Seconds for the first line of a log; a log that is not followed ends when a running session prints nothing for so long."""

FOLLOW_QUIET_S = 900.0
"""A followed log without a line for so long is asked for anew: a connection may be dead without a sign."""

LINE_LENGTH = 64 << 10
"""Characters of a log without a line feed, as a progress bar prints them, that are given out as a line."""

MAX_DROPS, RECONNECT_S = 5, 2.0
"""Connections in a row that bring no new line."""

Files = dict[str, int]


class KagglePlace:
    """One account at Kaggle.

    Args:
        folder: private, outlives processes: notes of uploads, sizes of bundles, temporary files of the client.
        environ: variables of which credentials, proxy and certificates are taken; this process's own without it.
    """

    name = "kaggle"

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._client = Client(folder, os.environ if environ is None else environ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the client's process; the next call starts one."""
        self._client.close()

    def account(self) -> Account:
        return answers.account(self._client.call("account", ASK_S))

    def quota(self) -> PlaceQuota | None:
        return answers.quota(self._client.call("quota", ASK_S))

    def running(self) -> int | None:
        return None  # Kaggle lists sessions without their status: it would take one question for each

    def store_bundle(self, folder: Path, name: str) -> str:
        files = _flat_files(folder)
        if not (6 <= len(name) <= 50 and re.fullmatch(SLUG, name)):
            raise PlaceError(
                Trouble.REFUSED, f"Kaggle takes 6 to 50 of a-z, 0-9 and single `-` for a data set, not {name!r}"
            )
        reference = f"{self.account().name}/{name}"
        self._sizes_path(name).write_text(json.dumps(files))
        status = self._bundle_status(name)
        if status in ("FAILED", "DELETED"):
            raise PlaceError(
                Trouble.REFUSED, f"{_dataset_url(reference)} is {status}: delete it there, or change the bundle"
            )
        if status:
            return reference
        within_s = _transfer_s(sum(files.values()))
        made = self._client.call(
            "create_dataset", within_s, name=name, folder=str(folder.absolute()), licence=BUNDLE_LICENCE
        )
        if answers.error(made) or answers.word(made).lower() != "ok":
            # a creation whose answer was lost, or that another process was faster with, is refused as a second one
            if self._bundle_status(name):
                return reference
            raise PlaceError(
                Trouble.REFUSED, answers.error(made) or f"Kaggle answered {answers.word(made)!r} to a data set"
            )
        return reference

    def is_bundle_ready(self, reference: str) -> bool:
        name = reference.rpartition("/")[2]
        status = self._bundle_status(name)
        if status == "":
            raise PlaceError(Trouble.ABSENT, f"there is no {_dataset_url(reference)}")
        if status in ("FAILED", "DELETED"):
            raise PlaceError(Trouble.REFUSED, f"{_dataset_url(reference)} is {status}")
        if status != "READY":
            return False
        listed = answers.sizes(self._client.call("dataset_files", ASK_S, name=name))
        return bool(listed) and not missing_files(self._sizes(name), listed)

    def push(self, order: SessionOrder, script: str) -> Pushed:
        _check_order(order, script)
        shape = order.accelerator if order.accelerator.lower() not in ("", "none") else ""
        owner = self.account().name
        metadata = {
            "title": order.name, "language": "python", "kernel_type": "script", "is_private": True,
            # left out, the client would switch the internet on, and the server the GPU off
            "enable_internet": order.internet, "enable_gpu": bool(shape) and not shape.startswith("Tpu"),
            "enable_tpu": shape.startswith("Tpu"), "keywords": [], "model_sources": [],
            "dataset_sources": [order.bundle, *order.datasets], "competition_sources": list(order.competitions),
            "kernel_sources": [f"{owner}/{order.source}"] if order.source else [],
        }  # fmt: skip
        value = self._client.call(
            "push", PUSH_S, metadata=metadata, script=script, timeout_s=order.timeout_s, machine_shape=shape or None
        )
        return answers.pushed(value, order.name)

    def find_push(self, order: SessionOrder) -> Pushed | None:
        try:
            value = self._client.call("source", ASK_S, name=order.name)
        except PlaceError as error:
            if error.trouble is Trouble.ABSENT:
                return None
            raise
        return answers.found_push(value, order, self._url(order.name))

    def look(self, name: str) -> Sighting:
        return answers.sighting(self._client.call("status", ASK_S, name=name))

    def collect(
        self,
        name: str,
        folder: Path,
        patterns: tuple[str, ...] = (RECORD_NAME, "kgorch.db"),
        on_bytes: OnBytes = unwatched,
    ) -> list[Path]:
        limits = {"files": MAX_FILES, "bytes": MAX_BYTES, "small": {RECORD_NAME: RECORD_BYTES}}
        folder.mkdir(parents=True, exist_ok=True)
        files: list[Path] = []

        def add(event: Any) -> None:
            if progress := answers.progress_of(event):
                on_bytes(*progress)
            elif file := answers.file_of(event):
                files.append(folder / file)

        value = self._client.call(
            "output", STALLED_S, add, name=name, folder=str(folder.absolute()), patterns=list(patterns), limits=limits
        )
        if answers.file_count(value) != len(files):
            raise PlaceError(Trouble.UNANSWERED, f"Kaggle's client told of {len(files)} files, and counted others")
        return files

    def log(self, name: str, *, follow: bool = False) -> Iterator[str]:
        """Lines; after a lost connection the server begins at the first one, and those that were seen are left out."""
        seen, drops, rest = 0, 0, ""
        while True:
            before = seen
            try:
                for event in self._client.events(
                    "log", FIRST_S, FOLLOW_QUIET_S if follow else QUIET_S, name=name, skip=seen
                ):
                    seen, text = answers.event(event)
                    *lines, rest = (rest + text).split("\n")
                    yield from lines
                    if len(rest) > LINE_LENGTH:
                        yield rest
                        rest = ""
                is_over = not follow or self.look(name).status.is_over
            except TimeoutError:
                is_over = not follow
            except PlaceError as error:
                drops = 0 if seen > before else drops + 1
                if not follow or error.trouble not in (Trouble.UNANSWERED, Trouble.BUSY) or drops >= MAX_DROPS:
                    raise
                is_over = False
                time.sleep(error.retry_after_s or RECONNECT_S)
            if is_over:
                break
        if rest:
            yield rest

    def stop(self, name: str) -> str:
        return (
            f"Kaggle's interface cannot end a session: {name} ends by itself and keeps what it has saved."
            f" Cancelled by hand at {self._url(name)}, it loses its output"
        )

    def delete(self, name: str) -> None:
        try:
            sighting = self.look(name)
            if not sighting.status.is_over:
                raise PlaceError(Trouble.REFUSED, f"{name} is {sighting.word}; only a session that is over is deleted")
            refusal = answers.error(self._client.call("delete", ASK_S, name=name))
        except PlaceError as error:
            if error.trouble is Trouble.ABSENT:
                return
            raise
        if refusal:
            raise PlaceError(Trouble.REFUSED, refusal)

    def _url(self, name: str) -> str:
        return f"https://www.kaggle.com/code/{self.account().name}/{name}"

    def _bundle_status(self, name: str) -> str:
        """Kaggle's word; empty where there is no such data set of ours."""
        try:
            return answers.word(self._client.call("dataset_status", ASK_S, name=name))
        except PlaceError as error:
            if error.trouble is Trouble.ABSENT:
                return ""
            raise

    def _sizes_path(self, name: str) -> Path:
        folder = self._folder / "bundles"
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder / f"{name}.json"

    def _sizes(self, name: str) -> Files:
        """What store_bundle was given. Empty where another machine stored it: then READY must do."""
        try:
            value = parse_json(read_all(self._folder / "bundles", f"{name}.json", 1 << 20))
            return {str(file): int(size) for file, size in value.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


def missing_files(stored: Mapping[str, int], listed: Mapping[str, int]) -> list[str]:
    """Those files of a bundle that a listing of Kaggle's does not have in full. Archives may have been unpacked into a folder."""

    def is_there(name: str, size: int) -> bool:
        if listed.get(name) == size:
            return True
        stems = [name.removesuffix(ending) for ending in ARCHIVES if name.endswith(ending)]
        return any(path.startswith((f"{stem}/", f"{name}/")) for stem in stems for path in listed)

    return [name for name, size in stored.items() if not is_there(name, size)]


def _flat_files(folder: Path) -> Files:
    """Names and sizes of the files. Raises: PlaceError unless they are plain files that lie directly in the folder."""
    entries = sorted(folder.iterdir())
    if not entries:
        raise PlaceError(Trouble.REFUSED, f"{folder} is empty")
    for path in entries:
        if path.is_symlink() or not path.is_file():
            raise PlaceError(Trouble.REFUSED, f"{path} is no plain file; Kaggle's client uploads nothing else")
    return {path.name: path.stat().st_size for path in entries}


def _check_order(order: SessionOrder, script: str) -> None:
    """Refuse what would go wrong at Kaggle in silence. Raises: PlaceError."""
    wrong = ""
    if not (5 <= len(order.name) <= 50 and re.fullmatch(SLUG, order.name)):
        wrong = f"a session is named by 5 to 50 of a-z, 0-9 and single `-`, not {order.name!r}"  # its title must give its slug
    elif order.source == order.name:
        wrong = f"{order.name} cannot have its own output as its source"
    elif f"nonce={order.nonce}" not in "".join(script.split("\n", 2)[1:2]) or not order.nonce:
        wrong = "line 2 of the script has not the order's nonce, by which a push is found again"
    elif not 0 < order.session_s < order.timeout_s:
        wrong = f"the session's {order.session_s} s must be less than Kaggle's {order.timeout_s} s"
    if wrong:
        raise PlaceError(Trouble.REFUSED, wrong)


def _transfer_s(size: int) -> float:
    return min(MAX_UPLOAD_S, ASK_S + 240.0 + size / SLOWEST_BYTES_PER_S)


def _dataset_url(reference: str) -> str:
    return f"https://www.kaggle.com/datasets/{reference}"
