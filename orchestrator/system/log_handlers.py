"""Where the log goes: to the journal with its fields when systemd started us, else to rotated files in the state folder.

    logging.getLogger("kgorch.daemon").info("resumed", extra={"run": name, "session": number})

The journal's own protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL) is one datagram; its Python libraries need libsystemd
and, but for one, a compiler. Whatever looks like a secret is masked before it is written, in both places.
"""

from __future__ import annotations

import array
import errno
import faulthandler
import fcntl
import logging
import logging.handlers
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

JOURNAL = "/run/systemd/journal/socket"
FILE_BYTES, FILES = 5 * 2**20, 5
MASK = "***"
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# Both begin at a word's beginning alone and give nothing back: a line may be a word of a megabyte.
_ASSIGNED = re.compile(
    r"(?i)(?<![\w.-])(?=[\w.-]*?(?:token|key|secret|passw|credential))([\w.-]++[\"']?\s*+[=:]\s*+[\"']?+)([^\s\"',;&]+)"
)
_URL = re.compile(r"(?<!\w)(\w++://)(?:[^\s/?#]*@)?([^\s?#\"'<>]*)(\?[^\s#\"'<>]*)?")
# syslog(3)
_PRIORITY = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


def configure(home: Path, *, name: str = "daemon", environ: Mapping[str, str] = os.environ) -> None:
    """Send what `kgorch` and its parts log to the journal, or to `logs/NAME.log` under `home`.

    A log that cannot be opened (read-only or full folder) goes to stderr: the work goes on. A crash of the interpreter,
    and the SIGABRT by which systemd ends a daemon that hangs, print every thread's stack on stderr.
    """
    logger = logging.getLogger("kgorch")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handler = _handler(home, name, environ)
    handler.addFilter(Masking(secrets_of(environ)))
    logger.addHandler(handler)
    logging.raiseExceptions = False  # a full disk would print a traceback for every line
    faulthandler.enable(2)


def is_journal(environ: Mapping[str, str] = os.environ, descriptor: int = 2) -> bool:
    """Whether stderr is the journal: systemd names its device and inode, since the variable alone is inherited further."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The values of variables whose names say that they are secret; short ones would mask half of every line."""
    found = {value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= 6}
    return sorted(found, key=len, reverse=True)


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without secrets, without `token=…` and the like, without the user and the query of an address."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    text = _URL.sub(lambda found: found[1] + found[2] + ("?" + MASK if found[3] else ""), text)
    return _ASSIGNED.sub(rf"\1{MASK}", text)


class Masking(logging.Filter):
    """Masks the message as it will be written, with its arguments and its traceback."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        self._secrets = tuple(secrets)

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.exc_info and record.exc_info[0]:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_info, record.exc_text = masked(text, self._secrets), (), None, None
        return True


class Journal(logging.Handler):
    """One datagram a record, with run and session as fields: `journalctl KGORCH_RUN=surface-demo`."""

    def __init__(self, address: str = JOURNAL) -> None:
        super().__init__()
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(1)

    def emit(self, record: logging.LogRecord) -> None:
        entry = _entry(record)
        try:
            try:
                self._socket.sendto(entry, self._address)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                self._send_large(entry)
        except OSError:  # the journal is away; systemd takes stderr, too
            print(record.getMessage(), file=sys.stderr)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _send_large(self, entry: bytes) -> None:
        """What is too long for a datagram goes as a sealed file in memory, as the protocol asks."""
        descriptor = os.memfd_create("kgorch-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(entry)
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            self._socket.sendmsg([], handed, 0, self._address)  # socket.send_fds forgets the address (Python 3.11)
        finally:
            os.close(descriptor)


class Plain(logging.Formatter):
    """`2026-11-21T14:45:27Z INFO kgorch.daemon [surface-demo 3] resumed`"""

    def format(self, record: logging.LogRecord) -> str:
        about = " ".join(str(record.__dict__[key]) for key in ("run", "session") if key in record.__dict__)
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = record.getMessage().replace("\n", "\n    ")  # a line of its own begins with a date
        return f"{at} {record.levelname} {record.name} " + (f"[{about}] " if about else "") + text


def _handler(home: Path, name: str, environ: Mapping[str, str]) -> logging.Handler:
    if is_journal(environ):
        return Journal()
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
        handler.setFormatter(Plain())
        print(f"kgorch: no log file, it goes here instead: {error}", file=sys.stderr)
    handler.setFormatter(Plain())
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
    """A value of several lines is told with its length, little-endian in eight bytes."""
    if b"\n" not in value:
        return key.encode() + b"=" + value + b"\n"
    return key.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
