"""Shell completion of runs, metrics, plans and keys of a plan.

The database is read with the standard library's sqlite3, read-only: importing SQLAlchemy takes longer than a user waits after
TAB, and TAB must not create or migrate a database. An error offers nothing and prints nothing.
"""

from __future__ import annotations

import functools
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

Completer = Callable[[click.Context, click.Parameter, str], list[str]]

LOCK_TIMEOUT_S = 0.2
"""For a database that another process has locked."""

MAX_WORDS = 100

_PLAIN = re.compile(r"[\w./=@:,+%\"-]+")
"""Words that are offered. Names of files, keys and metrics may come from anywhere: what a terminal obeys or a shell would run goes
into neither."""


def _completer(complete: Completer) -> Completer:
    """Filters by what was typed and by what is plain, limits the number, and swallows errors."""

    @functools.wraps(complete)
    def wrapper(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
        try:
            words = (word for word in complete(ctx, parameter, typed) if _PLAIN.fullmatch(word))
            return [word for word in words if word.startswith(typed)][:MAX_WORDS]
        except Exception:  # a traceback in the middle of a command line helps nobody
            return []

    return wrapper


def _query(statement: str, *values: object) -> list[tuple[Any, ...]]:
    from kgorch.platforms.detect import detect
    from kgorch.system.paths import state_home

    path = state_home(detect().home) / "kgorch.db"
    if not path.is_file():
        return []
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=LOCK_TIMEOUT_S)) as connection:
        return connection.execute(statement, values).fetchall()


@_completer
def runs(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Names of runs, or NAME/NUMBER after a slash. `kgorch rm` takes several: those that are typed already are left out."""
    name, slash, _ = typed.rpartition("/")
    if slash:
        numbers = _query("SELECT number FROM runs WHERE name = ? ORDER BY number DESC LIMIT ?", name, MAX_WORDS)
        return [f"{name}/{number}" for (number,) in numbers]
    typed_before = ctx.params.get(parameter.name or "")
    rows = _query("SELECT DISTINCT name FROM runs WHERE name >= ? ORDER BY name LIMIT ?", typed, MAX_WORDS)
    return [name for (name,) in rows if not isinstance(typed_before, tuple) or name not in typed_before]


@_completer
def metrics(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Metrics that the run has reported; of the newest run if none was typed."""
    run = ctx.params.get("run")
    query = (
        ("SELECT id FROM runs WHERE name = ? ORDER BY number DESC LIMIT 1", run)
        if run
        else ("SELECT id FROM runs ORDER BY created_at DESC LIMIT 1",)
    )
    [(run_id,)] = _query(*query)
    newest = _query("SELECT metrics FROM sessions WHERE run_id = ? ORDER BY number DESC LIMIT 10", run_id)
    return sorted({name for (metrics,) in newest for name in json.loads(metrics)})


@_completer
def keys_and_codes(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Keys of a plan, as the template explains them; codes of errors after a K, in either case."""
    from kgorch.cli.error_help import topics
    from kgorch.cli.template import key_help

    codes = [*topics(), "codes"] if typed else []
    return [*key_help(), *codes, *(code.lower() for code in codes)]


@_completer
def places(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Places that run sessions."""
    from kgorch.core.remote.place_profiles import PLACES

    return sorted(PLACES)


@_completer
def settings(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """KEY= for --set: keys of a plan, and keys and arguments of the stages in the plan that was typed."""
    from kgorch.cli.template import key_help

    keys = [entry.key for entry in key_help().values() if entry.example and not entry.key.startswith("stage.")]
    return [f"{key}=" for key in (*keys, *_stage_keys(Path(ctx.params.get("plan") or "plan.toml")))]


def _stage_keys(plan: Path) -> Iterator[str]:
    import tomllib

    if not plan.is_file() or plan.stat().st_size > 1 << 20:
        return
    for stage in tomllib.loads(plan.read_text(encoding="utf-8-sig"))["stage"]:
        name = f'"{stage["name"]}"' if "." in stage["name"] else stage["name"]
        for key in ("ranks", "entry", "weights"):
            yield f"stage.{name}.{key}"
        for argument in stage.get("args", {}):
            yield f"stage.{name}.args.{argument}"


@_completer
def plans(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """TOML files, and the folders that may hold some."""
    folder, _, prefix = typed.rpartition("/")
    parent = f"{folder}/" if "/" in typed else ""
    words = []
    for path in sorted(Path(parent or ".").iterdir()):
        if not path.name.startswith(prefix) or (path.name.startswith(".") and not prefix):
            continue
        if path.is_dir():
            words.append(f"{parent}{path.name}/")
        elif path.suffix == ".toml" and path.name != "pyproject.toml":
            words.append(parent + path.name)
    return words


@_completer
def runs_and_plans(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [*runs(ctx, parameter, typed), *plans(ctx, parameter, typed)]
