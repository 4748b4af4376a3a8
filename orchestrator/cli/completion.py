"""What the shell offers after TAB. Each answer is looked up in the time between two keystrokes.

So the database is read by the standard library's sqlite3, read-only: SQLAlchemy takes longer to import than a person waits, and
nothing is made or migrated because somebody pressed TAB. Whatever goes wrong, nothing is offered and nothing is said.
"""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

Completer = Callable[[click.Context, click.Parameter, str], list[str]]

PATIENCE_S = 0.2
"""For a writer that holds the database."""

MOST = 100


def _quietly(complete: Completer) -> Completer:
    @functools.wraps(complete)
    def offered(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
        try:
            return [word for word in complete(ctx, parameter, typed) if word.startswith(typed)][:MOST]
        except Exception:  # completion never disturbs a shell
            return []

    return offered


def _query(statement: str, *values: object) -> list[tuple[Any, ...]]:
    from orchestrator.platforms.detect import detect
    from orchestrator.system.paths import state_home

    path = state_home(detect().home) / "kgorch.db"
    if not path.is_file():
        return []
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=PATIENCE_S)) as connection:
        return connection.execute(statement, values).fetchall()


@_quietly
def runs(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Names of runs; those that are typed already are not offered again."""
    name, slash, _ = typed.rpartition("/")
    if slash:
        numbers = _query("SELECT number FROM runs WHERE name = ? ORDER BY number DESC LIMIT ?", name, MOST)
        return [f"{name}/{number}" for (number,) in numbers]
    taken = ctx.params.get(parameter.name or "")
    found = _query("SELECT DISTINCT name FROM runs WHERE name >= ? ORDER BY name LIMIT ?", typed, MOST)
    return [name for (name,) in found if not isinstance(taken, tuple) or name not in taken]


@_quietly
def metrics(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Metrics that the run has reported, of the newest run where none is typed."""
    run = ctx.params.get("run")
    chosen = (
        ("SELECT id FROM runs WHERE name = ? ORDER BY number DESC LIMIT 1", run)
        if run
        else ("SELECT id FROM runs ORDER BY created_at DESC LIMIT 1",)
    )
    [(run_id,)] = _query(*chosen)
    newest = _query("SELECT metrics FROM sessions WHERE run_id = ? ORDER BY number DESC LIMIT 10", run_id)
    return sorted({name for (kept,) in newest for name in json.loads(kept)})


@_quietly
def plan_keys(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Keys of a plan, as the template explains them."""
    from orchestrator.cli.template import key_help

    return list(key_help())


@_quietly
def settings(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """KEY= for --set: keys of a plan, and the arguments of its stages by the names that they have there."""
    from orchestrator.cli.template import key_help

    keys = [entry.key for entry in key_help().values() if entry.example and not entry.key.startswith("stage.")]
    return [f"{key}=" for key in (*keys, *_of_stages(Path(ctx.params.get("plan") or "plan.toml")))]


def _of_stages(plan: Path) -> Iterator[str]:
    import tomllib

    if not plan.is_file() or plan.stat().st_size > 1 << 20:
        return
    for stage in tomllib.loads(plan.read_text(encoding="utf-8-sig"))["stage"]:
        for key in ("ranks", "entry", "weights"):
            yield f"stage.{stage['name']}.{key}"
        for argument in stage.get("args", {}):
            yield f"stage.{stage['name']}.args.{argument}"


@_quietly
def plans(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """TOML files, and folders on the way to them."""
    folder, _, beginning = typed.rpartition("/")
    above = f"{folder}/" if "/" in typed else ""
    found = []
    for path in sorted(Path(above or ".").iterdir()):
        if not path.name.startswith(beginning) or (path.name.startswith(".") and not beginning):
            continue
        if path.is_dir():
            found.append(f"{above}{path.name}/")
        elif path.suffix == ".toml" and path.name != "pyproject.toml":
            found.append(above + path.name)
    return found


@_quietly
def runs_and_plans(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [*runs(ctx, parameter, typed), *plans(ctx, parameter, typed)]
