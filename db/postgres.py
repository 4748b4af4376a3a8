"""What differs where the database is a PostgreSQL: how it is connected, created and described in an error."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Engine, Text, create_engine, event, make_url
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.types import TypeDecorator

from kgorch.errors import DatabaseUnusable, StateUnusable

CONNECT_S = 5
"""Seconds to wait for a connection. Short, because a supervisor writes again later what it cannot write now."""

CONNECTION = {
    "connect_timeout": CONNECT_S,
    # A connection whose peer is gone (a cut cable, a firewall that forgot it) fails after some 20 s instead of two hours.
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "options": "-c timezone=UTC -c lock_timeout=15s -c statement_timeout=60s -c idle_in_transaction_session_timeout=60s",
}

SET_UP_LOCK = 0x6B676F726368  # "kgorch"
"""Key of the advisory lock that whoever creates or migrates the tables holds."""

OLDEST = 14

PASSING_REFUSALS = (
    "starting up",
    "shutting down",
    "not yet accepting",
    "too many clients",
    "too many connections",
    "connection slots",
)
"""In what a server answers to a connection that it will take later (PostgreSQL's postmaster.c, proc.c and postinit.c)."""


class ServerAway(DatabaseUnusable):
    """The server cannot be reached, starts up or takes no connection: a later try may succeed."""


class JsonText(TypeDecorator[Any]):
    """JSON as text, with the same bytes as in SQLite. PostgreSQL's own types refuse NaN, which metrics may be."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def create(url: str) -> Engine:
    """An engine; nothing is connected yet. Raises: StateUnusable."""
    try:
        given = {name: value for name, value in CONNECTION.items() if name not in make_url(url).query}
        engine = create_engine(url, connect_args=given, pool_size=3, max_overflow=17, pool_timeout=CONNECT_S)
    except ModuleNotFoundError as error:
        raise StateUnusable(
            "the database of a fleet needs psycopg",
            str(error),
            next_step="pip install 'kgorch[postgres]'",
            error_code="KG902",
        ) from None
    except (ArgumentError, SQLAlchemyError, ValueError) as error:
        raise StateUnusable(
            "the URL of the fleet's database cannot be read",
            str(error).partition("'")[0].strip(),  # the text after it may hold the password
            next_step="set KGORCH_DATABASE=postgresql+psycopg://USER@HOST/NAME",
            error_code="KG606",
        ) from None
    event.listen(engine, "before_cursor_execute", _without_nul, retval=True)
    return engine


def _without_nul(_: Any, __: Any, statement: str, values: Any, ___: Any, ____: Any) -> tuple[str, Any]:
    """PostgreSQL's text holds no NUL, and what a failed rank printed may."""
    if isinstance(values, dict):
        values = {
            name: value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value
            for name, value in values.items()
        }
    return statement, values


def lock_set_up(connection: Connection) -> None:
    """Until the transaction ends, nobody else creates or migrates the tables. Raises: StateUnusable for an old server."""
    connection.exec_driver_sql("SET LOCAL lock_timeout = '60s'")
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({SET_UP_LOCK})")
    version = connection.exec_driver_sql("SHOW server_version_num").scalar()
    if int(version or 0) < OLDEST * 10_000:
        raise StateUnusable(
            f"the PostgreSQL at {connection.engine.url.render_as_string(hide_password=True)} is too old",
            f"expected version {OLDEST} or newer, found {int(version or 0) // 10_000}",
            next_step=f"upgrade the server to PostgreSQL {OLDEST} or newer",
            error_code="KG606",
        )


def unusable(engine: Engine, error: BaseException) -> StateUnusable:
    """The error for a user whose database cannot be used. The password is not shown."""
    cause = getattr(error, "orig", None) or error
    why = " ".join(str(cause).split())[:400]
    state = str(getattr(cause, "sqlstate", None) or "")
    place = engine.url.render_as_string(hide_password=True)
    kind = ServerAway if isinstance(error, OperationalError) and _is_away(state, why) else StateUnusable
    return kind(
        f"the fleet's database {place} cannot be used", why, next_step=_next_step(state, why), error_code="KG606"
    )


def _is_away(state: str, told: str) -> bool:
    """Whether a later try may succeed. A connection that failed has no SQLSTATE; where the server has answered, it says FATAL."""
    if state:
        return state.startswith(("08", "57P0", "53300"))
    return "FATAL" not in told or any(text in told for text in PASSING_REFUSALS)


def _next_step(state: str, told: str) -> str:
    if state.startswith("28") or "password authentication failed" in told or "no password supplied" in told:
        return "correct user and password in KGORCH_DATABASE, or in ~/.pgpass (mode 0600)"
    if state == "3D000" or ("database" in told and "does not exist" in told):
        return "create it on the server: createdb NAME; or correct the name in KGORCH_DATABASE"
    if state == "53100" or "No space left" in told:
        return (
            "the server's disk is full: make room there. Training continues, and records wait until they can be written"
        )
    if state == "42501":
        return "give its user the right to create tables: GRANT ALL ON SCHEMA public TO USER"
    return (
        "see whether the server runs and can be reached (pg_isready). Sessions that run continue;"
        " their records wait in order"
    )
