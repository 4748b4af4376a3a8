"""What supervisor, shim, ranks and command line tell each other: JSON lines and one launch file, versioned.

Standard library alone, because every rank imports it. Instants named `…_s` are readings of CLOCK_BOOTTIME in
seconds: they go on through suspend, no change of the wall clock moves them, and all processes of a machine share them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

VERSION = 1
MAX_LINE_BYTES = 1 << 20
LAUNCH_VARIABLE = "KGORCH_LAUNCH"
BOARD_VARIABLE = "KGORCH_BOARD"  # the page of shared memory on which ranks agree, held open by the shim


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Launch:
    """All that the shim and the ranks of one attempt are told; the file `launch.json` of the attempt's folder."""

    run: str
    run_id: str
    stage: str
    attempt: str
    folder: str
    entry: str
    workdir: str
    ranks: int
    socket: str
    checkpoints: str
    output: str
    plan_hash: str
    seed: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    wall_s: float | None = None
    deadline_s: float | None = None
    microbatch: int | None = None
    weights: dict[str, Any] | None = None
    version: int = VERSION

    def write(self) -> Path:
        path = Path(self.folder) / "launch.json"
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    @staticmethod
    def read(path: str | Path) -> Launch:
        document = json.loads(Path(path).read_text())
        if document.get("version") != VERSION:
            raise WireError(f"{path}: launch version {document.get('version')!r}, expected {VERSION}")
        return Launch(**document)


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank has attached; `ready` once it tracks its state and is about to step."""

    attempt: str
    rank: int
    pid: int
    step: int
    state_bytes: int
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """About once a second, from rank 0: where the training stands.

    `gap_s` is the longest of the recent times between two steps (an evaluation counts as one), `steps_total` is 0 while unknown.
    """

    attempt: str
    epoch: int
    step: int
    samples: int
    gap_s: float
    step_s: float
    steps_total: int = 0
    epochs_total: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """Rank 0 has put a checkpoint in its place; it is not read back yet."""

    attempt: str
    path: str
    step: int
    bytes: int
    blocking_s: float
    took_s: float
    final: bool = False


@dataclass(frozen=True, slots=True)
class SaveFailed:
    attempt: str
    rank: int
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class Note:
    """A rank's word for the journal: an event of this `kind` (small letters and underscores) with these facts."""

    attempt: str
    kind: str
    facts: dict[str, str]

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z_]{1,40}", self.kind) or not all(type(item) is str for item in self.facts.values()):
            raise ValueError(f"no kind of event, or facts that are no text: {self.kind!r:.80}")


@dataclass(frozen=True, slots=True)
class Order:
    """To the ranks: `save` and go on, or `stop` after a save."""

    what: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """To the ranks: when to stop by themselves should nobody tell them."""

    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """From the command line to a live supervisor: `stop`, `save` or `ping`."""

    what: str


@dataclass(frozen=True, slots=True)
class Answer:
    ok: bool
    text: str = ""


Message: TypeAlias = Hello | Beat | Saved | SaveFailed | Note | Order | Deadline | Ask | Answer
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Hello, Beat, Saved, SaveFailed, Note, Order, Deadline, Ask, Answer)
}
_FITS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "dict[str, float]": (dict,),
    "dict[str, str]": (dict,),
    "float | None": (int, float, type(None)),
}


class WireError(Exception):
    """The other side sent what this version cannot read."""


def encode(message: Message) -> bytes:
    return json.dumps({"v": VERSION, "message": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """A message out of a line that may come from anybody. Unknown fields are passed over: a newer side may send more.

    Raises: WireError.
    """
    try:
        document = json.loads(line)
        kind = _KINDS[document["message"]]
        if document["v"] != VERSION:
            raise WireError(f"version {document['v']!r}, expected {VERSION}")
        values = {item.name: document[item.name] for item in fields(kind) if item.name in document}
        values = {name: _plain(value) for name, value in values.items()}
        for item in fields(kind):
            fits = _FITS[str(item.type)]
            if item.name in values and (
                not isinstance(values[item.name], fits) or (isinstance(values[item.name], bool) and bool not in fits)
            ):
                raise WireError(f"{kind.__name__}.{item.name}: expected {item.type}, found {values[item.name]!r:.80}")
        message: Message = kind(**values)
        return message
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"{type(error).__name__}: {error}"[:200]) from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {plain_text(key): _plain(item) for key, item in value.items()}
    return plain_text(value) if isinstance(value, str) else value


def plain_text(text: str) -> str:
    """Text that every file and database takes: a lone surrogate (of a file name that is no UTF-8, say) written out."""
    return text.encode("utf-8", "backslashreplace").decode()


class Lines:
    """Cuts a byte stream into lines; a line without an end is refused before it fills the memory."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise WireError(f"a line longer than {MAX_LINE_BYTES} bytes")
        return lines


def address(path: str | Path) -> tuple[str, int]:
    """A name for a socket file that fits the 108 bytes of `sun_path` however deep its folder lies.

    Returns the name, and the folder's descriptor to close once the call that used the name is done.
    """
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{Path(path).name}", folder


def connect(path: str | Path, *, timeout_s: float = 2.0) -> socket.socket:
    """Raises OSError when nobody listens there."""
    name, folder = address(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(name)
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection
