"""A run of Weights & Biases.

Its id there is kgorch's own, so each session on each machine goes on with the same run. The x axis of a metric is the stage's
step, reported beside it: W&B's own counter only grows, and a later stage begins at 0 again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from kgorch.core import text as texts
from kgorch.core.codes import Phase
from kgorch.trackers.feed import SESSION, SYSTEM, Cursor, Feed, Scalar
from kgorch.trackers.tracker import TrackedRun

X_AXIS = {SYSTEM: "system/minute"}
"""Prefix of tags → the metric that is their x axis; `PREFIX/step` for stages."""

SENT = "kgorch_sent"
"""Key of the summary: JSON of the last step by tag, as the server has it. The summary's x axis is that of the stage's last row,
which other tags may not have reached, or a session mark has put back."""


class WandbRun:
    """One run in a project, online or offline as $WANDB_MODE says."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.state.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off",  # the output of this process is not the training's
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,  # kgorch's telemetry is of all ranks, W&B's would be of this process
        )
        self._run: Any = wandb.init(
            id=run.info.id,
            resume="allow",
            project=run.project,
            entity=run.settings.entity,
            name=f"{run.info.name} {run.info.number}",
            dir=str(run.state),
            settings=settings,
        )
        config: Any = self._run.config
        config.update({**run.arguments, "kgorch_run_id": run.info.id}, allow_val_change=True)
        self._is_offline = bool(self._run.offline)
        self._defined: set[str] = set()
        self._marks: dict[int, str] = {}
        self._sent: dict[str, int] = {}
        self.reference = str(self._run.id)
        self.url = "" if self._is_offline else str(self._run.url or "")

    def bring_up(self, cursor: Cursor, scalars: Sequence[Scalar]) -> Cursor:
        """Online the server's own word counts: what was handed to the library may not have been uploaded before a wall."""
        tags = {*cursor.tags, *(item.tag for item in scalars)}
        if self._is_offline:
            self._sent = {tag: cursor.last(tag) for tag in tags}
            return cursor
        self._sent = self._at_server(cursor, tags) | self._marked_at_server(scalars)
        return Cursor({tag: step for tag, step in self._sent.items() if step >= 0})

    def _at_server(self, cursor: Cursor, tags: set[str]) -> dict[str, int]:
        """The last step by tag that the server has, of these tags and of those whose values were undone."""
        stored = self._stored()
        reached: dict[str, int] = {}
        for tag, step in (stored or {}).items():
            reached[axis_of(tag)] = max(step, reached.get(axis_of(tag), -1))
        steps = {}
        for tag in tags | (stored or {}).keys():
            axis_step = self._run.summary.get(axis_of(tag))
            newest = int(axis_step) if isinstance(axis_step, int | float) else -1
            if stored is None:  # uploaded before SENT was
                steps[tag] = min(cursor.tags.get(tag, newest), newest)
            else:  # beyond SENT a part of a batch was uploaded, in the order of its steps
                steps[tag] = newest if newest > reached.get(axis_of(tag), -1) else stored.get(tag, -1)
        return steps

    def _stored(self) -> dict[str, int] | None:
        """SENT at the server; None for none."""
        try:
            return {str(tag): int(step) for tag, step in json.loads(self._run.summary.get(SENT)).items()}
        except (ValueError, TypeError, AttributeError, OverflowError):
            return None

    def _marked_at_server(self, scalars: Iterable[Scalar]) -> dict[str, int]:
        """The last step by tag of session marks: by their numbers, for a session may begin where an earlier one began."""
        steps: dict[str, int] = {}
        for item in scalars:
            if item.tag.endswith(f"/{SESSION}"):
                number = self._run.summary.get(item.tag)
                is_there = isinstance(number, int | float) and item.value <= number
                steps[item.tag] = item.step if is_there else steps.get(item.tag, -1)
        return steps

    def send(self, feed: Feed, unsent: Sequence[Scalar]) -> None:
        for axis in {axis_of(item.tag) for item in unsent} - self._defined:
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(f"{axis.partition('/')[0]}/*", step_metric=axis)
            self._defined.add(axis)
        ordered = sorted(unsent, key=lambda item: (axis_of(item.tag), item.step))
        for (axis, step), items in itertools.groupby(ordered, lambda item: (axis_of(item.tag), item.step)):
            row: dict[str, Any] = {axis: step}
            for item in items:
                row |= {item.tag: item.value, "_timestamp": item.at_s}
                self._sent[item.tag] = step
            self._run.log(row)
        if unsent:
            self._run.summary[SENT] = json.dumps(self._sent)
        for mark in feed.marks:
            if self._marks.get(mark.number) != mark.text:
                self._run.summary[f"kgorch_session_{mark.number}"] = texts.in_one_line(mark.text)
                self._marks[mark.number] = mark.text

    def close(self, phase: str) -> None:
        """Waits until everything is uploaded, or until the process is killed: then the next session sends the rest."""
        self._run.finish(exit_code=1 if phase == Phase.FAILED else 0)


def axis_of(tag: str) -> str:
    """The metric that is the x axis of a tag."""
    prefix = tag.partition("/")[0]
    return X_AXIS.get(prefix, f"{prefix}/kgorch_step")
