"""What supervisor, shim, ranks and command line tell each other: JSON lines and one launch file, versioned.

Standard library alone, because every rank imports it. Instants named `…_s` are readings of CLOCK_BOOTTIME in
seconds: they go on through suspend, no change of the wall clock moves them, and all processes of a machine share them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast, get_args

VERSION = 1
MAX_LINE_BYTES = 1 << 20
MAX_DESCRIPTORS = 253  # the kernel's SCM_MAX_FD
MAX_RANKS, MAX_IMAGE_BYTES = 4096, 1 << 46  # of an attempt; of a rank's share of the state
MAX_METRICS, MAX_METRIC_NAME, MAX_METRICS_BYTES = 1000, 200, 512 << 10
"""Metrics of a run, letters of a name, and all names as JSON: with them a Beat fits a line, and a manifest its bound."""
FILE_NAME = re.compile(r"[\w.-]{1,100}")  # of what an image holds
STAMP_BYTES = 4096  # behind an image: the number of its snapshot, once that is whole
LAUNCH_VARIABLE = "KGORCH_LAUNCH"
KEEPER_SOCKET = "keeper.sock"  # in the run's folder
CACHED = "cached"  # folder of the run's folder: worker/data/value_cache.py
MAX_CACHED_BYTES = (64 << 20) + 1000  # of a value, with the line before it
CACHE_WHOLE = "whole.json"  # in a data cache's folder, while its copy is whole
BOARD_VARIABLE = "KGORCH_BOARD"  # the page of shared memory on which ranks agree, held open by the shim


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Launch:
    """All that the shim and the ranks of one attempt are told; the file `launch.json` of the attempt's folder.

    Attributes:
        resume: the checkpoint folder to go on from; snapshot: the number of the keeper's snapshot, instead of it.
        keeper: its socket. snapshot_s: seconds between two snapshots at least, None for none between saves.
        memory_bytes: the plan's bound on what images take in host memory, None for none.
        settings: of memory, as the plan begins (core/memory.py). ladder: the plan's rungs.
        data: the folder of the local cache of each source, by its absolute path (runtime/datacache.py).
        schedule: what changes before which step, by step: {"step": 40, "settings": {…}}; so a step done again is done as it was.
            What is not about memory: core/health.py.
        changes: the rows that this comes from, as they stand in every manifest (manifest.Change).
        health: `nan`, the plan's remedies; `spike`; `past`, [[step, remedy] …] of those taken.
        extends: the final checkpoint to go on from is trained further: the plan has more epochs now.
        cached: the folder of values that the run computes once (worker/data/value_cache.py); empty where none are kept.
        collective_timeout_s: of the process group; None for none.
        best: the plan's `keep.best`: {"metric": …, "highest": …, "value": …}, the value of the best checkpoint so far or None.
        quick: a quick test: one epoch of one batch, and of every other loader two.
        probe: the same, measured (worker/probe/probe.py).
    """

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
    keeper: str = ""
    snapshot: int | None = None
    snapshot_s: float | None = None
    memory_bytes: int | None = None
    stop_at: int | None = None  # a step of the stage at which every rank saves and stops, asked by nobody
    deterministic: str = "off"
    weights: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    ladder: list[Any] = field(default_factory=list)
    device: str = ""  # what the rungs that are remembered belong to, with the number of ranks
    health: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    extends: bool = False
    cached: str = ""
    collective_timeout_s: float | None = None
    best: dict[str, Any] | None = None
    quick: bool = False
    probe: dict[str, Any] | None = None
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

    def __post_init__(self) -> None:
        """Of metrics that another version, or anybody, may have sent, those that can be stored and shown. A Beat is not refused for
        them: the rank would be cut off and say the same again."""
        kept = [(name, value) for name, value in self.metrics.items() if is_metric(name, value)]
        if len(kept) != len(self.metrics) or len(kept) > MAX_METRICS:
            object.__setattr__(self, "metrics", dict(kept[:MAX_METRICS]))


@dataclass(frozen=True, slots=True)
class Vitals:
    """About once a second, from every rank: figures of itself (docs/json.md names them); what it could not measure is absent."""

    attempt: str
    rank: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """About once a second, from every rank: where it is in its training (core/hang.py), for how long, for how long its main thread
    has not moved, and what each place has taken at most in this attempt, seconds."""

    attempt: str
    rank: int
    where: str
    for_s: float
    still_s: float
    longest: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    """The keeper has put a checkpoint in its place; it is not read back yet.

    `rescued`: from an older snapshot, without the ranks' doing; `took_s` says nothing of their saves then.
    """

    attempt: str
    path: str
    step: int
    bytes: int
    blocking_s: float
    took_s: float
    final: bool = False
    rescued: bool = False


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """`rank`: whose part failed; -1 when it was no rank's."""

    attempt: str
    rank: int
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class Order:
    """To the ranks: `save` and go on, `stop` after a save, `down` or `up` a rung of the memory ladder."""

    what: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """To the ranks: when to stop by themselves should nobody tell them."""

    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """From the command line to a live supervisor: `stop`, `save` or `ping`; to the keeper: see runtime/keeper.py.

    From the daemon `suspend`: save and end within `within_s`, and go on when there is a daemon again.
    """

    what: str
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    ok: bool
    text: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A word for the journal: an event of this `kind` (small letters and underscores) with these facts."""

    attempt: str
    kind: str
    facts: dict[str, str]

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z_]{1,40}", self.kind) or not all(type(item) is str for item in self.facts.values()):
            raise ValueError(f"no kind of event, or facts that are no text: {self.kind!r:.80}")


@dataclass(frozen=True, slots=True)
class RungTaken:
    """From one rank: before this step all ranks went over to these settings (core/memory.py). `up`: a rung was undone."""

    attempt: str
    step: int
    rung: str
    why: str
    settings: dict[str, Any]
    changes_result: bool = False
    up: bool = False


@dataclass(frozen=True, slots=True)
class Remedied:
    """From a rank: all ranks have dropped a step's gradients and made this change of the schedule (core/health.py)."""

    attempt: str
    remedy: str
    why: str
    change: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Room:
    """A rank to the keeper: I need host memory for images of so many bytes. `bound`: the plan's, of all ranks; -1 for none."""

    attempt: str
    run_id: str
    stage: str
    root: str
    rank: int
    ranks: int
    bytes: int
    bound: int = -1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks <= MAX_RANKS or not 0 <= self.bytes <= MAX_IMAGE_BYTES or self.bound < -1:
            raise ValueError(f"no room that can be given: rank {self.rank} of {self.ranks}, {self.bytes} bytes")


