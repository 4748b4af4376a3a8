"""Read a session's own record. It comes from a place's disk, so it is read as any foreign file: bounded, strict, without trust."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from kgorch import untrusted_io
from kgorch.checkpoint.json_values import cleaned_line, count, json_list, json_table, text_line, utc_instant
from kgorch.core.names import NAME_PATTERN
from kgorch.core.remote.record_values import RecordOutcome, SessionRecord
from kgorch.remote.place import RECORD_BYTES

FORMAT = 1
MAX_GPUS = 64
MAX_MESSAGE_LINES = 200
NEWER = "it was written by a newer kgorch (format {}): install that one here, too"


def read(path: Path) -> SessionRecord:
    """Raises: OSError; ValueError, which says what is wrong."""
    return parse(untrusted_io.read_all(path.parent, path.name, RECORD_BYTES))


def parse(content: bytes) -> SessionRecord:
    """Raises: ValueError."""
    try:
        return _record(json_table(untrusted_io.parse_json(content)))
    except KeyError as error:
        raise ValueError(f"the record lacks {error}") from None


def _record(table: dict[str, Any]) -> SessionRecord:
    if count(table["format"]) != FORMAT:
        raise ValueError(NEWER.format(table["format"]) if table["format"] > FORMAT else "format 0")
    record = SessionRecord(
        nonce=_match(r"[0-9a-f]{8,64}", table["nonce"]),
        run=_match(NAME_PATTERN, table["run"]),
        run_id=_match(r"[A-Za-z0-9_-]{1,32}", table["run_id"]),
        number=count(table["number"]),
        outcome=RecordOutcome(text_line(table["outcome"])),
        exit_code=_signed(table["exit_code"], -255),
        stage=_match(f"({NAME_PATTERN})?", table["stage"]),
        step=_signed(table["step"], -1),
        checkpoint=_folder(table["checkpoint"]),
        bytes=count(table["bytes"]),
        gpus=tuple(cleaned_line(name) for name in json_list(table["gpus"])[:MAX_GPUS]),
        began_at=utc_instant(table["began_at"]),
        ended_at=utc_instant(table["ended_at"]),
        message=_lines(table["message"]),
    )
    if (
        record.number < 1
        or (record.step >= 0) != bool(record.checkpoint)
        or bool(record.checkpoint) != bool(record.stage)
    ):
        raise ValueError("step, stage and checkpoint of the record, or its number, contradict each other")
    return record


def _match(pattern: str, value: Any) -> str:
    if not re.fullmatch(pattern, text_line(value)):
        raise ValueError(f"expected text such as {pattern}, found {value!r:.80}")
    return str(value)


def _signed(value: Any, least: int) -> int:
    """A whole number from `least`: the status of a process that a signal has killed is negative, and so is "no step"."""
    if type(value) is int and least <= value < 0:
        return value
    return count(value)


def _folder(value: Any) -> str:
    """A path within the output, or nothing."""
    path = PurePosixPath(text_line(value))
    if value and (path.is_absolute() or ".." in path.parts or str(path) != value):
        raise ValueError(f"expected a path within the output, found {value!r:.80}")
    return str(value)


def _lines(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {value!r:.80}")
    return "\n".join(cleaned_line(line) for line in value.splitlines()[-MAX_MESSAGE_LINES:])
