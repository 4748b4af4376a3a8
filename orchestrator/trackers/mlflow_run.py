"""An MLflow run, through `mlflow.MlflowClient`: no global state, no autologging.

The run is found by its tag `kgorch.run_id`, so a machine without this state folder goes on with it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from kgorch.core.codes import Phase
from kgorch.system.redaction import without_credentials
from kgorch.trackers.feed import Cursor, Feed, Scalar
from kgorch.trackers.tracker import TrackedRun

TAG = "kgorch.run_id"
BATCH = 1000
"""Metrics of one request; MLflow's own limit."""

ARGUMENTS = 100
"""Arguments of one request; MLflow's own limit."""

MAX_KEY, MAX_TEXT = 250, 5000
"""Characters of a metric's key and of a tag's value; MLflow's own limits."""

STATUS = {
    Phase.FINISHED: "FINISHED",
    Phase.FAILED: "FAILED",
    Phase.SUSPENDED: "SCHEDULED",
    Phase.CUT_OFF: "SCHEDULED",
}
"""What MLflow calls a run whose session is over. A suspended one waits for its next session."""


class MlflowRun:
    """One run in an experiment."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=run.settings.uri)
        self._marks: dict[int, str] = {}
        experiment = self._experiment_id(run.project)
        found = self._find(experiment, run)
        self._is_new = found is None
        if found is None:
            tags = {TAG: run.info.id, "mlflow.source.name": "kgorch"}
            found = self._client.create_run(experiment, tags=tags, run_name=f"{run.info.name} {run.info.number}")
        self.reference = str(found.info.run_id)
        self._keys = set(found.data.metrics)
        self._client.update_run(self.reference, status="RUNNING")
        self._log_arguments(run.arguments, found.data.params)
        server = without_credentials(run.settings.uri or "")
        self.url = (
            f"{server.rstrip('/')}/#/experiments/{experiment}/runs/{self.reference}"
            if server.startswith("http")
            else ""
        )

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _find(self, experiment: str, run: TrackedRun) -> Any:
        """The newest run there that is this one; None for none."""
        where = f"tags.`{TAG}` = '{run.info.id}'"  # an id is hexadecimal, or the name pattern of an imported run
        if not re.fullmatch(r"[\w.-]+", run.info.id):
            return None
        found = self._client.search_runs([experiment], where, max_results=1, order_by=["attributes.start_time DESC"])
        return self._client.get_run(found[0].info.run_id) if found else None

    def _log_arguments(self, arguments: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """MLflow's parameters cannot change: what a later plan changed stands in the session's text."""
        from mlflow.entities import Param

        new = [
            Param(key_of(key), str(value)[:MAX_TEXT]) for key, value in arguments.items() if key_of(key) not in known
        ]
        for begin in range(0, len(new), ARGUMENTS):
            self._client.log_batch(self.reference, params=new[begin : begin + ARGUMENTS])

    def bring_up(self, cursor: Cursor, scalars: Sequence[Scalar]) -> Cursor:
        if self._is_new:  # of before, or of a run that was deleted there
            return Cursor()
        if cursor.tags:  # what was sent was stored there before the call returned
            return cursor
        tags = dict.fromkeys(item.tag for item in scalars)
        return Cursor({tag: self._last_step(key_of(tag)) for tag in tags if key_of(tag) in self._keys})

    def _last_step(self, key: str) -> int:
        return max((item.step for item in self._client.get_metric_history(self.reference, key)), default=-1)

    def send(self, feed: Feed, unsent: Sequence[Scalar]) -> None:
        for begin in range(0, len(unsent), BATCH):
            self._client.log_batch(self.reference, metrics=list(_metrics(unsent[begin : begin + BATCH])))
        for mark in feed.marks:
            if self._marks.get(mark.number) != mark.text:
                self._client.set_tag(self.reference, f"kgorch.session.{mark.number}", mark.text[:MAX_TEXT])
                self._marks[mark.number] = mark.text

    def close(self, phase: str) -> None:
        if status := STATUS.get(Phase(phase)) if phase else None:
            self._client.update_run(self.reference, status=status)


def _metrics(scalars: Iterable[Scalar]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for item in scalars:
        yield Metric(key_of(item.tag), item.value, round(item.at_s * 1000), item.step)


def key_of(tag: str) -> str:
    """A tag as MLflow allows it as a key. A tag that had to change has a hash behind it, so that no two become one."""
    plain = re.sub(r"[^\w.\- :/]", "_", tag, flags=re.ASCII)
    plain = re.sub(r"/(?=/|$)|(?<=/)\.+(?=/|$)", "_", plain)  # MLflow takes keys for paths: no "a//b", "a/", "a/../b"
    if plain == tag and len(tag) <= MAX_KEY:
        return tag
    return f"{plain[: MAX_KEY - 9]}_{xxhash.xxh32_hexdigest(tag.encode(errors='replace'))}"
