"""Copies of mounted data on a local disk, made while training runs, as the supervisor sees them.

A process of its own makes them (services/data_cache_process.py), because it runs at the lowest priority for cores and disk. When
it fails, training goes on with the originals.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kgorch.core.codes import EventKind, Note
from kgorch.core.health import bottlenecks
from kgorch.plan import DataSection
from kgorch.services.data_cache_process import copy_path

AUTO_AFTER = 60
"""Samples, one a second, that must show a training waiting for its data before `auto` starts to copy."""


class DataCache:
    """The supervisor's side of the process that copies data sets to the local disk.

    Args:
        workdir: folder that relative paths of the plan start at.
        note: takes entries for the journal from any thread: `data_cached`, `data_cache_failed`, `data_cache_stale`.
        stages: arguments of each stage, in which `auto` looks for sources.
    Attributes:
        caches: the folder of each source's cache, by the source.
    """

    def __init__(
        self, section: DataSection, workdir: Path, note: Note, stages: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._note = note
        into = workdir / section.into if section.into else Path(tempfile.gettempdir(), "kgorch-cache")
        paths = _on_other_disks(stages, workdir, into) if section.cache == "auto" else section.cache
        sources = dict.fromkeys(os.path.normpath(workdir / path) for path in paths)
        self.caches = {source: str(cache_folder(source, into)) for source in sources}
        self._complete: set[str] = set()  # sources whose copy may be read
        self._process: subprocess.Popen[str] | None = None
        self._order = {"caches": self.caches, "reserve": section.reserve}
        self._samples: deque[Mapping[str, float]] = deque(maxlen=AUTO_AFTER)
        self._is_pending = bool(sources)
        if section.cache != "auto":
            self._start()

    def consider(self, sample: Mapping[str, float]) -> None:
        """With `auto`: take the newest sample of the telemetry, and start once the samples say that training waits for data."""
        if not self._is_pending or (self._samples and sample == self._samples[-1]):
            return
        self._samples.append(sample)
        if len(self._samples) == AUTO_AFTER and "waiting_for_data" in _causes(self._samples):
            self._start()

    def args(self, args: Mapping[str, Any], *, workdir: str) -> dict[str, Any]:
        """A stage's arguments, with the copy in place of each that is a source whose copy is complete."""
        copies = {source: str(copy_path(source, self.caches[source])) for source in self._complete}
        return {
            name: copies.get(os.path.normpath(Path(workdir, value)), value)
            if isinstance(value, str) and value
            else value
            for name, value in args.items()
        }

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        if not self._is_pending:
            return
        self._is_pending = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kgorch.services.data_cache_process", json.dumps(self._order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:  # no room for another process: training goes on with the originals
            self._note(EventKind.DATA_CACHE_FAILED, {"source": ", ".join(self.caches), "why": str(error)})
            return
        threading.Thread(target=self._read_reports, args=(self._process,), name="datacache", daemon=True).start()

    def _read_reports(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            kind, facts = json.loads(line)
            # a new set: the loop may be iterating over the old one
            source = {facts["source"]}
            self._complete = self._complete | source if kind == EventKind.DATA_CACHED else self._complete - source
            self._note(kind, facts)


def _causes(samples: Iterable[Mapping[str, float]]) -> set[str]:
    return {item.cause for item in bottlenecks.advise(list(samples)).findings}


def _on_other_disks(stages: Iterable[Mapping[str, Any]], workdir: Path, into: Path) -> Iterator[str]:
    """The paths in the stages' arguments that exist on another disk than the cache's and do not contain the plan's folder."""
    device = next(folder for folder in (into, *into.parents) if folder.is_dir()).stat().st_dev
    for value in (value for args in stages for value in args.values()):
        if isinstance(value, str) and value:
            with contextlib.suppress(OSError, ValueError):  # most arguments are no paths
                path = Path(workdir, value)
                if path.stat().st_dev != device and not workdir.is_relative_to(path):
                    yield value


def cache_folder(source: str, into: Path) -> Path:
    """The folder of a source's cache. By the resolved path, so that runs which name it differently share the copy."""
    return into / hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:16]
