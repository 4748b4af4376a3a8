"""TensorBoard's event files, written by the writer of the package `tensorboard` itself, without PyTorch and TensorFlow.

The files are a function of the run's curve: at the start, and whenever an attempt has undone steps, one file with all of it takes
the place of the former ones. So no step is there twice, whatever was killed, and a machine that has only the database makes them
anew. Between these, values are appended as they come.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kgorch.core import text as texts
from kgorch.trackers.feed import Cursor, Feed, Scalar, SessionMark
from kgorch.trackers.tracker import TrackedRun

SUFFIX = ".kgorch"
"""Of the names of our files: others in the folder are somebody else's."""

MARKS = "kgorch/sessions"


class TensorBoardFiles:
    """The folder of one run below a TensorBoard log folder."""

    def __init__(self, run: TrackedRun) -> None:
        root = (
            Path(run.info.workdir, run.settings.folder) if run.settings.folder else Path(run.info.folder, "tensorboard")
        )
        self._folder = root / f"{run.info.name}-{run.info.number}"
        self.reference = self.url = str(self._folder)
        self._writer: Any = None
        self._written: dict[str, list[Scalar]] = {}  # by tag: the newest one, behind a count
        self._counts: dict[str, int] = {}
        self._marks: dict[int, str] = {}

    def bring_up(self, cursor: Cursor, scalars: Sequence[Scalar]) -> Cursor:
        return Cursor()  # everything is written anew

    def send(self, feed: Feed, unsent: Sequence[Scalar]) -> None:
        by_tag: dict[str, list[Scalar]] = defaultdict(list)
        for item in feed.scalars:
            by_tag[item.tag].append(item)
        if self._writer is None or not self._is_continued_by(by_tag):
            self._begin()
        for tag, items in by_tag.items():
            for item in items[self._counts.get(tag, 0) :]:
                self._write_scalar(item)
            self._counts[tag], self._written[tag] = len(items), items[-1:]
        for mark in feed.marks:
            if self._marks.get(mark.number) != mark.text:
                self._write_mark(mark)
                self._marks[mark.number] = mark.text
        self._writer.flush()

    def close(self, phase: str) -> None:
        if self._writer:
            self._writer.close()

    def _is_continued_by(self, by_tag: Mapping[str, Sequence[Scalar]]) -> bool:
        """Whether what was written is the beginning of each curve. It is not where an attempt has undone steps."""
        return all(
            len(by_tag.get(tag, ())) >= count and list(by_tag[tag][count - 1 : count]) == self._written[tag]
            for tag, count in self._counts.items()
        )

    def _begin(self) -> None:
        """Begin a file for everything, and remove the former ones."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        former = list(self._folder.glob(f"events.out.tfevents.*{SUFFIX}"))
        if self._writer:
            self._writer.close()
        self._writer = EventFileWriter(str(self._folder), filename_suffix=SUFFIX)
        self._counts, self._written, self._marks = {}, {}, {}
        # A TensorBoard that shows the former file drops what it has read when it meets this.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(step=0, session_log=start))
        for path in former:
            with contextlib.suppress(OSError):
                path.unlink()

    def _write_scalar(self, item: Scalar) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        value = summary_pb2.Summary.Value(tag=item.tag, simple_value=item.value)
        self._writer.add_event(
            event_pb2.Event(wall_time=item.at_s, step=item.step, summary=summary_pb2.Summary(value=[value]))
        )

    def _write_mark(self, mark: SessionMark) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.text import metadata

        # indented, Markdown takes it for code and shows it as it is
        line = f"    {texts.in_one_line(mark.text)}"
        value = summary_pb2.Summary.Value(
            tag=MARKS,
            metadata=metadata.create_summary_metadata(display_name="sessions", description=""),
            tensor=tensor_pb2.TensorProto(
                dtype=types_pb2.DT_STRING,
                string_val=[line.encode()],
                tensor_shape={"dim": [{"size": 1}]},
            ),
        )
        self._writer.add_event(
            event_pb2.Event(wall_time=mark.at_s, step=mark.number, summary=summary_pb2.Summary(value=[value]))
        )