@dataclass(frozen=True, slots=True)
class Images:
    """The keeper to a rank: their descriptors come with this line, one a slot.

    With one slot there is none to spare for snapshots between saves. `number`: of this attempt's first snapshot.
    """

    count: int
    bytes: int
    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A rank to the keeper: my image in this slot is whole. `files`: what it holds, as name: [offset, bytes].

    `persist`: it goes to disk. `began_s`: when the ranks were held up, for `blocking_s`.
    """

    attempt: str
    rank: int
    number: int
    slot: int
    step: int
    files: dict[str, list[int]]
    final: bool
    persist: bool
    began_s: float
    blocking_s: float

    def __post_init__(self) -> None:
        if self.number < 1 or self.slot not in (0, 1):
            raise ValueError(f"no snapshot {self.number} in slot {self.slot}")
        for name, span in self.files.items():
            if not FILE_NAME.fullmatch(name) or len(span) != 2 or not all(type(n) is int and n >= 0 for n in span):
                raise ValueError(f"no file of an image: {name!r:.80} at {span!r:.80}")


@dataclass(frozen=True, slots=True)
class Kept:
    """The keeper to the ranks: that snapshot is on disk, or why not."""

    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A file of an attempt's folder that its disk did not take: how a rank, or torchrun, has ended."""

    attempt: str
    name: str
    content: dict[str, Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"rank\d{1,6}\.status\.json|exit\.json", self.name):
            raise ValueError(f"no file that is told: {self.name!r:.80}")


@dataclass(frozen=True, slots=True)
class Held:
    """The newest whole snapshot in the keeper's memory. `shares`: a rank's files each, as in Filled; asked with `fetch`, the
    images' descriptors come with this line."""

    attempt: str
    run_id: str
    stage: str
    step: int
    number: int
    final: bool
    at_s: float
    shares: list[dict[str, list[int]]] = field(default_factory=list)


Message: TypeAlias = (
    Hello | Beat | Vitals | Place | Saved | SaveFailed | Order | Deadline | Ask | Answer | Note | RungTaken | Remedied
    | Room | Images | Filled | Kept | Held | Unwritten
)  # fmt: skip
Told = TypeVar("Told")
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_FITS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "dict[str, float]": (dict,),
    "dict[str, str]": (dict,),
    "dict[str, Any]": (dict,),
    "dict[str, list[int]]": (dict,),
    "list[dict[str, list[int]]]": (list,),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
}


LARGEST = 1 << 62
"""Of steps, bytes, seconds: what a database takes, and none that is no number, which every comparison would let pass."""


def is_metric(name: str, value: Any) -> bool:
    is_number = type(value) is float or (type(value) is int and -LARGEST < value < LARGEST)
    return is_number and len(name) <= MAX_METRIC_NAME and name.isprintable()


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
            raise WireError(f"version {document['v']!r:.80}, expected {VERSION}")
        message: Message = taken(kind, document)
        return message
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"{type(error).__name__}: {error}"[:200]) from None


