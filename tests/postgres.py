"""A real PostgreSQL for tests: Debian's, in a folder of its own, on a unix socket."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg
from harness import wait_until

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[-2]))
IS_INSTALLED = bool(_BINARIES)
TEMPLATE = "kgorch_template"


class PostgresServer:
    """A server that runs until `remove`. As root it runs as the user `postgres`, for it refuses to run as root.

    Attributes:
        folder: of its data and its socket. Short, because a socket's path has at most 107 characters.
    """

    def __init__(self, *, durable: bool = False, port: int | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kgpg-", dir="/tmp"))
        self._binaries = _BINARIES[-1]
        self._numbers = itertools.count(1)
        self._as_owner: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres", "postgres")
            self.folder.chmod(0o755)  # so that tests, and sessions of other users, reach the socket
            self._as_owner = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self._run(
            "initdb", "-D", str(self.data), "-U", "kgorch", "--auth=trust", "--no-sync", "-E", "UTF8", "--no-locale"
        )
        lines = [
            f"unix_socket_directories = '{self.folder}'", "max_connections = 200", "shared_buffers = 32MB",
            f"listen_addresses = '{'127.0.0.1' if port else ''}'", *([f"port = {port}"] if port else []),
            # its commits outlive its processes all the same, as tests expect that kill them
            *([] if durable else ["fsync = off", "full_page_writes = off"]),
        ]  # fmt: skip
        with open(self.data / "postgresql.conf", "a") as file:
            file.write("\n".join(["", *lines, ""]))
        self.port = port or 5432
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*self._as_owner, str(self._binaries / "postgres"), "-D", str(self.data)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
            )  # fmt: skip
        wait_until(self.is_ready, within_s=60, what="PostgreSQL accepts connections")

    def is_ready(self) -> bool:
        try:
            psycopg.connect(host=str(self.folder), port=self.port, user="kgorch", dbname="postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT: its fast shutdown; SIGQUIT: at once, without a checkpoint; SIGKILL: as a power cut."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(timeout=60)
            if number == signal.SIGKILL:  # its children notice after a moment; until then a new server refuses to start
                wait_until(lambda: not self._children(), within_s=60, what="the server's processes have ended")
                (self.data / "postmaster.pid").unlink(missing_ok=True)

    def execute(self, *statements: str, database: str = "postgres") -> None:
        with psycopg.connect(
            host=str(self.folder), port=self.port, user="kgorch", dbname=database, autocommit=True
        ) as connection:
            for statement in statements:
                connection.execute(statement)

    def url(self, database: str, user: str = "kgorch") -> str:
        return f"postgresql+psycopg://{user}@/{database}?host={self.folder}&port={self.port}"

    def empty_database(self) -> str:
        """The URL of a new database without tables."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def new_database(self) -> str:
        """The URL of a new database with the tables of the newest revision, copied from a template."""
        name = f"test_{next(self._numbers)}"
        if not self._has_template:
            from kgorch.db.engine import open_fleet
            from kgorch.db.location import Fleet

            self.execute(f"CREATE DATABASE {TEMPLATE}")
            open_fleet(Fleet(self.url(TEMPLATE), "template"), Path("/nowhere")).dispose()
            self._has_template = True
        self.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        return self.url(name)

    _has_template = False

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _children(self) -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(self.data) in str((entry.parent / "cwd").readlink()):
                    found.append(entry.parent.name)
            except OSError:
                continue
        return found

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [*self._as_owner, str(self._binaries / program), *arguments],
            check=True, stdout=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
