"""kgorch from Python, with the names of the verbs: `kgorch.runs()`, `kgorch.status("ink")`, `kgorch.start("plan.toml")`.

What only looks reads the database in this process. What acts is the verb itself, in a process of its own: a session needs signal
handlers, a umask and a process that outlives a notebook's kernel. So an action does here what it does in a shell, and fails with
the same words.

Tables are pandas data frames where pandas is installed, else lists of dictionaries with the same columns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from kgorch.errors import ExitCode, KgorchError, parse_message

if TYPE_CHECKING:
    from sqlalchemy import Engine

Table: TypeAlias = Any
"""A `pandas.DataFrame`, or a list of dictionaries."""

Plan: TypeAlias = "str | os.PathLike[str]"

MAX_ERROR_LINES = 40
"""Last lines of a verb's output that an error shows, where it ended with a traceback."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run; the fields of `kgorch status --json` (docs/json.md) by the same names.

    Attributes:
        run, run_number: its name, and which run of that name.
        state: `active`, `finished`, `failed`, `superseded`.
        phase: of its newest session.
        why: what ends or has ended the session, or the run where it failed; for people.
        stage: that runs or ran last.
        step, steps_total, epoch, epochs_total: of that stage; None for a total that is not known.
        metrics: reported last, by name; None for NaN and infinities.
        is_training: whether ranks are alive.
        checkpoint_step: of the newest verified checkpoint; None without one.
        wall_at: the session's time limit; None without one, or without a session.
        end_at: when the stage is expected to end; None where that is not known.
        notices: what a user should know.
        fields: all of the fields, as JSON has them.
    """

    run: str
    run_number: int
    state: str
    phase: str
    why: str
    stage: str
    step: int
    steps_total: int | None
    epoch: int
    epochs_total: int | None
    metrics: Mapping[str, float | None]
    is_training: bool
    checkpoint_step: int | None
    wall_at: datetime | None
    end_at: datetime | None
    notices: tuple[str, ...]
    fields: Mapping[str, Any]


def status(run: str | None = None) -> RunStatus:
    """The state of a run; of the newest one where none is named. Raises: NotFound, StateUnusable."""
    from kgorch.cli.lookup import find_run
    from kgorch.report import run_view

    with _database() as engine:
        return status_of(run_view.of_run(engine, find_run(engine, run)))


def runs(limit: int = 50) -> Table:
    """The newest runs, a row each: the plain fields of `RunStatus`. Raises: StateUnusable."""
    from kgorch.db import runs as rows
    from kgorch.report import run_view

    with _database() as engine:
        items = [status_of(run_view.of_run(engine, run)) for run in rows.all_runs(engine, limit=limit)]
    names = [name for name in RunStatus.__slots__ if name not in ("metrics", "notices", "fields")]
    return _table(names, [[getattr(item, name) for name in names] for item in items])


def metrics(run: str | None = None, *, stage: str | None = None, names: str | Sequence[str] = ()) -> Table:
    """The metrics of a run over all its sessions: a row a step.

    The columns are `stage`, `step`, `epoch`, `at`, `steps` (`kgorch metrics --json`), and one a metric. Steps that were done again
    are there once. A value that is not there is None (NaN in a data frame). A metric that is named as
    one of the other columns is `NAME (metric)`.

    Args:
        stage, names: only these; one name, or several.
    Raises: NotFound, also for what the run has never reported; StateUnusable.
    """
    from kgorch.cli.lookup import find_run
    from kgorch.report import metrics as figures

    with _database() as engine:
        found = find_run(engine, run)
        curve = figures.select(
            found, figures.of_run(engine, found), [names] if isinstance(names, str) else names, stage
        )
    first = ["stage", "step", "epoch", "at", "steps"]
    reported = curve.names
    rows = [
        [of, point.step, point.epoch or None, _instant(point.at_s), point.steps, *map(point.values.get, reported)]
        for of, point in curve.points()
    ]
    return _table([*first, *(f"{name} (metric)" if name in first else name for name in reported)], rows)


def history(run: str | None = None, limit: int = 50) -> Table:
    """The newest sessions of a run, oldest first: the plain fields of `kgorch history --json`. Raises: NotFound, StateUnusable."""
    from kgorch.cli.lookup import find_run
    from kgorch.report import run_view

    with _database() as engine:
        entries = run_view.history(engine, find_run(engine, run), limit=limit)
    names = ["number", "site", "phase", "reason", "why", "started_at", "ended_at", "lasted_s"]
    times = ("started_at", "ended_at")
    return _table(
        names, [[_parsed(entry[name]) if name in times else entry[name] for name in names] for entry in entries]
    )


def start(
    plan: Plan = "plan.toml",
    *,
    settings: Mapping[str, Any] | None = None,
    fresh: bool = False,
    extend: bool = False,
    accept_changes: bool = False,
    accept_plan: bool = False,
    until: datetime | None = None,
) -> RunStatus:
    """Start or continue the run of a plan, supervised in the background; returns once its session is open.

    Args:
        settings: values of the plan to override, by their dotted keys: `{"stage.train.args.epochs": 3}`.
        until: time limit of this session.
    Raises: KgorchError, with what the verb says; TypeError for a setting that TOML has no value for, such as None.
    """
    from kgorch.plan.toml_values import toml_literal

    flags = {
        "--fresh": fresh,
        "--extend": extend,
        "--accept-changes": accept_changes,
        "--accept-plan": accept_plan,
    }
    words = [flag for flag, is_set in flags.items() if is_set]
    words += [word for key, value in (settings or {}).items() for word in ("--set", f"{key}={toml_literal(value)}")]
    words += ["--until", _aware(until).isoformat()] if until else []
    return _status_from(_run_verb("start", *words, "--detach", "--json", "--", os.fspath(plan)))


def resume(run: str | None = None, *, accept_plan: bool = False) -> RunStatus | None:
    """Continue a run by its stored plan, supervised in the background; None if there is no unfinished run.

    Raises: KgorchError, with what the verb says.
    """
    words = ["--accept-plan"] if accept_plan else []
    output = _run_verb("resume", *words, "--detach", "--json", *_run_word(run))
    return None if output.strip() == "null" else _status_from(output)


def save(run: str | None = None, *, wait: bool = True) -> RunStatus:
    """Save a checkpoint now; training continues. Returns once it is verified, or at once without `wait`. Raises: KgorchError."""
    _run_verb("save", "--wait" if wait else "--no-wait", *_run_word(run))
    return status(run)


def stop(run: str | None = None, *, wait: bool = True) -> RunStatus:
    """Save, then end the session. Returns once it is over, or at once without `wait`. Raises: KgorchError."""
    _run_verb("stop", "--wait" if wait else "--no-wait", *_run_word(run))
    return status(run)


def status_of(view: Mapping[str, Any]) -> RunStatus:
    """The view of a run (report/run_view.py), typed."""
    session, checkpoint, forecast = view["session"] or {}, view["checkpoint"] or {}, view["forecast"] or {}
    same = (
        "run",
        "run_number",
        "state",
        "phase",
        "why",
        "stage",
        "step",
        "steps_total",
        "epoch",
        "epochs_total",
        "metrics",
    )
    return RunStatus(
        **{name: view[name] for name in same},
        is_training=bool(session.get("training_alive")),
        checkpoint_step=checkpoint.get("step"),
        wall_at=_parsed(session.get("wall_at")),
        end_at=_parsed(forecast.get("end_at")),
        notices=tuple(view["notices"]),
        fields=view,
    )


@contextmanager
def _database() -> Iterator[Engine]:
    from kgorch.cli.lookup import open_state

    _, _, engine = open_state()
    try:
        yield engine
    finally:
        engine.dispose()  # a cell that looks each second must not add up connections


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    if importlib.util.find_spec("pandas") is None:
        return [dict(zip(names, row, strict=True)) for row in rows]
    import pandas

    return pandas.DataFrame([list(row) for row in rows], columns=list(names))


def _run_word(run: str | None) -> list[str]:
    return [] if run is None else ["--", run]


def _run_verb(verb: str, *words: str) -> str:
    """What a verb prints on stdout. Raises: KgorchError, with what it says on stderr."""
    command = [sys.executable, "-m", "kgorch.cli", verb, *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode in (ExitCode.DONE, ExitCode.SUSPENDED, ExitCode.QUOTA_SPENT):
        return done.stdout
    raise _error_from(done.stderr, done.returncode)


def _error_from(text: str, code: int) -> KgorchError:
    """The error that a verb has printed: `error: …`, indented facts, `next: …`."""
    if (error := parse_message(text)) is None:
        lines = text.strip().splitlines()
        return KgorchError(f"kgorch ended with status {code}", *lines[-MAX_ERROR_LINES:], error_code="KG901")
    return error


def _status_from(output: str) -> RunStatus:
    return status_of(json.loads(output))


def _aware(at: datetime) -> datetime:
    """An instant without a time zone is local time, as in a shell."""
    return at.astimezone()


def _parsed(stamp: str | None) -> datetime | None:
    return datetime.fromisoformat(stamp) if stamp else None


def _instant(at_s: float) -> datetime | None:
    """None for a time that no date can hold: the records may be from elsewhere."""
    try:
        return datetime.fromtimestamp(at_s, UTC)
    except (ValueError, OverflowError, OSError):
        return None
