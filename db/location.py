"""Which database is used: SQLite in the state folder, or the PostgreSQL of a fleet.

The environment decides, else the table [fleet] of the user's configuration (plan/user_config.py validates it; it is read here
without pydantic, because `kgorch status` should answer at once):

    [fleet]
    database = "postgresql+psycopg://kgorch@db.example/kgorch"
    machine = "gpu-a"
    lease = "5m"
"""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.core.durations import parse_positive_duration_s
from kgorch.core.names import NAME_PATTERN
from kgorch.errors import ConfigError

LEASE_S = 300.0
"""Seconds without a sign of life after which a machine, or the claimant of a row, counts as dead."""

MAX_BYTES = 1 << 20


class Fleet(NamedTuple):
    """Attributes:
    url: of the PostgreSQL that its machines share; it may hold a password.
    machine: name of this machine, unique in the fleet.
    lease_s: seconds without a sign of life after which a machine counts as dead.
    """

    url: str
    machine: str
    lease_s: float = LEASE_S


def fleet(environ: Mapping[str, str] = os.environ) -> Fleet | None:
    """The fleet of this machine; None where its database is the SQLite file of the state folder.

    Raises: ConfigError.
    """
    table = _table(environ)
    url = environ.get("KGORCH_DATABASE") or table.get("database")
    if not url:
        return None
    if not isinstance(url, str) or url.partition("://")[0] not in ("postgresql", "postgresql+psycopg"):
        raise ConfigError(
            "the database of a fleet is a PostgreSQL",
            f"expected postgresql+psycopg://USER@HOST/NAME, found {str(url).partition(':')[0]}:…",
            next_step="correct KGORCH_DATABASE, or fleet.database of the configuration; without either SQLite is used",
            error_code="KG606",
        )
    name = environ.get("KGORCH_MACHINE") or table.get("machine") or socket.gethostname()
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{str(name)[:80]!r} cannot name a machine of the fleet",
            "expected up to 64 letters, digits, dots, underscores and hyphens",
            next_step="set KGORCH_MACHINE, or fleet.machine of the configuration",
            error_code="KG606",
        )
    return Fleet("postgresql+psycopg" + url[url.index("://") :], name, _lease_s(table.get("lease", LEASE_S)))


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's configuration: `$KGORCH_CONFIG`, else `$XDG_CONFIG_HOME/kgorch/config.toml`."""
    if variable := environ.get("KGORCH_CONFIG"):
        return Path(variable).expanduser()
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(base) / "kgorch" / "config.toml"


def _table(environ: Mapping[str, str]) -> dict[str, Any]:
    """The table [fleet]. A file that cannot be read or parsed has none: whoever reads all of it reports that."""
    try:
        with open(config_path(environ), "rb") as file:
            table = tomllib.loads(file.read(MAX_BYTES).decode("utf-8-sig")).get("fleet", {})
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _lease_s(value: Any) -> float:
    try:
        lease_s = parse_positive_duration_s(value)
    except ValueError as error:
        raise ConfigError(f"fleet.lease: {error}; found {value!r:.80}", error_code="KG606") from None
    if lease_s < 1.0:
        raise ConfigError(f"fleet.lease: expected at least 1s, found {value!r:.80}", error_code="KG606")
    return lease_s
