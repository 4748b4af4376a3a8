"""What the stand-in keeps in memory: kernels with their sessions, data sets, uploads."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OVER = ("COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED")


class ApiError(Exception):
    """An HTTP error of the interface."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Session:
    """One version of a kernel, which is executed once.

    Attributes:
        request: SaveKernel as it came.
        inputs: folder of each attached thing, by its path below /kaggle/input.
        output: what /kaggle/working held at its end; None where nothing of it can be had.
        names: of the files in it, once they were listed.
        log: events as the interface gives them.
        may_start: ends its time in the queue before that is over.
    """

    owner: str
    slug: str
    version: int
    request: dict[str, Any]
    inputs: dict[str, Path]
    folder: Path
    status: str = "QUEUED"
    failure: str = ""
    began_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    output: Path | None = None
    names: list[str] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    process: Any = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    may_start: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def machine_shape(self) -> str:
        shape = str(self.request.get("machineShape") or "")
        if shape == "NvidiaTeslaP100" or (not shape and self.request.get("enableGpu")):
            return "NvidiaTeslaT4"  # the retired one is replaced in silence, and this one is the default
        return shape

    @property
    def elapsed_s(self) -> float:
        return ((self.ended_s or time.monotonic()) - self.began_s) if self.began_s else 0.0

    @property
    def nonce(self) -> str:
        match = re.search(r"\bnonce=(\w+)", self.request.get("text", "").split("\n", 2)[1])
        return match[1] if match else ""


@dataclass
class Dataset:
    """A data set with one version; `files` are in `folder` once it is READY."""

    slug: str
    folder: Path
    ready_at_s: float
    files: dict[str, Path]
    is_private: bool
    failed: bool = False

    @property
    def status(self) -> str:
        if self.failed:
            return "FAILED"
        return "READY" if time.monotonic() >= self.ready_at_s else "BLOBS_RECEIVED"


@dataclass
class Upload:
    """A file on its way. `received` is what of it has come."""

    token: str
    name: str
    size: int
    path: Path

    @property
    def received(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


def slug_of(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
