"""A run of Weights & Biases.

Its id there is kgorch's own, so each session on each machine goes on with the same run. The x axis of a metric is the stage's
step, reported beside it: W&B's own counter only grows, and a later stage begins at 0 again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from kgorch.core import text as texts
from kgorch.core.codes import Phase
from kgorch.trackers.feed import SYSTEM, Cursor, Feed, Scalar
from kgorch.trackers.tracker import TrackedRun

X_AXIS = {SYSTEM: "system/minute"}
"""Prefix of tags → the metric that is their x axis; `PREFIX/step` for stages."""


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
        self.reference = str(self._run.id)
        self.url = "" if self._is_offline else str(self._run.url or "")

    def bring_up(self, cursor: Cursor, tags: Iterable[str]) -> Cursor:
        """Online the server's own word counts: what was handed to the library may not have been uploaded before a wall."""
        if self._is_offline:
            return cursor
        at_server = {tag: self._run.summary.get(axis_of(tag)) for tag in tags}
        return Cursor({tag: int(step) for tag, step in at_server.items() if isinstance(step, int | float)})

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
            self._run.log(row)
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
