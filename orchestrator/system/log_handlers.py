"""Destination of the log: the journal, with fields, when systemd started this process, else rotated files in the state folder.

    logging.getLogger("kgorch.daemon").info("resumed", extra={"run": name, "session": number})

The journal's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL) is one datagram; its Python libraries need libsystemd
and, all but one, a compiler. Whatever looks like a secret is redacted before it is written to either destination.
"""

from __future__ import annotations

import array
import errno
import faulthandler
import fcntl
import logging
import logging.handlers
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kgorch.system import redaction

JOURNAL = "/run/systemd/journal/socket"
FILE_BYTES, FILES = 5 * 2**20, 5
# syslog(3)
_PRIORITY = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


def configure(home: Path, *, name: str = "daemon", environ: Mapping[str, str] = os.environ) -> None:
    """Send what the logger `kgorch` and its children log to the journal, or to `logs/NAME.log` under `home`.

    A log that cannot be opened (read-only or full folder) goes to stderr, and the process goes on. A crash of the
    interpreter, and the SIGABRT by which systemd ends a daemon that hangs, print every thread's stack on stderr.
    """
    logger = logging.getLogger("kgorch")
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library may have configured the root logger: lines would come twice
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handler = _handler(home, name, environ)
    handler.addFilter(RedactingFilter(redaction.secret_values(environ)))
    logger.addHandler(handler)
    logging.raiseExceptions = False  # a full disk would print a traceback for every line
    faulthandler.enable(2)


def is_journal(environ: Mapping[str, str] = os.environ, descriptor: int = 2) -> bool:
    """Whether stderr is the journal. The variable is inherited by all children, so its device and inode are compared."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class RedactingFilter(logging.Filter):
    """Redacts the message as it will be written, with its arguments and its traceback."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        self._secrets = tuple(secrets)

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.exc_info and record.exc_info[0]:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        record.msg, record.args = redaction.redact(text, self._secrets), ()
        record.exc_info = record.exc_text = None
        return True


class JournalHandler(logging.Handler):
    """Sends one datagram a record, with run and session as fields: `journalctl KGORCH_RUN=surface-demo`."""

    def __init__(self, address: str = JOURNAL) -> None:
        super().__init__()
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(1)  # a journald that hangs must not hold up the process

    def emit(self, record: logging.LogRecord) -> None:
        entry = _entry(record)
        try:
            try:
                self._socket.sendto(entry, self._address)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                self._send_large(entry)
        except OSError:  # journald is not running; systemd collects stderr, too
            print(record.getMessage(), file=sys.stderr)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _send_large(self, entry: bytes) -> None:
        """Send what is too long for a datagram as a sealed file in memory, as the protocol requires."""
        descriptor = os.memfd_create("kgorch-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(entry)
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            self._socket.sendmsg([], ancillary, 0, self._address)  # socket.send_fds forgets the address (Python 3.11)
        finally:
            os.close(descriptor)


class LineFormatter(logging.Formatter):
    """Formats as `2026-11-21T14:45:27Z INFO kgorch.daemon [surface-demo 3] resumed`."""

    def format(self, record: logging.LogRecord) -> str:
        context = " ".join(str(record.__dict__[key]) for key in ("run", "session") if key in record.__dict__)
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = record.getMessage().replace("\n", "\n    ")  # only the first line of an entry begins with a date
        return f"{at} {record.levelname} {record.name} " + (f"[{context}] " if context else "") + text


def _handler(home: Path, name: str, environ: Mapping[str, str]) -> logging.Handler:
    if is_journal(environ):
        return JournalHandler()
    try:
        folder = home / "logs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler: logging.Handler = logging.handlers.RotatingFileHandler(
            folder / f"{name}.log",
            maxBytes=FILE_BYTES,
            backupCount=FILES - 1,
            encoding="utf-8",
            errors="backslashreplace",
        )
    except OSError as error:
        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter())
        print(f"kgorch: no log file, logging to stderr instead: {error}", file=sys.stderr)
    handler.setFormatter(LineFormatter())
    return handler


def _entry(record: logging.LogRecord) -> bytes:
    fields = {
        "MESSAGE": record.getMessage(),
        "PRIORITY": str(_PRIORITY.get(record.levelno, 6)),
        "SYSLOG_IDENTIFIER": "kgorch",
        "KGORCH_LOGGER": record.name,
        "CODE_FILE": record.pathname,
        "CODE_LINE": str(record.lineno),
        "CODE_FUNC": record.funcName or "",
    }
    fields |= {
        f"KGORCH_{key.upper()}": str(record.__dict__[key]) for key in ("run", "session") if key in record.__dict__
    }
    return b"".join(_field(key, value.encode("utf-8", "replace")) for key, value in fields.items())


def _field(key: str, value: bytes) -> bytes:
    """One field of an entry; a value of several lines is preceded by its length, eight bytes little-endian."""
    if b"\n" not in value:
        return key.encode() + b"=" + value + b"\n"
    return key.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
