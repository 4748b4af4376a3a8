"""Notices what other processes do with the database: a commit, or another file at its path."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.db.engine import file_ids, open_url

FLEET_POLL_S = 2.0
"""Seconds between two looks at the queue of a fleet: fifty daemons then ask the server for 25 looks a second."""


class DatabaseWatch:
    """The database of a daemon that runs for months. Before `open`, every call of `has_changed` is True.

    Attributes:
        engine: of the file that is at the path now. Read it anew for each use: `reopen_if_replaced` replaces it.
    """

    def __init__(self, engine: Engine, home: Path) -> None:
        self.engine, self._home = engine, home
        self._data_version: Any = None
        self._looked_s = float("-inf")
        self._file_ids: tuple[tuple[int, int] | None, ...] = ()

    @property
    def _is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def open(self) -> None:
        """Open the connection that watches. It stays open: SQLite deletes the log when the last connection closes, so a log
        that is missing or new was replaced by a person."""
        if not self._is_sqlite:
            return
        self._connection = self.engine.raw_connection()
        self.has_changed()
        self._file_ids = file_ids(self.engine)

    def has_changed(self) -> bool:
        """Whether any other connection has committed since the last call; True where that cannot be determined.

        A PostgreSQL is not asked: a fleet commits all the time. The queue is then looked at every FLEET_POLL_S.
        """
        if not self._is_sqlite:
            is_due = time.monotonic() - self._looked_s >= FLEET_POLL_S
            self._looked_s = time.monotonic() if is_due else self._looked_s
            return is_due
        # A pragma instead of a query of the tables: an idle daemon asks twice a second. Only the connection that asked before
        # can tell, for the number that it returns is the connection's own.
        try:
            cursor = self._connection.cursor()
            cursor.execute("PRAGMA data_version")
            version: Any = cursor.fetchone()
            cursor.close()
        except Exception:
            return True
        before, self._data_version = self._data_version, version
        return bool(version != before)

    def reopen_if_replaced(self) -> bool:
        """Open the file that is at the path now, if it is another one. True where it was.

        Connections to a file that was moved away go on without an error: the daemon would never see a run of the new file.

        Raises: FileNotFoundError while there is none; as open_url.
        """
        if not self._is_sqlite or not self._file_ids or (ids := file_ids(self.engine)) == self._file_ids:
            return False
        if ids[0] is None:
            raise FileNotFoundError(f"{self.engine.url.database} is missing; kgorch start PLAN creates it again")
        self._connection.close()
        self.engine.dispose()
        self.engine = open_url(self.engine.url, self._home)
        self.open()
        return True
