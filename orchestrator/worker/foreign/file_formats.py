"""Whether the format of a file proves it whole, or torn: a kill in the middle of a write leaves one that looks finished."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

from kgorch import untrusted_io

MAX_HEADER_BYTES = 64 << 20
"""Of a safetensors header, a zip archive's table of contents, and a JSON document. More is not read and proves nothing."""


def is_whole(folder: Path, name: str) -> bool | None:
    """True for a file that its format proves whole, False for a torn one, None where the format proves nothing.

    Known are zip archives (torch.save, numpy.savez), safetensors and JSON. Only headers and tables of contents are read.
    """
    path = folder / name
    try:
        with untrusted_io.open_file(path.parent, path.name) as file:
            start = untrusted_io.read_at(file, 0, 8)
            size = path.lstat().st_size
            if path.suffix == ".safetensors":
                return _is_whole_safetensors(file, start, size)
            if start.startswith(b"PK\x03\x04"):
                return _is_whole_zip(_BoundedReader(file), size)
            if path.suffix == ".json":
                return _is_whole_json(untrusted_io.read_at(file, 0, size)) if size <= MAX_HEADER_BYTES else None
    except OSError:
        return False
    return None


def _is_whole_safetensors(file: object, start: bytes, size: int) -> bool:
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        return False
    try:
        table = untrusted_io.parse_json(untrusted_io.read_at(file, 8, length))  # type: ignore[arg-type]
        ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
        return all(type(end) is int for end in ends) and bool(8 + length + max(ends, default=0) == size)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False


class _TooLarge(Exception):
    """A read of more than MAX_HEADER_BYTES."""


class _BoundedReader(io.BufferedReader):
    """For `zipfile`, which reads a table of contents as large as the archive says that it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_HEADER_BYTES:
            raise _TooLarge
        return super().read(size)


def _is_whole_zip(file: _BoundedReader, size: int) -> bool | None:
    """The table of contents stands at the end of an archive and is written last."""
    try:
        with zipfile.ZipFile(file) as archive:
            return all(0 <= item.header_offset + item.compress_size <= size for item in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return False
    except _TooLarge:
        return None


def _is_whole_json(content: bytes) -> bool | None:
    """None for what is no JSON though all its brackets and strings are closed: a document a line, comments, too many values."""
    try:
        untrusted_io.parse_json(content)
    except ValueError:
        bare = untrusted_io.JSON_STRING.sub(rb"\1", content)  # of a string that is not closed the quote is left
        opened = bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")
        return False if opened > 0 or b'"' in bare or not bare.strip() else None
    return True