def taken(kind: type[Told], document: Mapping[str, Any]) -> Told:
    """A `kind`, a dataclass, out of what anybody may have written; fields that it does not have are passed over.

    Raises: WireError.
    """
    given = [item for item in fields(cast("Any", kind)) if item.name in document]
    values = {item.name: _plain(document[item.name]) for item in given}
    for item in given:
        value, fits = values[item.name], _FITS[str(item.type)]
        if not isinstance(value, fits) or (isinstance(value, bool) and bool not in fits):
            raise WireError(f"{kind.__name__}.{item.name}: expected {item.type}, found {value!r:.80}")
        if isinstance(value, int | float) and not -LARGEST < value < LARGEST:
            raise WireError(f"{kind.__name__}.{item.name}: expected a number, found {value!r:.80}")
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise WireError(f"{kind.__name__}: {error}"[:200]) from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {plain_text(key): _plain(item) for key, item in value.items()}
    return plain_text(value) if isinstance(value, str) else value


def plain_text(text: str) -> str:
    """Text that every file and database takes: a lone surrogate (of a file name that is no UTF-8, say) written out."""
    return text.encode("utf-8", "backslashreplace").decode()


class Lines:
    """Cuts a byte stream into lines; a line without an end is refused before it fills the memory."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._rest, self._limit = bytearray(), limit  # grows in place: bytes would be copied whole for each piece

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` ends, oldest first. Takes time in proportion to `data`. Raises: WireError."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray()
        self._rest += rest
        if max(map(len, (*lines, self._rest))) > self._limit:
            raise WireError(f"a line longer than {self._limit} bytes")
        return lines


class WrongOwner(PermissionError):
    """Another user's process listens on a socket where one of this user's is expected."""


def address(path: str | Path) -> tuple[str, int]:
    """A name for a socket file that fits the 108 bytes of `sun_path` however deep its folder lies.

    Returns the name, and the folder's descriptor to close once the call that used the name is done.
    """
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{Path(path).name}", folder


def connect(path: str | Path, *, timeout_s: float = 2.0) -> socket.socket:
    """A connection to this user's process that listens there, or root's.

    Raises: OSError when nobody listens there; WrongOwner, one of these, for another user's process.
    """
    name, folder = address(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        _connect_within(connection, name, timeout_s)
        _, uid = peer_of(connection)
        if not _is_trusted(uid):  # whoever may write into the folder may put a socket there
            raise WrongOwner(errno.EACCES, f"a process of uid {uid} listens there", str(path))
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def _connect_within(connection: socket.socket, name: str, timeout_s: float) -> None:
    """A server's queue may be full for a moment: with a timeout set the kernel does not wait for that by itself."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(name)
            return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(0.01)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as they were when it called listen() or connect()."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _is_trusted(uid: int) -> bool:
    return uid in (os.geteuid(), 0)


def write_whole(place: Path, content: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all. Raises: OSError."""
    aside = place.with_suffix(".part")
    aside.write_text(json.dumps(content))
    aside.rename(place)


def write_down(launch: Launch, name: str, content: dict[str, Any]) -> None:
    """Into the attempt's folder, whole or not at all; told to the supervisor where its disk is full or read-only."""
    try:
        write_whole(Path(launch.folder) / name, content)
    except OSError:
        with contextlib.suppress(OSError), connect(launch.socket) as supervisor:
            send(supervisor, Unwritten(launch.attempt, name, content))


def listen(path: Path) -> socket.socket:
    """A socket at `path` that the owner alone can open, in the place of a dead one's.

    It is there once it listens: who connects as soon as the file exists is not refused.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name, folder = address(aside)
    try:
        server.bind(name)
        aside.chmod(0o600)
        server.listen(128)
        aside.replace(path)
    except OSError:
        server.close()
        raise
    finally:
        os.close(folder)
    return server


def accept(server: socket.socket) -> socket.socket | None:
    """The next connection, non-blocking; None when it is gone again, or is another user's.

    Raises: OSError when no descriptor is free.
    """
    try:
        peer, _ = server.accept()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    if not _is_trusted(peer_of(peer)[1]):
        peer.close()
        return None
    peer.setblocking(False)
    return peer


def send(peer: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """A line, with open files beside its first byte. Raises OSError."""
    line = encode(message)
    if descriptors:
        socket.send_fds(peer, [line[:1]], list(descriptors))
        line = line[1:]
    peer.sendall(line)


def receive(peer: socket.socket, lines: Lines, *, patience_s: float) -> tuple[list[Message], list[int]]:
    """What has come, and the open files that came with it; nothing when nothing comes within `patience_s`.

    The open files are the caller's to close. Raises: OSError when the line is cut; WireError.
    """
    peer.settimeout(patience_s)
    try:
        data, descriptors, _, _ = socket.recv_fds(peer, 65536, MAX_DESCRIPTORS)
    except (TimeoutError, BlockingIOError):
        return [], []
    try:
        if not data:
            raise ConnectionError("closed")
        return [decode(line) for line in lines.feed(data)], descriptors
    except BaseException:
        close_all(descriptors)
        raise


def messages(peer: socket.socket, lines: Lines, *, patience_s: float) -> list[Message]:
    """`receive` for who expects no open files: those that came all the same are closed."""
    found, descriptors = receive(peer, lines, patience_s=patience_s)
    close_all(descriptors)
    return found


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
